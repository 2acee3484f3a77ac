"""Training loop of every runtime; ``sync`` and ``local`` implement how batches are collected.

    admit (ledger) ──► collect batch v ──► learn, publish v+1 ──► [evaluate] ──► yield Iteration ──► admit ...

With max_staleness=0 the ledger counts batch v as consumed when the next iteration begins. At a yield every group then
rests between two fragments with nothing in flight, so a state saved there is exact. With max_staleness>0 the batch
counts as consumed right after the update, so that workers continue while the caller logs.
"""

from __future__ import annotations

import copy
import re
import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from statistics import fmean
from typing import Any, ClassVar, Self

import torch
from torch import nn

from embodied.core.clock import running_s
from embodied.core.device import CPU
from embodied.core.episodes import EpisodeStats
from embodied.core.errors import UserError
from embodied.core.protocols import Metrics, Policy, RowByRow, VecEnv
from embodied.core.registry import Registry
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.actor_server import ActorServer
from embodied.runtime.api import Iteration, LearnerLost, Runtime, RuntimeConfig
from embodied.runtime.env_worker import EnvWorker
from embodied.runtime.evaluator import Evaluator
from embodied.runtime.learner import Learner
from embodied.runtime.ledger import Ledger
from embodied.runtime.recipe import Recipe
from embodied.runtime.watch.meter import Meter
from embodied.runtime.watch.trace import Trace
from embodied.runtime.watch.track import Track
from embodied.runtime.weight_store import WeightStore


