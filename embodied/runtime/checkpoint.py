"""Checkpoints that survive crashes, full disks and bit rot.

    <run dir>/checkpoints/
        step_200000/   policy.pt  algorithm.pt  runtime.pt  manifest.json (size and SHA-256 of each)
        last -> step_200000

Timeline of ``save``: write everything into a hidden folder, flush it to the disk, rename the folder, swap the link
``last``, delete the oldest checkpoints. If anything fails before the rename, the hidden folder is removed and earlier
checkpoints are unchanged. ``load_latest`` loads the newest checkpoint whose files match the manifest.

There is one file per top-level key of the state: nested dicts and lists of tensors and plain values. It is written by
``torch.save`` and read with ``weights_only=True`` alone, so no pickled code is run.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from embodied.core.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"


class CorruptCheckpoint(UserError):
    """A file is missing, or differs from the manifest."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was loaded."""

    path: Path
    """Its folder."""
    env_steps: int
    """Control steps when it was saved; updates in a run without a simulator."""
    state: Any
    """The saved state, or the value of the one key that was loaded."""


def save(run_dir: Path, env_steps: int, state: Mapping[str, Any], keep: int = 3) -> Path:
    """Write ``checkpoints/step_<env_steps>`` and point ``last`` to it; keep the newest ``keep``. Return its path.

    OSError (for instance a full disk) leaves nothing half-written and the earlier checkpoints in place.
    """
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".saving-*"):  # from a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    final = folder / f"step_{env_steps}"
    hidden = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    replaced = hidden.with_name(hidden.name + "-replaced")
    try:
        files = {f"{key}.pt": _write(hidden / f"{key}.pt", _serialize(value)) for key, value in state.items()}
        manifest = {"format": FORMAT, "env_steps": env_steps, "files": files}
        _write(hidden / MANIFEST, json.dumps(manifest, indent=1).encode())
        hidden.chmod(0o755)
        _flush_folder(hidden)
        if final.exists():  # saved twice at the same step, or corrupt and skipped
            final.rename(replaced)
        hidden.rename(final)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    _point_last(folder, final.name)
    _flush_folder(folder)
    for old in [*newest_first(folder)[keep:], *folder.glob(".saving-*")]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_latest(run_dir: Path, only: str | None = None) -> Checkpoint | None:
    """Load the newest valid checkpoint of a run, or one top-level key of it; None if the run has no checkpoint.

    A corrupt one is skipped, with a warning. UserError if all of them are corrupt.
    """
    folders = newest_first(run_dir / "checkpoints")
    for folder in folders:
        try:
            return load(folder, only)
        except CorruptCheckpoint as error:
            log.warning("%s; trying the one before", error)
    if folders:
        raise UserError(f"all {len(folders)} checkpoints under {run_dir / 'checkpoints'} are corrupt")
    return None


def load(folder: Path, only: str | None = None) -> Checkpoint:
    """Load one checkpoint. CorruptCheckpoint if a needed file is missing or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files, env_steps = dict(manifest["files"]), int(manifest["env_steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"checkpoint {folder} has no valid {MANIFEST}: {error}") from error
    if manifest.get("format") != FORMAT:
        raise UserError(f"checkpoint {folder} has format {manifest.get('format')}, this version reads {FORMAT}")
    state = {}
    for name, expected in files.items():
        key = name.removesuffix(".pt")
        if only is None or key == only:
            try:
                data = (folder / name).read_bytes()
                if _entry(data) != expected:
                    raise CorruptCheckpoint(f"checkpoint {folder} is corrupt: {name} is not what was written")
                state[key] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except (OSError, UnpicklingError) as error:
                raise CorruptCheckpoint(f"checkpoint {folder} is corrupt: {error}") from error
    if only is not None and only not in state:
        raise UserError(f"checkpoint {folder} has no '{only}', only {', '.join(sorted(files))}")
    return Checkpoint(folder, env_steps, state if only is None else state[only])


def _serialize(value: object) -> bytes:
    """Serialise in memory: writing to a file, torch.save turns an OSError into a RuntimeError without its cause."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> dict[str, Any]:
    """Write a file and flush it to the disk; return its entry in the manifest."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return _entry(data)


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _point_last(folder: Path, name: str) -> None:
    link = folder / ".saving-last"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(folder / "last")


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints ``step_<env_steps>`` in a folder of them, the newest first."""
    steps = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)
