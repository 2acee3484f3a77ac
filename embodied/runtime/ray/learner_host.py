"""What runs in a learner's process of Ray: the learner, or one of several that make each update together.

controller ── learn(its fragments, by reference) ──► process 0: updates, puts weights
    └──────── assist(its fragments, by reference) ──► process r: makes the same update     (algos/sharing.py)
                                                      └── sums over all processes (collective.py)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from torch import Tensor

from embodied.core.algorithm import SINGLE_PROCESS, Metrics, ProcessGroup
from embodied.core.policy import Policy
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.learner import Learner
from embodied.runtime.ray.collective import Collective, Rendezvous, open_store
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.ray.hosts import Host, node_id
from embodied.runtime.ray.messages import Assisted, Built, Learned
from embodied.runtime.ray.weights import Publisher
from embodied.runtime.ray.wire import fetch
from embodied.runtime.recipe import Recipe
from embodied.runtime.weight_store import WeightStore


class LearnerHost(Host):
    """A learner. policy: the initial one. rng_state: of torch's generator after it was built. rank: of the process."""

    def __init__(
        self,
        recipe: Recipe,
        incarnation: int,
        policy: Policy,
        rng_state: Tensor,
        budget: threads.ThreadBudget,
        rank: int = 0,
    ) -> None:
        super().__init__(recipe)
        self.policy, self.rng_state, self.budget, self.rank = policy, rng_state, budget, rank
        self.config = RayConfig.of(recipe.config)
        self.publisher = Publisher(incarnation)
        self._others_idle = False

    async def open_store(self) -> Rendezvous:
        """Let the other processes find this one, which has rank 0."""
        address = ray.util.get_node_ip_address()
        self._store, rendezvous = open_store(address, self.config.start_timeout_s)
        return rendezvous

    async def build(self, rendezvous: Rendezvous | None = None) -> Built:
        """Build algorithm and learner. rendezvous: of several processes. UserError if they cannot share an update."""
        self.learner = await self._run("builds the algorithm", self._build, rendezvous)
        self.learner.track.enter("wait_controller")
        self._record([self.learner.track])
        return Built(node_id(), os.getpid())

    async def publish(self) -> Learned:
        """Publish the present weights."""
        return await self._run("publishes", self._publish)

    async def learn(self, fragments: Sequence[Any]) -> Learned:
        """Update on the fragments of one batch, given by reference, and publish.

        Fragments that were lost with their node are left out; ``async/lost`` counts them.
        """
        fetched = await self._fetch(fragments)
        learned = await self._run(f"learns from batch {self.learner.iteration}", self._learn, fetched)
        return replace(learned, metrics=learned.metrics | {"async/lost": float(len(fragments) - len(fetched))})

    async def assist(self, fragments: Sequence[Any]) -> Assisted:
        """Make the update of ``learn`` of process 0 together with it, on other fragments of the batch."""
        fetched = await self._fetch(fragments)
        totals = await self._run(f"learns from batch {self.learner.iteration}", self._assist, fetched)
        return Assisted(float(len(fragments) - len(fetched)), totals)

    async def set_others_idle(self, others_idle: bool) -> None:
        """Say whether all other parts are idle, so that the learner can use their cores."""
        self._others_idle = others_idle

    async def deployed_weights(self) -> dict[str, Tensor]:
        """Return the weights to evaluate and to keep."""
        return await self._run("copies weights", self.learner.deployed_weights)

    async def state_dict(self) -> dict[str, Any]:
        """Return the learner's state."""
        return await self._run("saves its state", self.learner.state_dict)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        await self._run("loads a state", self.learner.load_state_dict, copy.deepcopy(state))

    async def _fetch(self, fragments: Sequence[Any]) -> list[Fragment]:
        self._begin(f"fetches batch {self.learner.iteration}")
        with self.learner.track.during("fetch"):
            return await fetch(fragments)

    def _build(self, rendezvous: Rendezvous | None) -> Learner:
        threads.use(self.budget.learner)
        policy = copy.deepcopy(self.policy)
        policy.to(self.recipe.device)
        torch.set_rng_state(self.rng_state.clone())
        self.store = WeightStore()
        recipe = self.recipe
        algorithm = recipe.make_algorithm(policy)
        return Learner(algorithm, self.store, recipe.relabel, recipe.config.mask_above, self._join(rendezvous))

    def _join(self, rendezvous: Rendezvous | None) -> ProcessGroup:
        if rendezvous is None:
            return SINGLE_PROCESS
        config, address = self.config, ray.util.get_node_ip_address()
        return Collective(
            rendezvous,
            self.rank,
            config.num_learners,
            address=address,
            device=self.recipe.device,
            timeout_s=config.update_timeout_s,
        )

    def _update(self, fragments: Sequence[Fragment]) -> Metrics:
        with threads.using_idle_cores(self.budget.learner, self.budget.learner_alone, lambda: self._others_idle):
            return self.learner.learn(fragments)

    def _learn(self, fragments: Sequence[Fragment]) -> Learned:
        return self._learned(self._update(fragments))

    def _assist(self, fragments: Sequence[Fragment]) -> Mapping[str, float]:
        self._update(fragments)
        return self.learner.totals()

    def _publish(self) -> Learned:
        self.learner.publish()
        return self._learned({})

    def _learned(self, metrics: Mapping[str, float]) -> Learned:
        learner, publication = self.learner, self.publisher.put(self.store.latest())
        return Learned(dict(metrics), publication, learner.iteration, learner.env_steps, learner.totals())
