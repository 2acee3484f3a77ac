"""Signals that end a run in good order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from embodied.core.interrupts import INTERRUPTED

HANGS_S = 8.0  # how long the parts of an interrupted run may take to end


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


@contextmanager
def ending_in_time() -> Iterator[None]:
    """End the process if the block takes longer than ``HANGS_S``: a part that it waits for hangs."""
    last_resort = threading.Timer(HANGS_S, _end)
    last_resort.daemon = True
    last_resort.start()
    try:
        yield
    finally:
        last_resort.cancel()


def _end() -> None:
    os.write(2, b"interrupted; a part of the run hangs and was not waited for\n")
    os._exit(INTERRUPTED)
