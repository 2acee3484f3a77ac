"""Training loop of every runtime; a subclass says where the parts live and how a batch is collected and learned from.

    admit (ledger) ──► collect batch v ──► learn, publish v+1 ──► [evaluate] ──► yield Iteration ──► admit ...

With max_staleness=0 the ledger counts batch v as consumed at the start of the next iteration. So at a yield nothing is
in flight, and a state saved there is exact. With max_staleness>0 workers continue while the caller logs.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from torch import Tensor

from embodied.core.algorithm import Metrics
from embodied.core.clock import running_s
from embodied.core.episodes import EpisodeStats
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.runtime.channel import Channel, Closed
from embodied.runtime.evaluator import Evaluator, rollout_metrics
from embodied.runtime.ledger import Ledger
from embodied.runtime.recipe import Recipe
from embodied.runtime.threads import Doing, ThreadBudget, ThreadGroup
from embodied.runtime.watch import Histograms, Meter, Totals, Trace, Track


@dataclass(frozen=True, slots=True)
class Iteration:
    """One batch consumed and one update made."""

    index: int
    env_steps: int
    """Iterations, from 1, and control steps consumed so far."""
    metrics: Metrics
    """``train/*`` and ``async/*`` of the algorithm, the others of the runtime (docs/architecture.md).

    ``rollout/*`` are about episodes from the task's own starts with the whole time limit, ``rollout/other_starts/*``
    about those from a later stage or with less time, ``rollout/goals/<goal>/*`` about those of the first kind with that
    goal. Each is absent until such an episode ends, and keeps its last value in an iteration in which none does."""
    episodes: EpisodeStats
    evaluation: dict[str, Any] | None = None
    """Result of ``evaluate`` that finished since the last one, with ``iteration`` and ``env_steps`` of the weights."""
    histograms: Histograms = field(default_factory=dict)
    """Of the iteration: ages of its decisions, requests that the actor served together."""


Recover = Callable[[Mapping[str, Any] | None], None]


class LearnerLost(Exception):
    """The learner died or hung, and what it learned since its last state is lost. Another one is being started.

    recover: waits for the new learner and lets it continue from a ``Runtime.state_dict`` of this run, or with None from
    the beginning. Call ``iterations`` again afterwards. LearnerLost if the new learner is lost too.
    """

    def __init__(self, cause: object, recover: Recover) -> None:
        super().__init__(f"the learner was lost: {cause}")
        self.recover = recover


class LearnerPart(Protocol):
    """The learner, in this process or in another one; see ``Learner``."""

    incarnation: int
    iteration: int
    env_steps: int
    track: Track

    @property
    def version(self) -> int: ...
    @property
    def deployed(self) -> Policy: ...
    def deployed_weights(self) -> dict[str, Tensor]: ...
    def publish(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Runtime(AbstractContextManager["Runtime"], ABC):
    """A run: iterate it, checkpoint it between iterations, close it. A subclass builds the parts in ``__init__``."""

    spec: EnvSpec
    learner: LearnerPart
    evaluator: Evaluator
    budget: ThreadBudget

    def __init__(self, recipe: Recipe) -> None:
        self.config, self.groups = recipe.config, recipe.groups
        self.ledger = Ledger(len(self.groups), self.config.max_staleness)  # a batch has a fragment of each group
        self.channel = Channel(len(self.groups), self.config.max_staleness, self.config.order)
        # empty if parts are not in threads
        self.threads = ThreadGroup(self.config.watchdog_s, self._end_waits, self._doing)
        self.trace = Trace() if self.config.trace else None
        self.opened = ExitStack()  # what ``close`` closes, the last first
        self._rollout: Metrics = {}
        self._kept: Mapping[str, Tensor] | None = None  # weights to keep instead of the newest
        self._failure: Exception | None = None  # of the update, whose batch is lost

    def iterations(
        self, max_env_steps: float = inf, deadline_s: float = inf, stop_event: threading.Event | None = None
    ) -> Iterator[Iteration]:
        """Train until env_steps >= max_env_steps, ``running_s() >= deadline_s`` or stop_event is set.

        These limits are checked between iterations, never during one. If a part fails, all others stop and its
        exception is raised here. Call it again to continue. LearnerLost, from all calls that need the learner.
        """
        if self._failure is not None:
            raise self._failure
        stop = stop_event or threading.Event()
        self._start()
        meter, previous_end = Meter(self._totals), running_s()
        self._poll_trace()
        while not (stop.is_set() or self.env_steps >= max_env_steps or running_s() >= deadline_s):
            if self.ledger.version < self.iteration:  # max_staleness=0: the batch of the last update does not count yet
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
            evaluation = self.evaluator.poll(self.learner.deployed_weights, self.iteration, self.env_steps, stop)
            self._poll_trace()
            previous_end = running_s()
            metrics |= self._rollout
            yield Iteration(self.iteration, self.env_steps, metrics, episodes, evaluation, histograms)

    # ---------------------------------------------------------------------------------------------- of a subclass
    def collect(self) -> Sequence[Any]:
        """Return the next batch, sorted by worker and group: the one that other threads put into ``channel``."""
        version = self.learner.iteration
        self.learner.track.add("fragments", len(self.channel))
        try:
            return self.channel.take(version, self.learner.incarnation)
        except Closed:
            self._check()
            raise RuntimeError("the runtime was closed while it iterated") from None

    @abstractmethod
    def learn(self, batch: Any) -> Metrics:
        """Update on a batch of ``collect`` with the learner's threads and publish; return the metrics."""

    @property
    @abstractmethod
    def incarnations(self) -> list[int]:
        """How often each worker was replaced, in earlier sessions of the run too."""

    @property
    @abstractmethod
    def resumes_exactly(self) -> bool:
        """Whether all envs can be restored from a checkpoint."""

    @abstractmethod
    def _group_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the state of each of ``groups`` between two fragments; None: it has none."""

    @abstractmethod
    def _load_groups(self, states: Sequence[Mapping[str, Any] | None], incarnations: Sequence[int]) -> None:
        """Continue from ``_group_states`` and ``incarnations``."""

    @abstractmethod
    def _totals(self) -> dict[str, Totals]:
        """Return the totals of env_worker, actor_server and learner."""

    @abstractmethod
    def _tracks(self) -> dict[str, list[Track]]:
        """Return the tracks in this process, by part."""

    def _doing(self) -> Doing:
        """Return what each part does and since when, for the watchdog."""
        tracks = [(part, track) for part, tracks in self._tracks().items() for track in tracks]
        return {part if part == track.name else f"{part} {track.name}": track.present for part, track in tracks}

    def _start(self) -> None:
        """Publish the first weights. Called at the start of every ``iterations``."""
        if self.learner.version < self.iteration:
            self.learner.publish()

    def _check(self) -> None:
        self.threads.check()

    def _end_waits(self) -> None:
        """End every wait of the threads, which stop."""
        self.ledger.close()
        self.channel.close()

    def _consume(self) -> None:
        self.ledger.consumed_batch()

    # ---------------------------------------------------------------------------------------------- between iterations
    @property
    def policy(self) -> Policy:
        """The policy to evaluate and to keep (``Algorithm.deployed``); read it between iterations only."""
        deployed = self.learner.deployed
        if self._kept is not None:
            deployed.load_state_dict(self._kept)
        return deployed

    def keep_evaluated(self) -> None:
        """Keep the weights of the last evaluation, after the last iteration: the newest may be some updates younger."""
        self._kept = self.evaluator.weights

    @property
    def env_steps(self) -> int:
        return self.learner.env_steps

    @property
    def iteration(self) -> int:
        return self.learner.iteration

    @property
    def layout_note(self) -> str:
        """The threads or processes in which the run's parts are, in words."""
        return f"threads: simulation {self.budget.sim}, actor {self.budget.actor}, learner {self.budget.learner}"

    @property
    def resume_note(self) -> str:
        """How exactly a run that loads ``state_dict`` continues, in words."""
        if not self.resumes_exactly:
            return "with new episodes: these environments cannot restore a state"
        if self.config.max_staleness:
            return f"without the fragments in flight: max_staleness={self.config.max_staleness}"
        return "exactly, bit for bit"

    def state_dict(self) -> dict[str, Any]:
        """Return a consistent state of the whole run, nested dicts of tensors and numbers. Call between iterations.

        Keys: ``policy``, ``algorithm``, ``runtime``. With max_staleness=0 a run that loads it continues bit for bit.
        With max_staleness>0 each env group is saved at its next fragment boundary, and fragments that the learner has
        not consumed are left out: this run still learns from them, a resumed run samples new ones.
        """
        learner = self.learner.state_dict()
        return {
            "policy": learner["policy"] if self._kept is None else self._kept,
            "algorithm": learner["algorithm"],
            "runtime": {
                "counters": learner["counters"],
                "generator": learner["generator"],
                "ledger": {"version": self.iteration},
                "rollout": dict(self._rollout),
                "evaluated_at": self.evaluator.evaluated_at,
                "groups": self._group_states(),
                "incarnations": self.incarnations,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same task, policy, algorithm and groups, before the first iteration."""
        assert self.learner.version < 0, "load a state before the first iteration"
        runtime = state["runtime"]
        if len(runtime["groups"]) != len(self.groups):
            differ = f"{len(runtime['groups'])} env groups, this run {len(self.groups)}"
            raise UserError(f"the checkpoint has {differ}: keep num_envs, num_env_workers and groups_per_worker")
        self._load_groups(runtime["groups"], runtime["incarnations"])
        self.learner.load_state_dict({**state, **runtime})
        self.ledger.continue_after(runtime["ledger"]["version"], self.learner.incarnation)
        self._rollout = dict(runtime["rollout"])
        self.evaluator.last_iteration = self.evaluator.evaluated_at = runtime["evaluated_at"]

    def close(self) -> None:
        """Stop and join every thread and close the envs. Failures of parts are not raised here."""
        self.opened.close()
        self._poll_trace()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poll_trace(self) -> None:
        if self.trace is not None:
            self.trace.poll(self._tracks())
