"""Choose the action of a control step among the planned chunks. No clock and no thread: times are control steps.

    synchronous   plan, execute E actions, plan again; the robot holds its targets while it waits
    ensemble      plan at every step; an action is the mean of all plans for its step (ACT, Zhao et al. 2023)
    rtc           real-time chunking: plan the next chunk while the present one is executed

Row i of a chunk belongs to the control step of its observation plus i, whenever the chunk arrives: the rows that were
really consumed meanwhile are skipped. When a chunk runs out before the next one arrives, the last action is repeated,
for at most E steps. After that the arm gets displacement zero and the gripper keeps its last target.
"""

from collections import deque
from dataclasses import dataclass
from math import floor
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError, unknown_name
from embodied.deployment.bundle.description import Bundle

Chunk = NDArray[np.float32]
ScheduleName = Literal["synchronous", "ensemble", "rtc"]
MAX_TICKS_PER_STEP = 1000
DECAY = 0.01  # of the weight of a plan in an ensemble, from each to the next newer one; ACT has this value too
REMEMBERED = 10  # latencies that the estimate of the delay looks back on


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A chunk to plan from the observation of control step ``step``."""

    step: int
    delay: int
    """First actions that are decided already: those that will be executed during the inference."""
    prefix_DA: Chunk
    """These actions, physical units; rows from ``delay`` on are 0."""
    late_s: float
    """Time from the observation to the request."""


class Schedule:
    """Chunks of one episode after the other. horizon, execute, max_delay: H, E and D of the bundle.

    Call ``request`` at the beginning of a control step, then ``action``. The estimated latency of the next inference is
    the largest of the last ones, over all episodes and without the very first one, which warms up.
    """

    def __init__(
        self, kind: str, horizon: int, execute: int, action_dim: int, control_dt_s: float, max_delay: int = 0
    ) -> None:
        if kind not in get_args(ScheduleName):
            raise unknown_name("schedule", kind, get_args(ScheduleName))
        if not 1 <= execute <= horizon:
            raise UserError(f"execute: got {execute}, allowed: 1 to {horizon}")
        self.kind, self.horizon, self.execute, self.max_delay = kind, horizon, execute, max_delay
        self.action_dim, self.control_dt_s = action_dim, control_dt_s
        self._latencies_s: deque[float] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin an episode: forget the chunks, but not the latencies."""
        self.beyond_max_delay = 0
        """Chunks that took longer than the policy was trained for."""
        self.padded: set[int] = set()
        """Control steps for which no chunk had an action."""
        self._chunks: deque[tuple[int, Chunk]] = deque(maxlen=self.horizon)
        self._pending: PlanRequest | None = None
        self._last: tuple[int, Chunk] | None = None  # the last step for which a chunk had an action, and the action

    @property
    def pending(self) -> bool:
        """Whether a requested chunk has not arrived yet."""
        return self._pending is not None

    @property
    def waits(self) -> bool:
        """Whether the robot holds its targets until a requested chunk arrives: always but in real-time chunking."""
        return self.kind != "rtc" or not self._chunks

    def request(self, step: int, late_s: float = 0.0) -> PlanRequest | None:
        """Return what to plan from an observation of ``step``, made ``late_s`` ago; None if nothing is due."""
        lead = 1 if self.kind == "ensemble" else self.execute
        if self.kind == "rtc":
            lead = max(1, min(self.execute, self.horizon - self.delay()))
        if self._pending is not None or (self._chunks and step < self._chunks[-1][0] + lead):
            return None
        delay = 0 if self.waits else min(self.delay(late_s), self.max_delay)
        prefix = np.zeros((self.max_delay, self.action_dim), np.float32)
        if delay:
            start, chunk = self._chunks[-1]
            prefix[:delay] = chunk[np.minimum(step - start + np.arange(delay), len(chunk) - 1)]
        self._pending = PlanRequest(step, delay, prefix, late_s)
        return self._pending

    def note_latency(self, latency_s: float) -> None:
        """Take note of a latency for the estimate."""
        if self._latencies_s is None:
            self._latencies_s = deque(maxlen=REMEMBERED)
        else:
            self._latencies_s.append(latency_s)

    def delay(self, since_s: float = 0.0) -> int:
        """Return the estimated latency, and a time that has passed before, in control steps."""
        return self._steps(since_s + max(self._latencies_s or (), default=0.0))

    def _steps(self, time_s: float) -> int:
        """Return a time in control steps, rounded; half a step is a whole one."""
        return floor(time_s / self.control_dt_s + 0.5)

    def arrive(self, chunk_HA: Chunk, latency_s: float) -> None:
        """Take the chunk of the pending request."""
        assert self._pending is not None, "no chunk was requested"
        self.note_latency(latency_s)
        delay = 0 if self.waits else self._steps(self._pending.late_s + latency_s)
        if self.max_delay and delay > self.max_delay:
            self.beyond_max_delay += 1
        self._chunks.append((self._pending.step, np.asarray(chunk_HA, np.float32)))
        self._pending = None

    def action(self, step: int) -> Chunk:
        """Return the action [A] of control step ``step``, physical units; a chunk that arrives may change it."""
        rows = [chunk[step - start] for start, chunk in self._chunks if start <= step < start + len(chunk)]
        if not rows:
            self.padded.add(step)
            assert self._last is not None, "no chunk has arrived yet"
            last_step, last = self._last
            return last if step - last_step <= self.execute else np.concatenate([np.zeros_like(last[:-1]), last[-1:]])
        self.padded.discard(step)
        action: Chunk = rows[-1]
        if self.kind == "ensemble":
            weights = np.exp(-DECAY * np.arange(len(rows)))
            action = ((weights[:, None] * np.stack(rows)).sum(0) / weights.sum()).astype(np.float32)
        self._last = step, action
        return action


def ticks_per_step(bundle: Bundle, rate_hz: float | None) -> int:
    """Return the commands per control step at a rate; None is the policy's. UserError if it is no whole number."""
    control_hz = 1.0 / bundle.control_dt_s
    rate = control_hz if rate_hz is None else rate_hz
    ticks = round(rate / control_hz)
    if ticks < 1 or abs(ticks * control_hz - rate) > 1e-6 * rate:
        raise UserError(f"rate_hz: got {rate:g}, allowed: whole multiples of the policy's {control_hz:g}")
    if ticks > MAX_TICKS_PER_STEP:
        raise UserError(f"rate_hz: got {rate:g}, allowed: at most {MAX_TICKS_PER_STEP * control_hz:g}")
    return ticks
