"""Signals that end a run in good order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
