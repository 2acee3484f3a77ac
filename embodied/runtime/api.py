"""What the train command sees of a runtime: its options, an iteration's result and the ``Runtime`` interface.

    with build_runtime(config, num_envs=..., seed=..., make_env=..., make_policy=..., make_algorithm=...) as runtime:
        for iteration in runtime.iterations(max_env_steps=..., deadline_s=..., stop_event=...):
            log(iteration.metrics); maybe checkpoint.save(run_dir, runtime.env_steps, runtime.state_dict())

A runtime only decides where the parts live and how their calls travel; the parts themselves (``EnvWorker``,
``ActorServer``, ``Learner``, ``Ledger``, ``WeightStore``) know no runtime.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from embodied.core.config import at_least
from embodied.core.episodes import EpisodeStats
from embodied.core.errors import UserError
from embodied.core.protocols import Metrics, Policy


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Where the parts of a run live and how far they may drift apart.

    name: sync (one thread, exact and debuggable) or local (threads of one process, learning overlaps simulation).
    num_workers, groups_per_worker: the envs are split evenly over num_workers * groups_per_worker groups; a group is
        one VecEnv. With two groups a worker steps one while the other waits for its actions.
    decisions: T of a fragment. One batch is one fragment of every group.
    max_staleness: how many versions older than the learner's the weights that drew a decision may be; 0 is synchronous
        PPO, and is all that sync allows.
    sim_threads, actor_threads, learner_threads: 0 lets ``threads.plan`` choose.
    device: of actor and learner; auto takes CUDA when there is one. Simulation stays on the CPU.
    watchdog_s: after so many seconds without any progress, a local run logs who waits for whom; 0 is never.
    eval_every: evaluate the weights to deploy each time so many iterations have passed, on eval_episodes episodes from
        the initial states of eval_seed; 0 is never.
    """

    name: Literal["sync", "local"] = "sync"
    num_workers: int = 1
    groups_per_worker: int = 2
    decisions: int = 32
    max_staleness: int = 0
    sim_threads: int = 0
    actor_threads: int = 0
    learner_threads: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    watchdog_s: float = 60.0
    eval_every: int = 0
    eval_episodes: int = 50
    eval_seed: int = 0

    def __post_init__(self) -> None:
        for key in ("num_workers", "groups_per_worker", "decisions", "eval_episodes"):
            at_least(key, getattr(self, key), 1)
        for key in ("max_staleness", "sim_threads", "actor_threads", "learner_threads", "watchdog_s", "eval_every"):
            at_least(key, getattr(self, key), 0)
        at_least("eval_seed", self.eval_seed, 0)
        if self.name == "sync" and self.max_staleness != 0:
            raise UserError(f"max_staleness={self.max_staleness} needs runtime=local; runtime=sync allows only 0")


@dataclass(frozen=True, slots=True)
class Iteration:
    """One batch consumed and one update made.

    index: iterations so far, from 1; env_steps: control steps consumed so far. metrics: ``train/*`` and ``async/*`` of
    the algorithm, ``perf/*`` and ``rollout/*`` of the runtime (``rollout/*`` keep their last value while no episode
    ends, ``rollout/goals/<goal>/*`` while none of that goal does, and are absent before the first end). episodes: those
    that ended in the batch. evaluation: what ``evaluate`` returned with ``iteration`` and ``env_steps`` of the weights
    it judged, if one has finished since then.
    """

    index: int
    env_steps: int
    metrics: Metrics
    episodes: EpisodeStats
    evaluation: dict[str, Any] | None = None


class Runtime(ABC):
    """A run: iterate it, checkpoint it between iterations, close it."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The policy to evaluate and to keep (``Algorithm.deployed``); read it between iterations only."""

    @property
    @abstractmethod
    def env_steps(self) -> int: ...

    @property
    @abstractmethod
    def iteration(self) -> int: ...

    @abstractmethod
    def iterations(
        self,
        max_env_steps: int | None = None,
        deadline_s: float | None = None,
        stop_event: threading.Event | None = None,
    ) -> Iterator[Iteration]:
        """Train until env_steps >= max_env_steps, ``time.monotonic() >= deadline_s`` or stop_event is set.

        These are looked at between iterations: one that has begun is finished. A part that dies stops all others and
        its exception is raised here. May be called again to go on.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """A consistent state of the whole run, nested dicts of tensors and numbers. Call between iterations.

        Keys: ``policy``, ``algorithm``, ``runtime``. With max_staleness=0 a run that loads it continues bit by bit as
        this one does. With max_staleness>0 envs are taken at their next fragment boundary and the fragments that the
        learner has not consumed yet are not in it (this run still learns from them, a resumed one samples new ones).
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same task, policy, algorithm and groups; call before the first iteration."""

    @abstractmethod
    def close(self) -> None:
        """Stop and join every thread and close the envs. Never raises because of what parts did."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
