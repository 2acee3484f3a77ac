"""Commands on a terminal of their own, as a person has one."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path


def start_on_terminal(module: str, words: Sequence[str], root: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a command that reads from and writes its stderr to a terminal; return it and the person's end of that."""
    person, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=root, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    return process, person
