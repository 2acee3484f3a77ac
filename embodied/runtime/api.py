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

from embodied.core.episodes import EpisodeStats
from embodied.core.options import Count, Natural, NonNegative, config_dataclass
from embodied.core.protocols import Metrics, Policy


@config_dataclass
class RuntimeConfig:
    """Where the parts of a run live and how far they may drift apart."""

    name: str = "sync"
    """sync: one thread, exact and debuggable. local: threads of one process, learning overlaps simulation."""
    num_workers: Count = 1
    """Env workers; the envs are split evenly over num_workers * groups_per_worker groups, each of them one VecEnv."""
    groups_per_worker: Count = 2
    """With two groups a worker steps one while the other waits for its actions."""
    decisions: Count = 32
    """T of a fragment. One batch is one fragment of every group."""
    max_staleness: Natural = 0
    """How many versions older than the learner's the weights that drew a decision may be; 0 is synchronous PPO, and is
    all that sync allows."""
    sim_threads: Natural = 0
    """Threads of the simulation; 0 lets ``threads.plan`` choose."""
    actor_threads: Natural = 0
    """Threads of the actor; 0 lets ``threads.plan`` choose."""
    learner_threads: Natural = 0
    """Threads of the learner; 0 lets ``threads.plan`` choose."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of actor and learner; auto takes CUDA when there is one. Simulation stays on the CPU."""
    watchdog_s: NonNegative = 60.0
    """After so many seconds without any progress, a local run logs who waits for whom; 0 is never."""
    eval_every: Natural = 0
    """Iterations between two evaluations of the weights to deploy; 0 is never."""
    eval_episodes: Count = 50
    """Episodes of such an evaluation."""
    eval_seed: Natural = 0
    """Seed of its initial states."""


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
