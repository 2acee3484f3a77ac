"""Signals: Ctrl-C while a command is imported, and signals that end a run in good order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code of a process that a signal ended."""


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, with one line and ``INTERRUPTED``.

    For the imports of a command, when nothing is open that must be closed. A handler that is not Python's own stays.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Undo ``end_on_interrupt``: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; a second signal has its usual effect.

    Signals reach the main thread only: in any other thread nothing sets the event.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore()
        print("stopping: saving a checkpoint (once more: at once, without)", file=sys.stderr)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()
