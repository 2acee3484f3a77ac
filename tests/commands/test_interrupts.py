"""Signals: while a command is imported, Ctrl-C is one line and exit code 130; while it works, its end in good order."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embodied.core.process.interrupts import INTERRUPTED
from embodied.session.command import interrupt_on_signals, stop_on_signals

COMMANDS = ("train", "eval", "collect", "convert", "tasks", "bench")


def import_until(command: str, module: str, root: Path) -> subprocess.Popen[bytes]:
    """Start a command with a wrong word and return it just after it has imported a module.

    ``train`` refuses a directory that exists only once everything is imported. Python writes a line per import to
    stderr. The pipe holds one page of them, so the command cannot run far ahead.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"embodied.{command}", "out=." if command == "train" else "nothing=1"],
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


# -- while a command works ---------------------------------------------------------------------------------------------
@pytest.fixture
def hangup() -> Iterator[None]:
    """Restore what SIGHUP does."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_any_number_of_hangups_is_one_stop() -> None:
    with stop_on_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop.is_set()
    signal.raise_signal(signal.SIGHUP)


@pytest.mark.usefixtures("hangup")
def test_a_signal_within_the_handler_of_another_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system and the shell send two at once; an event cannot be set while this thread sets it."""
    with stop_on_signals() as stop:
        set_event, calls = stop.set, 0

        def interrupted() -> None:
            nonlocal calls
            calls += 1
            assert calls == 1
            signal.raise_signal(signal.SIGHUP)
            set_event()

        monkeypatch.setattr(stop, "set", interrupted)
        signal.raise_signal(signal.SIGHUP)
        assert stop.is_set()


@pytest.mark.usefixtures("hangup")
def test_under_nohup_a_hangup_stops_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupt_on_signals(), stop_on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_the_first_hangup_are_taken_for_ctrl_c(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
        signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is before
    if number == signal.SIGHUP:
        signal.raise_signal(number)
