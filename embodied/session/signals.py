"""Signals that end a run in good order: Ctrl-C, SIGTERM, and SIGHUP of a terminal that was closed.

Shell and system may both send SIGHUP, so only the first SIGHUP counts. Under ``nohup``, SIGHUP stays ignored.
"""

import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from embodied.core.process.interrupts import INTERRUPTED

Handler = Callable[[int, FrameType | None], None]
SAVING = "stopping: saving a checkpoint (Ctrl-C again: stop now without saving)"
HANGS_S = 8.0  # how long the parts of an interrupted run may take to end


@contextmanager
def stop_on_signals(note: str = SAVING) -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; a second signal has its usual effect.

    note: written to stderr at the first signal. Only the main thread gets signals; in any other thread the event stays
    unset.
    """
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        _hang_up(number)
        restore()
        with suppress(OSError):  # print() is not reentrant
            os.write(2, f"{note}\n".encode())

    with _handling(on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as restore:
        yield stop


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, which raises KeyboardInterrupt; only the main thread can."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        _hang_up(number)
        raise KeyboardInterrupt

    with _handling(on_signal, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handling(handler: Handler, *numbers: signal.Signals) -> Iterator[Callable[[], None]]:
    """Handle signals in the main thread, except an ignored SIGHUP; yield what restores the handlers of before."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def restore() -> None:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, earlier)

    for number in before:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()


def _hang_up(number: int) -> None:
    """After SIGHUP, ignore later ones, and redirect the streams of the closed terminal to ``/dev/null``."""
    if number != signal.SIGHUP:
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        poll = select.poll()
        poll.register(stream, 0)
        gone = any(event & select.POLLHUP for _, event in poll.poll(0))
        if gone and stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def ending_in_time() -> Iterator[None]:
    """End the process if the block takes longer than ``HANGS_S``, because a component hangs."""

    def end() -> None:
        os.write(2, b"interrupted; a component did not shut down in time\n")
        os._exit(INTERRUPTED)

    last_resort = threading.Timer(HANGS_S, end)
    last_resort.daemon = True
    last_resort.start()
    try:
        yield
    finally:
        last_resort.cancel()
