"""Learner: turns batches into published weights.

    batch of version v ──► mask what is too old ──► algorithm.update(fragments, v) ──► publish(v + 1)

The algorithm moves the tensors of fragments to the device of its policy, unless they are there.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied.core.algorithm import SINGLE_PROCESS, Algorithm, Metrics, ProcessGroup
from embodied.core.device import copied_to_cpu
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.types import Fragment
from embodied.runtime.channel import WeightStore
from embodied.runtime.watch import Track


class Learner:
    """Updates the policy and publishes its weights.

    mask_above: age, versions, above which decisions count for nothing; None masks none. iteration: batches consumed,
    which is also the version of the weights. env_steps: control steps consumed, without masked ones. ``track`` also
    counts decisions by their age at the update (``staleness/<n>``). learners: the processes of which this is one; each
    learns from its own fragments of every batch. UserError if the algorithm cannot do that.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        store: WeightStore,
        mask_above: int | None = None,
        learners: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        if learners.size > 1:
            if algorithm.learners is None:
                name = type(algorithm).__name__
                raise UserError(f"runtime.num_learners={learners.size}: {name} cannot share an update; allowed: 1")
            algorithm.learners = learners
        self.algorithm, self.store, self.learners = algorithm, store, learners
        self.mask_above = mask_above
        self.incarnation = self.iteration = self.env_steps = 0
        self.track = Track("learner", "other")

    @property
    def version(self) -> int:
        """Version of the newest published weights; -1 if there are none."""
        return self.store.version

    @property
    def deployed(self) -> Policy:
        return self.algorithm.deployed

    def deployed_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights to evaluate and to keep, on the CPU."""
        return copied_to_cpu(self.deployed.state_dict())

    def publish(self) -> None:
        """Publish the present weights. Call it once before anything acts; later ``learn`` calls it."""
        with self.track.during("publish"):
            self.store.publish(self.iteration, self.algorithm.policy.state_dict(), self._frozen())

    def learn(self, fragments: Sequence[Fragment]) -> Metrics:
        """Update on one batch and, in process 0, publish; return the algorithm's metrics. fragments: of this process.

        With ``mask_above``, ``async/dropped`` counts the decisions that it or the algorithm masked for their age.
        """
        with self.track.during("learn"):
            batch = list(fragments)
            if self.mask_above is not None:
                batch = [mask_before(fragment, self.iteration - self.mask_above) for fragment in batch]
            ages = torch.cat([self.iteration - fragment.version_TN[fragment.num_steps_TN > 0] for fragment in batch])
            for age, count in zip(*(column.tolist() for column in ages.unique(return_counts=True)), strict=True):
                self.track.add(f"staleness/{age}", count)
            metrics = self.algorithm.update(batch, self.iteration)
            decisions = sum(int((fragment.num_steps_TN > 0).sum()) for fragment in fragments)
            env_steps = sum(fragment.num_env_steps for fragment in batch)
            env_steps, dropped = self._over_all(env_steps, decisions - len(ages))
            if self.mask_above is not None:
                metrics = {**metrics, "async/dropped": metrics.get("async/dropped", 0.0) + dropped}
            self.iteration += 1
            self.env_steps += env_steps
            if self.learners.rank == 0:  # nobody reads the stores of the others
                self.publish()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with keys policy, algorithm, counters, and generator: torch's global one, on the CPU."""
        return {
            "policy": self.deployed_weights(),
            "algorithm": self.algorithm.state_dict(),
            "counters": {"iteration": self.iteration, "env_steps": self.env_steps},
            "generator": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. UserError for a policy of another architecture."""
        try:
            self.deployed.load_state_dict(state["policy"])
        except RuntimeError as error:
            raise UserError(f"the checkpoint's policy is not the one of this configuration: {error}") from error
        self.algorithm.load_state_dict(state["algorithm"])
        self.iteration = state["counters"]["iteration"]
        self.env_steps = state["counters"]["env_steps"]
        if "generator" in state:  # earlier versions did not save it
            torch.set_rng_state(state["generator"])

    def _frozen(self) -> set[str]:
        policy = self.algorithm.policy
        return {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}

    def _over_all(self, *counts: int) -> tuple[int, ...]:
        """Return the sums of counts over the learner processes. RuntimeError if their weights differ."""
        if self.learners.size == 1:
            return counts
        own, frozen = 0, self._frozen()
        for name, tensor in self.algorithm.policy.state_dict().items():
            if name not in frozen:
                own = zlib.crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data, own)
        *sums, total = self.learners.sum(torch.tensor([*counts, own])).tolist()
        if total != own * self.learners.size:
            raise RuntimeError(f"learner processes have different weights after update {self.iteration}")
        return tuple(sums)


def mask_before(fragment: Fragment, oldest: int) -> Fragment:
    """Mask decisions by older weights than version ``oldest`` and all before them, as advantages look forward."""
    old_TN = fragment.version_TN < oldest
    if not old_TN.any():
        return fragment
    old_from_here_TN = old_TN.long().flip(0).cummax(0).values.flip(0).bool()
    return replace(fragment, num_steps_TN=fragment.num_steps_TN.masked_fill(old_from_here_TN, 0))
