"""Ctrl-C while a command is still being imported: one line and exit code 130, whatever is being imported."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.core.interrupts import INTERRUPTED

COMMANDS = ("train", "eval", "collect", "convert", "tasks", "bench")


def import_until(command: str, module: str, root: Path) -> subprocess.Popen[bytes]:
    """Start a command and return it just after it has imported a module.

    Python writes a line per import to stderr. The pipe holds one page of them, so the command cannot run far ahead.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"embodied.{command}", "--help"],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
    seen, names = b"", [b""]
    while module.encode() not in names:
        piece = process.stderr.read(256)
        assert piece, f"it ended before it imported {module}"
        *lines, seen = (seen + piece).split(b"\n")
        names = [line.rpartition(b"|")[2].strip() for line in lines]
    return process


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *((command, "embodied") for command in COMMANDS),
        *(("train", module) for module in ("numpy", "torch.nn", "mujoco")),
    ],
)
def test_it_ends_quietly(command: str, module: str, root: Path) -> None:
    process = import_until(command, module, root)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    said = [line for line in stderr.splitlines()[1:] if not line.startswith(b"import time:")]
    assert stderr.endswith(b"interrupted\n"), said
    assert b"Traceback" not in stderr
    assert b"KeyboardInterrupt" not in stderr
    assert (process.returncode, stdout) == (INTERRUPTED, b"")


@pytest.mark.parametrize("module", ["embodied", "torch"])
def test_a_second_one_changes_nothing(module: str, root: Path) -> None:
    process = import_until("train", module, root)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    assert b"Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == INTERRUPTED


def test_a_program_that_imports_the_package_keeps_its_handler(root: Path) -> None:
    code = "import signal, embodied; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
