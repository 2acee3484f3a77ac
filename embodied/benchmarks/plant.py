"""Discrete-event model of a run: the real ledger and channel, with drawn times in place of simulator and networks.

    worker: step ── request ──► actor server: all that wait ── reply ──► worker … T decisions, values ──► fragment
    ledger admits, channel completes batch v ──► learner: update ──► version v + 1 ──► blocked workers ask again

The parts wait for each other as in runtime=local. A worker does one thing at a time, an actor server takes all requests
that wait, the learner updates as soon as a batch is complete. Each part has a core of its own, so parts that compete
for cores enter through their times. Time is virtual: a run of 15,000 workers takes seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from embodied.core.types import Fragment
from embodied.runtime.channel import Channel
from embodied.runtime.ledger import Ledger, Ticket


@dataclass(frozen=True, slots=True)
class Plant:
    """Parts of a run and how they are connected."""

    workers: int
    """Env workers. Each steps one group at a time."""
    groups: int = 1
    """Env groups of a worker."""
    decisions: int = 4
    """T, decisions of a fragment."""
    servers: int = 1
    """Actor servers; worker w asks server w modulo their number."""
    max_staleness: int = 0
    """That of the ledger. 0 is synchronous training with parallel workers."""
    order: Literal["ticket", "arrival"] = "ticket"
    """That of the channel."""
    merge: bool = True
    """Whether an actor server merges requests into one call. The runtimes do, but not with max_staleness=0."""

    @property
    def batch_fragments(self) -> int:
        """Fragments of a batch: one of each group."""
        return self.workers * self.groups


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that the parts take; each call draws anew."""

    step: Callable[[int], float]
    """One step of the env group with this number: E control steps."""
    infer: Callable[[int, int], float]
    """One call of the actor server for so many requests of decisions and so many of values alone."""
    update: Callable[[], float]
    """One update with its publication."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over the batches after the warm-up."""

    batch_s: float
    """Seconds per batch."""
    worker_busy: float
    """Share of the time in which a worker steps."""
    server_busy: float
    """Share of the time in which an actor server computes."""
    learner_busy: float
    """Share of the time in which the learner updates."""
    staleness_mean: float
    """Versions by which the weights of a decision were older than the learner's."""
    staleness_max: int
    """Greatest of them."""
    used: float
    """Share of the decisions that count: with order=arrival those that are too old are masked."""

    @property
    def useful_batch_s(self) -> float:
        """Seconds per batch of decisions that count."""
        return self.batch_s / self.used


@dataclass(slots=True)
class _Sampled:
    """A fragment: its ticket's fields, as ``Channel`` reads them, and what the model counts."""

    worker: int
    group: int
    sequence: int
    left: int
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Worker:
    resting: set[int]
    inbox: deque[tuple[int, int]] = field(default_factory=deque)  # group, version of the weights
    sampling: dict[int, tuple[Ticket, _Sampled]] = field(default_factory=dict)
    idle: bool = False


@dataclass(slots=True)
class _Server:
    waiting: list[tuple[int, int]] = field(default_factory=list)  # worker, group
    busy: bool = False


