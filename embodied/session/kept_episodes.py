"""Episodes of an evaluation, kept beside its result so that ``embodied.replay`` can make them again.

<run dir>/eval/<name>.json              the result, with the hash of its checkpoint and what computed it
<run dir>/eval/<name>.episodes.jsonl    one object per episode: plan, env, outcomes, hash of its actions
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from embodied.core.errors import UserError
from embodied.report.metrics import read_metrics, write_atomically, write_json
from embodied.runtime.checkpoint import policy_hash

SUFFIX = ".episodes.jsonl"


def write_evaluation(path: Path, found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the result of an evaluation, and beside it the ``records`` in it; return the result. folder: checkpoint."""
    result, rows = dict(found), found.get("records")
    if rows is not None:
        del result["records"]
        result |= {**identity(folder), "made_with": made_with()}
        path.parent.mkdir(exist_ok=True)
        write_atomically(path.with_suffix(SUFFIX), "".join(f"{json.dumps(row)}\n" for row in rows))
    write_json(path, result)
    return result


def identity(folder: Path) -> dict[str, str]:
    """Return how results name a checkpoint: its folder's name and the SHA-256 of its policy."""
    return {"checkpoint": folder.name, "checkpoint_sha256": policy_hash(folder)}


def made_with() -> dict[str, str]:
    """Return what rounds numbers in this process: versions, and the instruction set that torch uses."""
    versions = {name: version(name) for name in ("torch", "mujoco", "numpy")}
    return versions | {"cpu": torch.backends.cpu.get_cpu_capability()}


def read_episodes(path: Path, number: int) -> list[dict[str, Any]]:
    """Read the records of a result's episodes. UserError if they are missing, cut off or not so many."""
    kept = path.with_suffix(SUFFIX)
    if not kept.is_file():
        raise UserError(f"eval={path} has no episodes beside it: {kept.name} is missing")
    rows = [row for row in read_metrics(kept) if isinstance(row, dict) and {"env", "actions"} <= row.keys()]
    if len(rows) != number:
        found = f"{kept.name} has {len(rows)} whole records"
        raise UserError(f"eval={path} is of {number} episodes, {found}: one was cut off or changed")
    return rows
