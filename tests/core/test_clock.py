"""The clock of a training stands still while the process is stopped, and not while it is busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from embodied.core.clock import SLACK_S, TICK_S, running_s, ticking

STOPPED_S = 3.0
READINGS = """
import time
from embodied.core.clock import running_s, ticking
with ticking():
    print(running_s(), time.monotonic(), flush=True)
    input()
    print(running_s(), time.monotonic(), flush=True)
"""


def stop_for(pid: int, seconds: float) -> None:
    """Stop a child process, and continue it after so many seconds."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def test_a_stop_does_not_count(root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", READINGS], cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    before_s = [float(word) for word in process.stdout.readline().split()]
    stop_for(process.pid, STOPPED_S)
    after_s = [float(word) for word in process.communicate("\n", timeout=60)[0].split()]
    running, monotonic = (after - before for before, after in zip(before_s, after_s, strict=True))
    assert monotonic >= STOPPED_S
    assert 0 <= running <= monotonic - STOPPED_S + SLACK_S + TICK_S


def test_what_keeps_the_interpreter_from_ticking_counts() -> None:
    """``sum`` of a range does not release the interpreter's lock, and takes longer than SLACK_S."""
    with ticking():
        began = running_s(), time.monotonic(), time.process_time()
        while time.process_time() - began[2] < 2 * SLACK_S:
            sum(range(60_000_000))
        passed = running_s() - began[0]
        assert passed >= min(time.monotonic() - began[1], time.process_time() - began[2]) - TICK_S


def test_waiting_counts() -> None:
    with ticking():
        began = running_s()
        time.sleep(2 * SLACK_S)
        assert running_s() - began >= SLACK_S


def test_it_never_runs_back_and_leaves_no_thread() -> None:
    threads, readings = set(threading.enumerate()), [running_s()]
    for _ in range(3):
        with ticking(), ticking():
            readings += [running_s(), running_s()]
        readings.append(running_s())
    assert readings == sorted(readings)
    assert set(threading.enumerate()) == threads
