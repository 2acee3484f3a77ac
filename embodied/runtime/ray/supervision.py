"""Supervision of parts that may die or hang, as a pure state machine: events in, decisions out.

    event (time, part, incarnation) ──► Supervision ──► decisions: Start, Ask, Kill, End ──► carried out by the runtime

It has no clock, thread or process: every event carries its time in seconds. The life of a part:

    WAITING ── back-off over: Start ──► STARTING ── started ──► UP ── every ask_s: Ask ──► answered ──► UP
       ▲                                   │ failed, or not up in time            │ failed, or no answer in time
       └─── Kill, incarnation + 1 ◄────────┴──────────────────────────────────────┘

Every replacement is a new incarnation, and events of earlier ones have no effect. ``Kill`` comes before the next
``Start`` of the part; the leases of the killed one return to the ledger, which then refuses what it still delivers.

The run ends with the first exception of a crash loop, and at once if a part fails in a way that no restart can cure.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Unresponsive(Exception):
    """A part did not start or answer in time, or was in one operation for too long."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of time, s, and of failures."""

    start_s: float
    """Most time from ``Start`` to ``started``."""
    answer_s: float
    """Most time from ``Ask`` to ``answered``."""
    operation_s: float
    max_failures: int
    """Failures without useful work in between that are cured by a restart."""
    max_in_window: int
    """Failures in ``window_s``, with useful work in between or not, that are cured by a restart."""
    window_s: float = 3600.0
    ask_s: float = 1.0
    """Time between an answer and the next ``Ask``."""
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    """Time from the first failure to the restart, which doubles with every further failure, and its limit."""


@dataclass(frozen=True, slots=True)
class _OfPart:
    part: str
    incarnation: int


class Start(_OfPart):
    """Create this incarnation of a part."""


class Ask(_OfPart):
    """Ask this incarnation for a sign of life."""


@dataclass(frozen=True, slots=True)
class Kill(_OfPart):
    """Make sure that this incarnation is gone, and give back what it holds."""

    cause: BaseException


@dataclass(frozen=True, slots=True)
class End:
    """End the run. It is the last decision."""

    part: str
    cause: BaseException
    """The first exception of the part's crash loop."""


Decision = Start | Ask | Kill | End


class Phase(Enum):
    """Where a part is in its life."""

    WAITING = "waits to be started"
    STARTING = "starts"
    UP = "is up"


@dataclass(slots=True)
class _Part:
    name: str
    operation_s: float  # most time in one operation
    start_s: float  # most time from Start to started
    due_s: float  # WAITING: of Start; STARTING: of started; UP: of the next Ask, or of its answer
    incarnation: int = 0
    phase: Phase = Phase.WAITING
    asked: bool = False
    failures: int = 0  # since its last useful work
    first: BaseException | None = None  # exception of the first of them
    recent: deque[tuple[float, BaseException]] = field(default_factory=deque)  # time and exception, in the window


