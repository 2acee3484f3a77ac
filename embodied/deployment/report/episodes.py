"""Files of episodes: plain arrays, one file per episode, written when it ends. numpy only.

embodied.deploy report=<dir> ──► episodes/<n>.npz ── embodied.convert bundle=<dir> ──► LeRobotDataset
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import UserError
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.files import load_arrays
from embodied.deployment.report.record import Deployment, EpisodeRecord, Step

EPISODES = "episodes"
"""Folder of the files in that of a report."""


def save_episode(folder: Path, record: EpisodeRecord, index: int) -> None:
    """Write an episode at once, if it has a control step.

    Arrays by control step: time (s), state, action (physical units), qpos and target (rad, m), images. Beside them
    instruction, success (False if nobody said so) and the reason of its end.
    """
    if not record.steps:
        return
    arrays: dict[str, Any] = {name: record.stack(name) for name in ("time_s", "state", "action", "qpos", "target")}
    arrays |= {"success": bool(record.success), "instruction": record.instruction, "reason": record.reason}
    for camera in record.steps[0].images:
        arrays[f"images.{camera}"] = np.stack([step.images[camera] for step in record.steps])
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{index:04d}.part"
    with part.open("wb") as file:
        np.savez_compressed(file, **{f"{index}/{name}": value for name, value in arrays.items()})
    part.replace(part.with_suffix(".npz"))


def load_episodes(source: Path, bundle: Bundle) -> Deployment:
    """Read episodes that ``save_episode`` wrote, from a folder or one file; fill what a data set needs.

    UserError for something else, or for episodes of another policy than the bundle's.
    """
    try:
        paths = sorted(source.glob("*.npz")) if source.is_dir() else [source]
        if not paths:
            raise UserError("it has no .npz file")
        arrays = {name: value for path in paths for name, value in load_arrays(path).items()}
        found = Deployment(bundle, "", bundle.robot)
        for index in sorted({int(name.partition("/")[0]) for name in arrays}):
            parts = {name.partition("/")[2]: value for name, value in arrays.items() if name.startswith(f"{index}/")}
            found.records.append(_record(parts, bundle))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"source={source} has no {EPISODES} of a report: {error}") from error
    return found


def _record(arrays: dict[str, Any], bundle: Bundle) -> EpisodeRecord:
    """Return an episode from its arrays. UserError if their shapes are not those of the bundle's policy."""
    state, action, count = arrays["state"], arrays["action"], len(arrays["state"])
    images = {camera.name: arrays[f"images.{camera.name}"] for camera in bundle.cameras}
    wanted = {camera.name: (count, camera.height, camera.width, 3) for camera in bundle.cameras}
    shapes = {name: value.shape for name, value in images.items()}
    if (state.shape[1:], action.shape) != ((bundle.state_dim,), (count, bundle.action_dim)):
        raise UserError("its states and actions are of another policy than the bundle's")
    if shapes != wanted:
        raise UserError(f"its images are {shapes}, the bundle's policy sees {wanted}")
    none = np.zeros(0)
    steps = [
        Step(
            i * bundle.control_dt_s, state[i], {name: value[i] for name, value in images.items()}, action[i], none, none
        )
        for i in range(count)
    ]
    return EpisodeRecord(str(arrays["instruction"]), success=bool(arrays["success"]), steps=steps)
