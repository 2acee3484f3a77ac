"""Training clock; pauses while the process is stopped (SIGSTOP, Ctrl-Z).

    tick ── TICK_S ── tick ── TICK_S ── tick ───────────── stopped ───────────── continued, tick
      + time passed     + time passed     + at most SLACK_S and the CPU time used meanwhile

``time.monotonic`` goes on in a stopped process, and CPU clocks stand still while the process waits. So a thread ticks.
If a library holds the interpreter's lock, it cannot, but then the process uses CPU time, unlike a stopped process.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

TICK_S = 0.25
SLACK_S = 1.0  # a tick may be late on a busy machine


class Tick(NamedTuple):
    """State of the clocks at a tick, s: this one, ``time.monotonic``, and the CPU time of all threads."""

    running: float
    monotonic: float
    cpu: float


class RunningClock:
    """Seconds in which the process was not stopped, from the origin of ``time.monotonic``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._tick = Tick(time.monotonic(), time.monotonic(), time.process_time())

    def read(self) -> float:
        """Return the time. While it ticks, a stop adds at most ``SLACK_S`` and the CPU time of the last ``TICK_S``."""
        return self._at(self._tick, time.monotonic())

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Detect stops of the process inside the context, by a thread."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(TICK_S):
                self._advance()

        thread = threading.Thread(target=tick, name="clock", daemon=True)
        self._advance(new_users=1)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._advance(new_users=-1)

    def _at(self, tick: Tick, monotonic: float) -> float:
        passed_s = monotonic - tick.monotonic
        if self._users and passed_s > SLACK_S:
            passed_s = min(passed_s, SLACK_S + time.process_time() - tick.cpu)
        return tick.running + passed_s

    def _advance(self, new_users: int = 0) -> None:
        with self._lock:
            monotonic = time.monotonic()
            self._tick = Tick(self._at(self._tick, monotonic), monotonic, time.process_time())
            self._users += new_users


_clock = RunningClock()
running_s = _clock.read
ticking = _clock.ticking