class Model:
    """One simulated run. ``run`` continues it."""

    def __init__(self, plant: Plant, times: Times) -> None:
        self.plant, self.times = plant, times
        self.ledger = Ledger(plant.batch_fragments, plant.max_staleness)
        self.channel = Channel(plant.batch_fragments, plant.max_staleness, plant.order)
        self.now_s = 0.0
        self.version = 0
        self.stepping_s = self.inferring_s = self.learning_s = 0.0
        self.staleness: list[int] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._workers = [_Worker(set(range(plant.groups))) for _ in range(plant.workers)]
        self._servers = [_Server() for _ in range(plant.servers)]
        self._blocked = list(range(plant.workers))
        self._learning = False

    def run(self, batches: int, warmup: int = 2) -> Prediction:
        """Simulate ``warmup`` batches, then ``batches`` that count."""
        self._simulate(self.version + warmup)
        before = self.now_s, self.stepping_s, self.inferring_s, self.learning_s
        self.staleness.clear()
        self._simulate(self.version + batches)
        after = self.now_s, self.stepping_s, self.inferring_s, self.learning_s
        wall_s, stepping_s, inferring_s, learning_s = (b - a for a, b in zip(before, after, strict=True))
        return Prediction(
            batch_s=wall_s / batches,
            worker_busy=stepping_s / wall_s / self.plant.workers,
            server_busy=inferring_s / wall_s / self.plant.servers,
            learner_busy=learning_s / wall_s,
            staleness_mean=sum(self.staleness) / len(self.staleness),
            staleness_max=max(self.staleness),
            used=len(self.staleness) / (batches * self.plant.batch_fragments * self.plant.decisions),
        )

    def _simulate(self, version: int) -> None:
        self._wake()
        while self.version < version:
            self.now_s, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)

    def _after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, call, arguments))

    # ---------------------------------------------------------------------------------------------------- env worker
    def _look(self, index: int) -> None:
        """Do what a worker does between two steps: begin fragments, then take the next reply."""
        worker = self._workers[index]
        while True:
            for group in sorted(worker.resting):
                ticket = self.ledger.try_acquire(index, group=group)
                if ticket is not None:
                    worker.resting.remove(group)
                    sampled = _Sampled(index, group, ticket.sequence, self.plant.decisions)
                    worker.sampling[group] = ticket, sampled
                    self._request(index, group)
            if len(worker.resting) == self.plant.groups:
                self._blocked.append(index)
                return
            if not worker.inbox:
                worker.idle = True
                return
            group, version = worker.inbox.popleft()
            ticket, sampled = worker.sampling[group]
            if sampled.left:
                step_s = self.times.step(index * self.plant.groups + group)
                self.stepping_s += step_s
                sampled.versions.append(version)
                self._after(step_s, self._stepped, index, group)
                return
            del worker.sampling[group]
            worker.resting.add(group)
            self._deliver(ticket, sampled)

    def _stepped(self, index: int, group: int) -> None:
        self._workers[index].sampling[group][1].left -= 1
        self._request(index, group)
        self._look(index)

    def _deliver(self, ticket: Ticket, sampled: _Sampled) -> None:
        accepted = self.ledger.deliver(ticket)
        assert accepted
        self.channel.put(cast(Fragment, sampled))
        self._learn()

    # -------------------------------------------------------------------------------------------------- actor server
    def _request(self, worker: int, group: int) -> None:
        server = self._servers[worker % self.plant.servers]
        server.waiting.append((worker, group))
        if not server.busy:
            server.busy = True
            self._after(0.0, self._serve, server)

    def _serve(self, server: _Server) -> None:
        batch, server.waiting = server.waiting, []
        valued = sum(self._workers[worker].sampling[group][1].left == 0 for worker, group in batch)
        if self.plant.merge:
            infer_s = self.times.infer(len(batch) - valued, valued)
        else:
            infer_s = sum(self.times.infer(1, 0) for _ in range(len(batch) - valued))
            infer_s += sum(self.times.infer(0, 1) for _ in range(valued))
        self.inferring_s += infer_s
        self._after(infer_s, self._reply, server, batch, self.version)

    def _reply(self, server: _Server, batch: list[tuple[int, int]], version: int) -> None:
        for index, group in batch:
            worker = self._workers[index]
            worker.inbox.append((group, version))
            if worker.idle:
                worker.idle = False
                self._after(0.0, self._look, index)
        server.busy = bool(server.waiting)
        if server.busy:
            self._serve(server)

    # ------------------------------------------------------------------------------------------------------- learner
    def _learn(self) -> None:
        if self._learning or not self.channel.has(self.version):
            return
        self._learning = True
        for sampled in cast(list[_Sampled], self.channel.take(self.version)):
            ages = [self.version - version for version in sampled.versions]
            self.staleness += [age for age in ages if age <= self.plant.max_staleness]  # ``mask_before``
        update_s = self.times.update()
        self.learning_s += update_s
        self._after(update_s, self._publish)

    def _publish(self) -> None:
        self._learning = False
        self.version = self.ledger.consumed_batch()
        self._wake()
        self._learn()

    def _wake(self) -> None:
        """Let the workers that rest ask for tickets again."""
        blocked, self._blocked = self._blocked, []
        for index in blocked:
            self._look(index)