class Supervision:
    """States of all parts. Its methods are the events; most return decisions in the order to carry them out.

    parts: names. operation_s, start_s: limits of those that have another one than that of ``Patience``.
    """

    def __init__(
        self,
        parts: Iterable[str],
        patience: Patience,
        now_s: float = 0.0,
        operation_s: Mapping[str, float] | None = None,
        start_s: Mapping[str, float] | None = None,
    ) -> None:
        operation, start = operation_s or {}, start_s or {}
        self.patience = patience
        self.restarts = 0
        self.ended = False
        self._parts = {
            name: _Part(name, operation.get(name, patience.operation_s), start.get(name, patience.start_s), now_s)
            for name in parts
        }

    @property
    def due_s(self) -> float:
        """Time at which ``tick`` has something to do, unless an event comes first."""
        return min(part.due_s for part in self._parts.values())

    def incarnation(self, part: str) -> int:
        """Return the present incarnation of a part, or while it waits the next one."""
        return self._parts[part].incarnation

    def cause(self, part: str) -> BaseException:
        """Return why a part was replaced last; it has been."""
        return self._parts[part].recent[-1][1]

    def is_up(self, part: str, incarnation: int | None = None) -> bool:
        """Return whether a part is up, and in that incarnation if one is given."""
        state = self._parts[part]
        return state.phase is Phase.UP and incarnation in (None, state.incarnation)

    def tick(self, now_s: float) -> list[Decision]:
        decisions: list[Decision] = []
        for part in self._parts.values():
            if now_s >= part.due_s and not self.ended:
                decisions += self._overdue(part, now_s)
        return decisions

    def started(self, part: str, incarnation: int, now_s: float) -> None:
        """A part has been created and can be used."""
        state = self._current(part, incarnation, Phase.STARTING)
        if state is not None:
            state.phase, state.asked, state.due_s = Phase.UP, False, now_s + self.patience.ask_s

    def answered(self, part: str, incarnation: int, now_s: float, busy_s: float = 0.0) -> list[Decision]:
        """A part answered ``Ask``. busy_s: for how long it has been in its present operation."""
        state = self._current(part, incarnation, Phase.UP)
        if state is None:
            return []
        if busy_s > state.operation_s:
            return self._lost(state, now_s, Unresponsive(f"{part} has been in one operation for {busy_s:.0f} s"))
        state.asked, state.due_s = False, now_s + self.patience.ask_s
        return []

    def worked(self, part: str, incarnation: int) -> None:
        """A part did useful work: what failed before it was no crash loop."""
        state = self._current(part, incarnation, Phase.UP)
        if state is not None:
            state.failures, state.first = 0, None

    def failed(
        self, part: str, incarnation: int, now_s: float, cause: BaseException, curable: bool = True
    ) -> list[Decision]:
        """A part died or raised ``cause``. curable: whether a restart may help."""
        state = self._current(part, incarnation, Phase.STARTING, Phase.UP)
        return [] if state is None else self._lost(state, now_s, cause, curable)

    def _current(self, part: str, incarnation: int, *phases: Phase) -> _Part | None:
        """Return the state of a part, or None if the event is of another incarnation or phase, or of an ended run."""
        state = self._parts[part]
        return state if not self.ended and incarnation == state.incarnation and state.phase in phases else None

    def _overdue(self, part: _Part, now_s: float) -> list[Decision]:
        answer_s = self.patience.answer_s
        if part.phase is Phase.WAITING:
            part.phase, part.due_s = Phase.STARTING, now_s + part.start_s
            return [Start(part.name, part.incarnation)]
        if part.phase is Phase.STARTING:
            return self._lost(part, now_s, Unresponsive(f"{part.name} did not start within {part.start_s:g} s"))
        if part.asked:
            return self._lost(part, now_s, Unresponsive(f"{part.name} gave no sign of life for {answer_s:g} s"))
        part.asked, part.due_s = True, now_s + answer_s
        return [Ask(part.name, part.incarnation)]

    def _lost(self, part: _Part, now_s: float, cause: BaseException, curable: bool = True) -> list[Decision]:
        patience, recent = self.patience, part.recent
        part.failures += 1
        part.first = part.first or cause
        recent.append((now_s, cause))
        while recent[0][0] <= now_s - patience.window_s:
            recent.popleft()
        in_a_row, in_window = part.failures > patience.max_failures, len(recent) > patience.max_in_window
        if not curable or in_a_row or in_window:
            self.ended = True
            return [End(part.name, cause if not curable else part.first if in_a_row else recent[0][1])]
        self.restarts += 1
        killed = Kill(part.name, part.incarnation, cause)
        delay_s = min(patience.backoff_s * 2 ** (part.failures - 1), patience.max_backoff_s)
        part.incarnation += 1
        part.phase, part.asked, part.due_s = Phase.WAITING, False, now_s + delay_s
        return [killed]