class LoopRuntime(Runtime):
    """Training loop over the parts. ledger: a batch is as many fragments as there are groups. spec: of the envs."""

    overlaps: ClassVar[bool]
    """Whether simulation and learning overlap if ``max_staleness`` allows it."""
    workers_may_join: ClassVar[bool] = False
    """Whether a run may go on while some of its env workers are not up."""
    separate_processes: ClassVar[bool] = False
    """Whether actor and simulator are in processes of their own, each with cores of its own."""
    evaluates_aside: ClassVar[bool]
    """Whether evaluations run in a thread of their own during training."""

    @classmethod
    def check(cls, config: RuntimeConfig) -> None:
        """Raise UserError for options that this runtime does not support."""
        if config.max_staleness and not cls.overlaps:
            able = ", ".join(f"runtime={name}" for name in RUNTIMES.names() if RUNTIMES[name].build.overlaps)
            raise UserError(f"max_staleness={config.max_staleness} needs {able}; runtime={config.name} allows only 0")
        if config.order == "arrival" and not config.max_staleness:
            raise UserError("order=arrival needs max_staleness of at least 1, got 0: allowed with 0 is order=ticket")

    @classmethod
    def assemble(cls, recipe: Recipe) -> Self:
        """Build the parts of a run in this process, and the runtime of them.

        If the simulator is on the learner's device, observations and actions stay there from simulator to learner.
        """
        config = recipe.config
        with ExitStack() as opened:  # closes the envs if anything is refused
            envs = []
            for worker in range(len(recipe.sizes)):
                envs.append(recipe.open_envs(worker, recipe.budget.sim))
                for env in envs[-1]:
                    opened.enter_context(closing(env))
            spec = envs[0][0].spec
            policy = recipe.initial_policy(spec)
            acting, evaluated = copy.deepcopy(policy), copy.deepcopy(policy)
            assert isinstance(policy, nn.Module)
            policy.to(recipe.device)
            resident = all(_is_resident(env, recipe.device) for groups in envs for env in groups)
            store = WeightStore()
            runtime = cls(
                config,
                recipe.budget,
                spec=spec,
                evaluator=recipe.evaluator(evaluated, spec),
                workers=[
                    recipe.env_worker(
                        worker, groups, policy.execute, policy.noise_shape, device=recipe.device if resident else CPU
                    )
                    for worker, groups in enumerate(envs)
                ],
                actor=ActorServer(acting, store, recipe.device, merge=config.max_staleness > 0, resident=resident),
                learner=Learner(recipe.make_algorithm(policy), store, recipe.relabel, config.mask_above),
                ledger=Ledger(recipe.num_groups, config.max_staleness),
                store=store,
            )
            opened.pop_all()
            return runtime

    def __init__(
        self,
        config: RuntimeConfig,
        budget: threads.ThreadBudget,
        *,
        workers: Sequence[EnvWorker],
        actor: ActorServer,
        learner: Learner,
        ledger: Ledger,
        store: WeightStore,
        evaluator: Evaluator | None,
        spec: EnvSpec,
    ) -> None:
        self.config = config
        self.spec = spec
        self.budget = budget
        self.workers = list(workers)
        self.actor = actor
        self.learner = learner
        self.ledger = ledger
        self.store = store
        self.evaluator = evaluator
        self.trace = Trace() if config.trace else None
        self._rollout: Metrics = {}
        self._closed = False
        self._failure: Exception | None = None  # of the update, whose batch is lost

    @property
    def policy(self) -> Policy:
        return self.learner.deployed

    @property
    def resumes(self) -> str:
        if not all(worker.resumes_exactly for worker in self.workers):
            return "with new episodes: these environments cannot restore a state"
        if self.config.max_staleness:
            return f"without the fragments in flight: max_staleness={self.config.max_staleness}"
        return "exactly, bit for bit"

    @property
    def parts(self) -> str:
        budget = self.budget
        return f"threads: simulation {budget.sim}, actor {budget.actor}, learner {budget.learner}"

    @property
    def env_steps(self) -> int:
        return self.learner.env_steps

    @property
    def iteration(self) -> int:
        return self.learner.iteration

    def iterations(
        self,
        max_env_steps: int | None = None,
        deadline_s: float | None = None,
        stop_event: threading.Event | None = None,
    ) -> Iterator[Iteration]:
        if self._failure is not None:
            raise self._failure
        stop = stop_event or threading.Event()
        self._start()
        meter, previous_end = Meter(self), running_s()
        self._poll_trace()
        while not (
            stop.is_set()
            or (max_env_steps is not None and self.env_steps >= max_env_steps)
            or (deadline_s is not None and running_s() >= deadline_s)
        ):
            if self.ledger.version < self.learner.iteration:
                self._consume()
            consumed = self.env_steps
            with self.learner.track.during("wait_fragments"):
                batch = self.collect()
            try:
                metrics = self.learn(batch)
            except LearnerLost:
                raise
            except Exception as error:  # of any kind: it is raised again, here and at every later call
                self._failure = error
                raise
            if self.config.max_staleness > 0:
                self._consume()
            now = running_s()
            measured, histograms = meter.read()
            speed = (self.env_steps - consumed) / (now - previous_end)
            metrics |= {"perf/env_steps_per_s": speed, **measured}
            episodes = EpisodeStats.concatenate([fragment.episodes for fragment in batch])
            self._rollout |= rollout_metrics(episodes, self.spec)
            evaluation = self._evaluate_if_due(stop)
            self._poll_trace()
            previous_end = running_s()
            metrics |= self._rollout
            yield Iteration(self.iteration, self.env_steps, metrics, episodes, evaluation, histograms)

    def state_dict(self) -> dict[str, Any]:
        learner = self.learner.state_dict()
        return {
            "policy": learner["policy"],
            "algorithm": learner["algorithm"],
            "runtime": {
                "counters": learner["counters"],
                "ledger": {"version": self.learner.iteration},
                "rollout": dict(self._rollout),
                "evaluated_at": 0 if self.evaluator is None else self.evaluator.last_iteration,
                "groups": self._group_states(),
                "incarnations": [worker.incarnation for worker in self.workers],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        runtime = state["runtime"]
        keys = self._group_keys()
        if len(runtime["groups"]) != len(keys):
            raise UserError(
                f"the checkpoint has {len(runtime['groups'])} env groups, this run {len(keys)}: "
                "resume with the same num_envs, num_env_workers and groups_per_worker"
            )
        if not self.workers_may_join and any(saved is None for saved in runtime["groups"]):
            raise UserError("the checkpoint lacks env workers that were still to join: resume it with runtime=ray")
        for (worker, group), saved in zip(keys, runtime["groups"], strict=True):
            self.workers[worker].load_state_dict(group, saved)
        for worker_part, incarnation in zip(self.workers, runtime.get("incarnations", ()), strict=False):
            worker_part.incarnation = incarnation  # checkpoints of earlier versions have none
        self.learner.load_state_dict({**state, "counters": runtime["counters"]})
        self.ledger.load_state_dict(runtime["ledger"])
        self._rollout = dict(runtime["rollout"])
        if self.evaluator is not None:
            self.evaluator.last_iteration = runtime["evaluated_at"]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._poll_trace()
        for worker in self.workers:
            worker.close()
        if self.evaluator is not None:
            self.evaluator.close()

    def _tracks(self) -> dict[str, list[Track]]:
        """Return the tracks of the parts in this process, by part."""
        tracks = {worker.track.name: worker.tracks for worker in self.workers}
        tracks |= {track.name: [track] for track in (self.actor.track, self.learner.track)}
        return tracks if self.evaluator is None else {**tracks, "evaluator": [self.evaluator.track]}

    def _poll_trace(self) -> None:
        if self.trace is not None:
            self.trace.poll(self._tracks())

    def _start(self) -> None:
        """Publish the first weights. Called at the start of every ``iterations``."""
        if self.store.version < self.learner.iteration:
            self.learner.publish()

    def _consume(self) -> None:
        """Count the newest batch as consumed, which admits fragments of a later one."""
        self.ledger.consumed_batch()

    @abstractmethod
    def collect(self) -> list[Fragment]:
        """Return the next batch, sorted by worker and group."""

    @abstractmethod
    def learn(self, batch: list[Fragment]) -> Metrics:
        """Run ``learner.learn`` with the learner's threads; return its metrics."""

    @abstractmethod
    def _evaluate_if_due(self, stop: threading.Event) -> dict[str, Any] | None:
        """Return the result of an evaluation, if there is a new one."""

    @abstractmethod
    def _group_states(self) -> Sequence[dict[str, Any] | None]:
        """Return each group's state between two fragments, in the order of ``_group_keys``; None: it has none."""

    def _group_keys(self) -> list[tuple[int, int]]:
        return [(w, g) for w, worker in enumerate(self.workers) for g in range(worker.num_groups)]


RUNTIMES: Registry[type[LoopRuntime]] = Registry("runtime")


def rollout_metrics(episodes: EpisodeStats, spec: EnvSpec) -> Metrics:
    """Return means over the episodes that began as the task begins, and under ``rollout/other_starts`` over the others.

    The others began at a later stage, or with less time than the task's time limit, as staggered ones do. If ``spec``
    has several goals, also the success of each, over the first kind. A kind without episodes has no metrics.
    """
    own_M = torch.from_numpy((episodes.plans.stage_n == 0) & (episodes.plans.time_limit_n >= spec.max_episode_steps))
    own = episodes.rows(own_M)
    metrics = _means("rollout", own) | _means("rollout/other_starts", episodes.rows(~own_M))
    if len(own) and spec.has_success and len(set(spec.goals)) > 1:
        solved: defaultdict[str, list[bool]] = defaultdict(list)
        for i, success in zip(own.plans.instruction_n.tolist(), own.success_at_end_M.tolist(), strict=True):
            solved[re.sub(r"\W+", "_", spec.goals[i])].append(success)
        metrics |= {f"rollout/goals/{goal}/success_at_end": fmean(values) for goal, values in sorted(solved.items())}
    return metrics


def _means(prefix: str, episodes: EpisodeStats) -> Metrics:
    """Return the mean return, outcomes and length of the episodes under ``prefix``; {} if there are none."""
    if len(episodes) == 0:
        return {}
    return {
        f"{prefix}/return_mean": float(episodes.return_M.mean()),
        **{f"{prefix}/{name}_once": float(held_M.float().mean()) for name, held_M in episodes.once.items()},
        **{f"{prefix}/{name}_at_end": float(held_M.float().mean()) for name, held_M in episodes.at_end.items()},
        f"{prefix}/episode_length_mean": float(episodes.length_M.float().mean()),
    }


def _is_resident(env: VecEnv, device: torch.device) -> bool:
    """Return whether what is observed of an env can stay on ``device``."""
    same = env.device.type == device.type and (env.device.index or 0) == (device.index or 0)
    return same and not isinstance(env, RowByRow)
