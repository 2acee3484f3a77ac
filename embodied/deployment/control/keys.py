"""The emergency key: any key on the terminal. Standard library alone, no display.

It reads the terminal that the program was started on, and only while the program is in its foreground. Without a
terminal, as under nohup, in a container or as a service, there is no key, and nothing is read.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from contextlib import suppress
from typing import Any, TextIO


class EmergencyKey:
    """Watch the keys of a terminal inside ``with``; Ctrl-C keeps its meaning there.

    stream: the terminal; None is stdin.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdin if stream is None else stream
        self._before: list[Any] | None = None
        self._pressed = False

    @property
    def watching(self) -> bool:
        """Whether a key would be noticed now."""
        return self._before is not None

    def __enter__(self) -> EmergencyKey:
        self._pressed = False
        stream = self._stream
        if stream is not None and not stream.closed and stream.isatty() and self._in_foreground():
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream)  # keys arrive without Enter; those pressed before are forgotten
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and self._in_foreground():
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._stream, termios.TCSAFLUSH, self._before)
        self._before = None

    def pressed(self) -> bool:
        """Return whether a key has been pressed since ``__enter__``. ConnectionError if the terminal is gone."""
        watched = self._before is not None and self._in_foreground()
        if watched and not self._pressed and select.select([self._stream], [], [], 0.0)[0]:
            with suppress(OSError):
                self._pressed = bool(os.read(self._stream.fileno(), 1024))
            if not self._pressed:
                self._before = None
                raise ConnectionError("the terminal is gone, and the emergency key with it")
        return self._pressed

    def _in_foreground(self) -> bool:
        """Return whether this process may read the terminal; one in the background would be stopped by the system."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except OSError:  # it is not the terminal of this session, so the system does not mind
            return True
