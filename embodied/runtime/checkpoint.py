"""Checkpoints that survive crashes, full disks and bit rot.

    <run dir>/checkpoints/
        step_200000/   policy.pt  algorithm.pt  runtime.pt  manifest.json (size and SHA-256 of each)
        last -> step_200000

Timeline of ``save``: write everything into a hidden folder, flush it to the disk, rename the folder, swap the link
``last``, delete the oldest checkpoints. There is one file per top-level key of the state: nested dicts and lists of
tensors and plain values, written by ``torch.save`` and read with ``weights_only=True``, so no pickled code is run.
"""

import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.errors import UserError, one_line
from embodied.runtime.checkpoint_names import newest, newest_first, steps_of

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"


class CorruptCheckpoint(UserError):
    """A file is missing, or differs from the manifest."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was loaded."""

    path: Path
    env_steps: int
    """Control steps when it was saved; updates in a run without a simulator."""
    state: Any
    """The saved state, or the value of the one key that was loaded."""


def save(run_dir: Path, env_steps: int, state: Mapping[str, Any], *, keep: int = 3, after: int | None = None) -> Path:
    """Write ``checkpoints/step_<env_steps>`` and point ``last`` to it; keep the newest ``keep`` whole ones.

    after: steps of the checkpoint that the state continues from, or of the one saved before; newer ones are deleted.
    None: there is no such checkpoint, and none is deleted for being newer. Return the path of the new checkpoint.
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
        files = {}
        for key, value in state.items():
            buffer = io.BytesIO()  # to a file, torch.save would turn an OSError into a RuntimeError
            torch.save(value, buffer)
            files[f"{key}.pt"] = _write(hidden / f"{key}.pt", buffer.getbuffer())
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
    link = folder / ".saving-last"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(folder / "last")
    _flush_folder(folder)
    before = [path for path in newest_first(folder) if path != final and (after is None or steps_of(path) <= after)]
    kept = {final, *[path for path in before if _has_its_sizes(path)][: keep - 1]}  # hashes would cost reading them
    for path in {*newest_first(folder), *folder.glob(".saving-*")} - kept:
        shutil.rmtree(path, ignore_errors=True)
    return final


def load_latest(run_dir: Path, only: str | None = None) -> Checkpoint | None:
    """Load the newest whole checkpoint, or ``only`` one key of it; None without any. UserError if all are corrupt."""
    folders = newest_first(run_dir / "checkpoints")
    for folder in folders:
        try:
            return load(folder, only)
        except CorruptCheckpoint as error:
            log.warning("%s; trying the one before", error)
    if folders:
        raise UserError(f"all {len(folders)} checkpoints under {run_dir / 'checkpoints'} are corrupt")
    return None


def load_last(run_dir: Path, only: str | None = None) -> Checkpoint:
    """Load the newest checkpoint, or ``only`` one key of it. UserError if there is none, or it is damaged."""
    last = newest(run_dir)
    try:
        return load(last, only)
    except CorruptCheckpoint as error:
        before = newest_first(last.parent)[1:]
        for older in before:
            with suppress(CorruptCheckpoint):
                load(older, only)
                how = f"eval and export take it with checkpoint={older.name}, compare with policies=[{older},...]"
                whole = f"{older.name} is older and whole: {how}; for other commands, remove {last}"
                raise UserError(f"{error}. {whole}") from error
        if before:
            raise UserError(f"all {1 + len(before)} checkpoints under {last.parent} are corrupt") from error
        raise


def load(folder: Path, only: str | None = None) -> Checkpoint:
    """Load one checkpoint. CorruptCheckpoint if a needed file is missing, damaged or unreadable."""
    files, env_steps = _read_manifest(folder)
    state = {}
    for name, expected in files.items():
        key = name.removesuffix(".pt")
        if only is None or key == only:
            corrupt = f"checkpoint {folder} is corrupt"
            try:
                data = (folder / name).read_bytes()
            except OSError as error:
                raise CorruptCheckpoint(f"{corrupt}: {error}") from error
            if _entry(data) != expected:
                raise CorruptCheckpoint(f"{corrupt}: {name} is not what was written")
            try:
                state[key] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:  # torch has no exception of its own for bytes that it cannot read
                raise CorruptCheckpoint(f"{corrupt}: cannot read {name}: {one_line(error)}") from error
    if only is not None and only not in state:
        raise UserError(f"checkpoint {folder} has no '{only}', only {', '.join(sorted(files))}")
    return Checkpoint(folder, env_steps, state if only is None else state[only])


def policy_hash(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's policy, by its manifest."""
    return str(_read_manifest(folder)[0]["policy.pt"]["sha256"])


def read_weights(found: object, where: str) -> dict[str, Tensor]:
    """Return the value of a policy's file; UserError unless it has tensors by name. where: start of the message."""
    if not isinstance(found, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items()
    ):
        raise UserError(f"{where}: its policy is not a dictionary of tensors")
    return dict(found)


def check_weights(found: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError unless the names and shapes are those of ``own``. where: start of the message."""
    differ = sorted(own.keys() ^ found.keys())
    differ += sorted(key for key in own.keys() & found.keys() if own[key].shape != found[key].shape)
    if differ:
        raise UserError(f'{where}: {len(differ)} weights do not fit, such as "{differ[0]}"')


def _read_manifest(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of the files by name, and the steps. CorruptCheckpoint if there is no valid manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files, env_steps = dict(manifest["files"]), int(manifest["env_steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"checkpoint {folder} has no valid {MANIFEST}: {error}") from error
    if manifest.get("format") != FORMAT:
        raise UserError(f"checkpoint {folder} has format {manifest.get('format')}, this version reads {FORMAT}")
    return files, env_steps


def _has_its_sizes(folder: Path) -> bool:
    try:
        files, _ = _read_manifest(folder)
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (UserError, OSError, KeyError, TypeError):
        return False


def _write(path: Path, data: bytes | memoryview) -> dict[str, Any]:
    """Write a file and flush it to the disk; return its entry in the manifest."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return _entry(data)


def _entry(data: bytes | memoryview) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
