"""Interface of a runtime: its options, the result of an iteration and the class ``Runtime``.

    with build_runtime(config, num_envs=..., seed=..., make_env=..., make_policy=..., make_algorithm=...) as runtime:
        for iteration in runtime.iterations(max_env_steps=..., deadline_s=..., stop_event=...):
            log(iteration.metrics); maybe checkpoint.save(run_dir, runtime.env_steps, runtime.state_dict())

A runtime decides only where the parts live and how their calls travel. The parts themselves (``EnvWorker``,
``ActorServer``, ``Learner``, ``Ledger``, ``WeightStore``) are independent of the runtime.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from embodied.core.episodes import EpisodeStats
from embodied.core.options import NonNegative, NonNegativeInt, PositiveInt, Seed, config_dataclass
from embodied.core.protocols import Metrics, Policy
from embodied.runtime.watch.trace import Trace

EvalNoise = Literal["zero", "seeded"]
"""Noise that a deployed decision starts from. zero: none, the policy is deterministic. seeded: standard normals that
are a function of the episode's plan. A flow policy with two ways of acting then takes one of them, and a Gaussian draws
from its standard deviation."""

Histograms = dict[str, Counter[int]]
"""How often each whole number occurred, by name."""


@config_dataclass
class RuntimeConfig:
    """Options of a runtime: its parts, their staleness and threads, and evaluations during training."""

    name: str = "sync"
    """Runtime. sync: one thread, exact and debuggable. local: threads of one process, learning overlaps simulation."""
    num_env_workers: PositiveInt = 1
    """Env workers. The envs are split evenly over num_env_workers * groups_per_worker groups, each one VecEnv."""
    groups_per_worker: NonNegativeInt = 0
    """Env groups per worker. With two, a worker steps one group while the other waits for its actions. 0 is two if
    max_staleness is at least 1 and the actor has a GPU or, on Ray, cores of its own. Otherwise it is one. With
    max_staleness=0 all runtimes then train the same bit for bit; on shared cores fewer, larger batches cost less."""
    decisions: PositiveInt = 32
    """Decisions T per fragment. A batch is as many fragments as there are groups; with max_staleness=0 one of each."""
    max_staleness: NonNegativeInt = 0
    """Most versions by which the weights that drew a decision may be older than the learner's. 0 is synchronous PPO;
    sync allows only 0."""
    order: Literal["ticket", "arrival"] = "ticket"
    """Fragments of a batch. ticket: those admitted next, so one slow env group holds up all. arrival: the first that
    are complete; decisions that are older than max_staleness by then are masked. It needs max_staleness >= 1."""
    sim_threads: NonNegativeInt = 0
    """Threads of the simulation; 0 lets ``threads.plan`` choose."""
    actor_threads: NonNegativeInt = 0
    """Threads of the actor; 0 lets ``threads.plan`` choose."""
    learner_threads: NonNegativeInt = 0
    """Threads of the learner; 0 lets ``threads.plan`` choose."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of actor and learner; auto is CUDA if there is one."""
    watchdog_s: NonNegative = 60.0
    """Seconds without progress after which a local run logs which part waits for which; 0 is never."""
    trace: bool = False
    """Record what each part does in the first 60 seconds, for Perfetto: trace.json.gz in the run directory."""
    eval_every: NonNegativeInt = 0
    """Iterations between two evaluations of the weights to deploy; 0 is never."""
    eval_episodes: PositiveInt = 50
    """Episodes per evaluation."""
    eval_seed: Seed = 0
    """Seed of the initial states of evaluations; final evaluations have others, even with the same seed."""
    eval_noise: EvalNoise = "zero"
    """Noise of evaluated policies. zero: deterministic. seeded: random, drawn from the seed of each episode."""

    @property
    def mask_above(self) -> int | None:
        """Age, versions, above which the learner masks decisions; None if the ledger lets none become older."""
        return self.max_staleness if self.order == "arrival" else None


@dataclass(frozen=True, slots=True)
class Iteration:
    """One batch consumed and one update made."""

    index: int
    """Iterations so far, from 1."""
    env_steps: int
    """Control steps consumed so far."""
    metrics: Metrics
    """``train/*`` and ``async/*`` of the algorithm, the others of the runtime (docs/architecture.md).

    ``rollout/*`` are about episodes that began as the task begins, ``rollout/other_starts/*`` about those from a later
    stage or with less time, ``rollout/goals/<goal>/*`` about those of the first kind with that goal. Each is absent
    until such an episode ends, and keeps its last value in an iteration in which none does."""
    episodes: EpisodeStats
    """Episodes that ended in the batch."""
    evaluation: dict[str, Any] | None = None
    """Result of ``evaluate``, if one finished since the last iteration, with ``iteration`` and ``env_steps`` of the
    evaluated weights."""
    histograms: Histograms = field(default_factory=dict)
    """Of the iteration: ages of its decisions, requests that the actor served together."""


class LearnerLost(Exception):
    """The learner died or hung, and what it learned since its last state is lost. Another one is being started.

    go_on: waits for that one and lets it continue from a ``Runtime.state_dict`` of this run, or from the beginning if
    it gets None. Call ``iterations`` again afterwards. All other parts stay as they are. LearnerLost if this learner
    is lost too.
    """

    def __init__(self, cause: object, go_on: Callable[[Mapping[str, Any] | None], None]) -> None:
        super().__init__(f"the learner was lost: {cause}")
        self.go_on = go_on


class Runtime(ABC):
    """A run: iterate it, checkpoint it between iterations, close it."""

    trace: Trace | None = None
    """What the parts do, if ``RuntimeConfig.trace`` is set."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The policy to evaluate and to keep (``Algorithm.deployed``); read it between iterations only."""

    @property
    @abstractmethod
    def resumes(self) -> str:
        """How exactly a run that loads ``state_dict`` continues, in words."""

    @property
    @abstractmethod
    def parts(self) -> str:
        """The threads or processes in which the run's parts are, in words."""

    @property
    @abstractmethod
    def env_steps(self) -> int:
        """Control steps consumed so far."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Iterations so far."""

    @abstractmethod
    def iterations(
        self,
        max_env_steps: int | None = None,
        deadline_s: float | None = None,
        stop_event: threading.Event | None = None,
    ) -> Iterator[Iteration]:
        """Train until env_steps >= max_env_steps, ``running_s() >= deadline_s`` or stop_event is set.

        These limits are checked between iterations, never during one. If a part fails, all others stop and its
        exception is raised here. Call it again to continue. A runtime that can replace its learner raises LearnerLost,
        here and from everything that the learner must answer.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return a consistent state of the whole run, nested dicts of tensors and numbers. Call between iterations.

        Keys: ``policy``, ``algorithm``, ``runtime``. With max_staleness=0 a run that loads it continues exactly, bit
        for bit. With max_staleness>0 each env group is saved at its next fragment boundary. Fragments that the learner
        has not consumed are left out: this run still learns from them, a resumed run samples new ones.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same task, policy, algorithm and groups; call before the first iteration."""

    @abstractmethod
    def close(self) -> None:
        """Stop and join every thread and close the envs. Failures of parts are not raised here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
