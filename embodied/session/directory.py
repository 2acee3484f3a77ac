"""The directory of a run: its name, checkpoints and the files of wrapped models."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.runtime import checkpoint
from embodied.session.config import PRETRAINED, RunConfig


def check_new_dir(path: Path, otherwise: Callable[[Path], str] = lambda path: "") -> None:
    """Raise UserError if ``out=path`` exists or cannot be made. Nothing is left behind.

    otherwise: returns the end of the message for a path that exists.
    """
    try:
        if path.exists():
            raise UserError(f"out={path} exists; give a new directory{otherwise(path)}")
        parent = next(folder for folder in path.parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=parent))
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror or error}") from error


def resume_hint(path: Path) -> str:
    saved = any(path.glob("checkpoints/*"))
    return f", or go on with that run: resume={path}" if saved else "; it has no checkpoint to go on from"


def new_run_dir(config: RunConfig) -> Path:
    """Choose the directory of a new run, without making it. UserError if ``out=`` exists or cannot be written."""
    if config.out is not None:
        check_new_dir(Path(config.out), resume_hint)
        return Path(config.out)
    task = config.task.name.replace(":", ".")  # a colon separates paths in many variables of the shell
    return Path("runs") / task / f"{config.title}-{datetime.now():%Y%m%d-%H%M%S-%f}"  # others may start in this second


def make_run_dir(run_dir: Path, exist_ok: bool) -> None:
    """Make the directory. UserError if that fails, or if it exists and ``exist_ok`` is False."""
    try:
        run_dir.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise UserError(f"cannot make the run directory {run_dir}: {error.strerror or error}") from error


def save_architecture(policy: Policy, run_dir: Path) -> None:
    """Write the files that a policy around another library's model needs in addition to its checkpoints."""
    if not (run_dir / PRETRAINED).exists():
        policy.save_architecture(run_dir / PRETRAINED)


def save_checkpoint(run_dir: Path, steps: int, state: Mapping[str, Any], after: int | None) -> None:
    """Write a checkpoint (``checkpoint.save``). UserError if the disk is full or cannot be written."""
    try:
        checkpoint.save(run_dir, steps, state, after=after)
    except OSError as error:
        before = "There is none before it" if after is None else "The checkpoint before it is whole"
        raise UserError(
            f"cannot write a checkpoint in {run_dir}: {error.strerror or error}. {before}; make room, then go on with "
            f"resume={run_dir}"
        ) from error
