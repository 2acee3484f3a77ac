"""Threads that stop together: if one fails, all stop; a watchdog logs which part waits for which.

part ── board.set("env worker 0", "waits for actions of groups [1]") ──► Board ◄── watchdog (reads, warns)
part raises ──► ThreadGroup keeps the first exception ──► runs the stop callbacks ──► ``check`` raises it in the caller
"""

import logging
import threading
from collections.abc import Callable

from embodied.core.clock import running_s

log = logging.getLogger(__name__)


class Board:
    """Present activity of each part, and its start. Setting costs a dictionary write."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, float]] = {}

    def set(self, part: str, doing: str) -> None:
        """Set the activity of a part."""
        self._entries[part] = (doing, running_s())

    def idle_s(self) -> float:
        """Return the seconds since any part changed its activity; 0 if none has one."""
        return running_s() - max((since for _, since in list(self._entries.values())), default=running_s())

    def report(self) -> str:
        """Return a line per part."""
        now, entries = running_s(), sorted(self._entries.items())
        return "\n".join(f"  {part} {doing} for {now - since:.1f} s" for part, (doing, since) in entries)


class ThreadGroup:
    """Owner of a run's threads. on_stop: called once, at the first stop; it must end every wait."""

    def __init__(self, watchdog_s: float, on_stop: Callable[[], None]) -> None:
        self.board = Board()
        self.stopping = threading.Event()
        self._watchdog_s, self._on_stop = watchdog_s, on_stop
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def started(self) -> bool:
        """Whether there has been a thread."""
        return bool(self._threads)

    def spawn(self, name: str, run: Callable[[], None]) -> None:
        """Run ``run`` in a new thread; an exception in it stops all threads. The first thread starts the watchdog."""
        watched = self.started or self._watchdog_s <= 0
        for title, function in [(name, run)] if watched else [("watchdog", self._watch), (name, run)]:
            thread = threading.Thread(target=self._guard, args=(title, function), name=f"embodied {title}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guard(self, name: str, run: Callable[[], None]) -> None:
        """Run a thread; keep the first failure of all and stop."""
        try:
            run()
        except BaseException as error:  # of any kind: ``check`` raises it again
            with self._lock:
                if self._failure is None and not self.stopping.is_set():
                    error.add_note(f"(raised in the thread of the {name})")
                    self._failure = error
            self.stop()

    def stop(self) -> None:
        """Signal every thread to end; return at once."""
        with self._lock:
            if self.stopping.is_set():
                return
            self.stopping.set()
        self._on_stop()

    def check(self) -> None:
        """Raise the exception of the first part that failed, if one did, with its traceback."""
        if self._failure is not None:
            raise self._failure

    def check_running(self) -> None:
        """Raise the exception of the first part that failed, or RuntimeError if the threads have been stopped."""
        stopping = self.stopping.is_set()  # read before ``check``: a failure is set before ``stopping``
        self.check()
        if stopping:
            raise RuntimeError("the runtime is closed")

    def join(self) -> None:
        """Stop and wait for all threads. Every 10 seconds, log a thread that has not ended."""
        self.stop()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(10.0)
                if thread.is_alive():
                    log.warning("waiting for the thread '%s' to end\n%s", thread.name, self.board.report())

    def _watch(self) -> None:
        watchdog_s, reported_at = self._watchdog_s, 0.0
        while not self.stopping.wait(min(watchdog_s / 4, 1.0)):
            idle_s = self.board.idle_s()
            if idle_s >= watchdog_s and running_s() - reported_at >= watchdog_s:
                reported_at = running_s()
                log.warning("no progress for %.0f s:\n%s", idle_s, self.board.report())
