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
from embodied.report.metrics import write_atomically, write_json
from embodied.runtime.checkpoint import policy_hash

SUFFIX = ".episodes.jsonl"


def write_evaluation(path: Path, found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the result of an evaluation, and beside it the ``records`` in it; return the result. folder: checkpoint."""
    result, rows = dict(found), found.get("records")
    if rows is not None:
        del result["records"]
        result |= {"checkpoint": folder.name, "checkpoint_sha256": policy_hash(folder), "made_with": made_with()}
        path.parent.mkdir(exist_ok=True)
        write_atomically(path.with_suffix(SUFFIX), "".join(f"{json.dumps(row)}\n" for row in rows))
    write_json(path, result)
    return result


def made_with() -> dict[str, str]:
    """Return what rounds numbers in this process: versions, and the instruction set that torch uses."""
    versions = {name: version(name) for name in ("torch", "mujoco", "numpy")}
    return versions | {"cpu": torch.backends.cpu.get_cpu_capability()}


def read_episodes(path: Path, number: int) -> list[dict[str, Any]]:
    """Read the records of a result's episodes. UserError if they are missing, malformed or not so many."""
    kept = path.with_suffix(SUFFIX)
    try:
        rows = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"eval={path} has no episodes beside it, {kept.name}: {error}") from error
    if len(rows) != number or not all(isinstance(row, dict) and {"env", "actions"} <= row.keys() for row in rows):
        raise UserError(f"eval={path} is of {number} episodes, {kept.name} has not a record of each")
    return rows
