"""What stands around every training loop: its directory, its checkpoints, the signals that end it in good order."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied.core.errors import UserError
from embodied.core.protocols import Policy, Pretrained
from embodied.run.config import PRETRAINED, RunConfig
from embodied.runtime import checkpoint


def new_run_dir(config: RunConfig) -> Path:
    """Where a new run goes. UserError if ``out=`` exists; nothing is made yet."""
    if config.out is not None:
        if Path(config.out).exists():
            raise UserError(
                f"out={config.out} exists; give a new directory, or go on with that run: resume={config.out}"
            )
        return Path(config.out)
    base = Path("runs") / config.task["name"] / f"{config.title}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
    return next(name for name in names if not name.exists())


def make_run_dir(run_dir: Path, exist_ok: bool) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise UserError(f"cannot make the run directory {run_dir}: {error.strerror or error}") from error


def keep_architecture(policy: Policy, run_dir: Path) -> None:
    """What the weights of a new run's checkpoints need beside them, if the policy wraps another library's model."""
    if isinstance(policy, Pretrained) and not (run_dir / PRETRAINED).exists():
        policy.save_architecture(run_dir / PRETRAINED)


def keep_pretrained(policy: Policy, run_dir: Path) -> None:
    """The trained model in the layout of the library that it comes from."""
    if isinstance(policy, Pretrained):
        policy.save_pretrained(run_dir / PRETRAINED)


def save_checkpoint(run_dir: Path, steps: int, state: Mapping[str, Any]) -> None:
    """A checkpoint; UserError if the disk does not take it."""
    try:
        checkpoint.save(run_dir, steps, state)
    except OSError as error:
        raise UserError(
            f"cannot write a checkpoint in {run_dir}: {error.strerror or error}. The checkpoint before it is "
            f"whole; make room, then go on with resume={run_dir}"
        ) from error


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second signal acts as if nobody listened.

    Signals reach the main thread only: elsewhere the event is set by no one.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: Any) -> None:
        stop.set()
        restore()
        print("stopping: saving a checkpoint (once more: at once, without)", file=sys.stderr)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()
