"""Ctrl-C while a command is imported. This module is imported first, so it imports only the standard library."""

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""Exit code of a process that a signal ended."""


def end_on_interrupt() -> None:
    """End the process at once, with one line, on Ctrl-C during imports. A handler that is not Python's stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Undo ``end_on_interrupt``: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
