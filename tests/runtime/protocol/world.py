"""Simulated time, processes and messages. Everything random comes from one seed, so a seed is a schedule.

    send(process, call, …) ── delay, sometimes long, so messages overtake each other ──► process runs call
                                    dead: nothing happens    hung, stuck: it waits    twice: duplicates

Time is in seconds and costs nothing. Nothing here knows the protocol.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FOREVER_S = 1e9


@dataclass(slots=True)
class Process:
    """One incarnation of a part."""

    part: str
    incarnation: int
    alive: bool = True
    wanted: bool = True
    """Whether the controller has not given it up; calls of one that it has fail, even if it lives on unseen."""
    free_s: float = 0.0
    """Until then it does nothing."""
    hung_until_s: float = 0.0
    """SIGSTOP: it does not even answer signs of life."""
    stuck_since_s: float = 0.0
    """One operation takes from then until free_s; signs of life are answered."""
    memory: dict[Any, Any] = field(default_factory=dict)
    """What it knows, lost with it."""

    def stop(self, kind: str, now_s: float, for_s: float) -> None:
        """Hang or be stuck for some time."""
        self.free_s = max(self.free_s, now_s + for_s)
        if kind == "hang":
            self.hung_until_s = max(self.hung_until_s, now_s + for_s)
        else:
            self.stuck_since_s = now_s

    def __str__(self) -> str:
        return f"[{self.part}, {self.incarnation}]"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a part, whatever its incarnation is then."""

    time_s: float
    kind: str
    """One of KINDS."""
    part: int
    """Index of the part; the last is the controller itself, which can only be killed."""
    for_s: float
    """How long it hangs or is stuck."""


KINDS = ("kill", "kill", "hang", "stuck", "kill_in_update")


class Plan:
    """Sizes, rates and faults of the schedule with a seed."""

    def __init__(self, seed: int, rng: random.Random) -> None:
        draw = rng.random
        self.seed = seed
        self.workers = 1 + int(draw() * 3)
        self.groups = 1 + int(draw() * 2)
        self.servers = 1 + int(draw() * 2)
        self.max_staleness = (0, 0, 1, 2, 4)[int(draw() * 5)]
        self.order: Literal["ticket", "arrival"] = "arrival" if draw() < 0.5 and self.max_staleness else "ticket"
        self.decisions = 1 + int(draw() * 2)
        self.batches = 2 + int(draw() * 3)
        self.save_every = 1 + int(draw() * 3)
        self.late = draw() * 0.3
        """Share of the messages that take up to 20 times as long."""
        self.twice = draw() * 0.2
        """Share of the answers to the controller that arrive twice."""
        self.zombies = draw()
        """Share of the killed processes that go on unseen, cut off but for messages."""
        parts = self.workers + self.servers + 2
        number, last_s, victim = int(draw() * 6), 0.6 * self.batches, int(draw() * 4 * parts)
        if victim < parts:  # one part gets all faults, and more of them
            number, last_s = 2 * number, 6 * last_s
        faults = (
            Fault(
                draw() * last_s,
                KINDS[int(draw() * len(KINDS))],
                victim if victim < parts else int(draw() * parts),
                (0.3, 4.0, 8.0, FOREVER_S)[int(draw() * 4)],
            )
            for _ in range(number)
        )
        self.faults = sorted(faults, key=lambda fault: fault.time_s)
        elastic = draw() < 0.5 and self.max_staleness > 0
        self.needed = 1 + int(draw() * self.workers) if elastic else self.workers
        """Env workers with which the run begins and goes on."""
        self.joins_s = [draw() * 2.0 * last_s if worker >= self.needed else 0.0 for worker in range(self.workers)]
        """Time at which there is room for each of them; those that start before wait for it."""

    @property
    def batch_fragments(self) -> int:
        """Fragments of a batch: one of each group."""
        return self.workers * self.groups

    @property
    def mask_above(self) -> int | None:
        """Age, versions, above which the learner masks decisions."""
        return self.max_staleness if self.order == "arrival" else None

    def __str__(self) -> str:
        named = ("workers", "needed", "groups", "servers", "max_staleness", "order", "decisions", "batches")
        return " ".join(f"{name}={getattr(self, name)}" for name in named) + f" faults={len(self.faults)}"


class World:
    """Clock and messages under way. trace: None, or lines of what happens."""

    def __init__(self, rng: random.Random, plan: Plan, trace: list[str] | None) -> None:
        self.draw = rng.random
        self.now_s = 0.0
        self.trace = trace
        self._late, self._twice = plan.late, plan.twice
        self._queue: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    @property
    def next_s(self) -> float:
        """Time of the next message."""
        return self._queue[0][0] if self._queue else FOREVER_S

    def note(self, *words: object) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            names = [getattr(word, "__name__", None) or str(word) for word in words]
            self.trace.append(f"{self.now_s:9.3f}  " + " ".join(names))

    def forget_messages(self) -> None:
        """All connections are closed: the session has ended."""
        self._queue.clear()

    def deliver_next(self) -> None:
        """Let the next message arrive. A dead process does nothing; one that hangs or is stuck does it afterwards."""
        self.now_s, _, process, call, arguments = heapq.heappop(self._queue)
        if process is None:
            if self.trace is not None:
                self.note(call, *arguments)
            call(*arguments)
        elif process.free_s > self.now_s:
            if process.alive and process.free_s < FOREVER_S:
                self._post(process.free_s, process, call, arguments)
        elif process.alive:
            if self.trace is not None:
                self.note(process, call, *arguments)
            call(process, *arguments)

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something after a time."""
        self._post(self.now_s + delay_s, None, call, arguments)

    def takes_s(self, usual_s: float) -> float:
        """Draw the time that a message or an operation takes."""
        draw, late = self.draw(), self._late
        return usual_s * draw if draw >= late else 20.0 * usual_s * draw / late

    def send(self, process: Process, usual_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Let a process compute ``call(process, *arguments)`` once the message is there."""
        self._post(self.now_s + self.takes_s(usual_s), process, call, arguments)

    def answer(self, usual_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Send the controller an answer, sometimes twice."""
        self._post(self.now_s + self.takes_s(usual_s), None, call, arguments)
        if self.draw() < self._twice:
            self._post(self.now_s + self.takes_s(4 * usual_s), None, call, arguments)

    def _post(
        self, time_s: float, process: Process | None, call: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time_s, self._count, process, call, arguments))
