"""Threads that stop together: who dies takes all others along, and whoever waits is named.

part ── board.set("env worker 0", "waits for actions of groups [1]") ──► Board ◄── watchdog (reads, complains)
part raises ──► Supervisor keeps the first exception ──► runs the stop callbacks ──► ``check`` raises it in the caller
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Board:
    """What each part is doing, and since when. Setting costs a dictionary write."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, float]] = {}

    def set(self, part: str, doing: str) -> None:
        self._entries[part] = (doing, time.monotonic())

    def idle_s(self) -> float:
        """Seconds since anybody did anything; 0 if nobody ever did."""
        return time.monotonic() - max((since for _, since in list(self._entries.values())), default=time.monotonic())

    def report(self) -> str:
        now = time.monotonic()
        return "\n".join(
            f"  {part} {doing} for {now - since:.1f} s" for part, (doing, since) in sorted(self._entries.items())
        )


class Supervisor:
    """Owns the threads of a run. on_stop: called once, by whoever stops first; must wake everything that waits."""

    def __init__(self, watchdog_s: float, on_stop: Callable[[], None]) -> None:
        self.board = Board()
        self.stopping = threading.Event()
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        if watchdog_s > 0:
            self.spawn("watchdog", lambda: self._watch(watchdog_s))

    def spawn(self, name: str, run: Callable[[], None]) -> None:
        """Run ``run`` in a thread; an exception in it stops everything."""

        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # of any kind: the caller of ``check`` raises it
                self.fail(name, error)

        thread = threading.Thread(target=guarded, name=f"embodied {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, name: str, error: BaseException) -> None:
        """Keep the first failure and stop."""
        with self._lock:
            if self._failure is None and not self.stopping.is_set():
                error.add_note(f"(raised in the thread of the {name})")
                self._failure = error
        self.stop()

    def stop(self) -> None:
        """Ask every thread to end; returns at once."""
        with self._lock:
            if self.stopping.is_set():
                return
            self.stopping.set()
        self._on_stop()

    def check(self) -> None:
        """Raise what killed a part, if one died, with its traceback."""
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """``stop`` and wait for all threads. One that does not end says so every 10 seconds."""
        self.stop()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(10.0)
                if thread.is_alive():
                    log.warning("waiting for the thread '%s' to end\n%s", thread.name, self.board.report())
        self._threads.clear()

    def _watch(self, watchdog_s: float) -> None:
        reported_at = 0.0
        while not self.stopping.wait(min(watchdog_s / 4, 1.0)):
            idle_s = self.board.idle_s()
            if idle_s >= watchdog_s and time.monotonic() - reported_at >= watchdog_s:
                reported_at = time.monotonic()
                log.warning("no progress for %.0f s:\n%s", idle_s, self.board.report())
