"""Episodes of a deployment as plain arrays, for a robot's computer, which cannot write a data set. numpy only.

embodied.deploy report=<dir> ──► episodes.npz ── embodied.convert bundle=<dir> ──► LeRobotDataset
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import UserError
from embodied.deployment.bundle import Bundle
from embodied.deployment.files import load_arrays
from embodied.deployment.record import EpisodeRecord
from embodied.deployment.report import Deployment

EPISODES_FILE = "episodes.npz"


def save_episodes(path: Path, deployment: Deployment) -> None:
    """Write the episodes with at least one control step: states, actions (physical units), images, outcomes."""
    arrays: dict[str, Any] = {}
    for index, record in enumerate(deployment.records):
        if not record.states:
            continue
        success = index < len(deployment.successes) and deployment.successes[index]
        arrays |= {
            f"{index}/state": np.stack(record.states),
            f"{index}/action": np.stack(record.actions),
            f"{index}/success": np.array(success),
            f"{index}/instruction": np.array(record.instruction),
        }
        for camera in deployment.bundle.cameras:
            arrays[f"{index}/images.{camera.name}"] = np.stack([step[camera.name] for step in record.images])
    np.savez_compressed(path, **arrays)


def load_episodes(path: Path, bundle: Bundle) -> Deployment:
    """Read what ``save_episodes`` wrote. UserError for another file, or one of another policy than the bundle's."""
    try:
        arrays = load_arrays(path)
        found = Deployment(bundle, "", bundle.robot)
        for index in sorted({int(name.partition("/")[0]) for name in arrays}):
            state, action = arrays[f"{index}/state"], arrays[f"{index}/action"]
            images = {c.name: arrays[f"{index}/images.{c.name}"] for c in bundle.cameras}
            wanted = {c.name: (len(state), c.height, c.width, 3) for c in bundle.cameras}
            shapes = {name: value.shape for name, value in images.items()}
            if (state.shape[1:], action.shape) != ((bundle.state_dim,), (len(state), bundle.action_dim)):
                raise UserError(f"source={path} has states and actions of another policy than the bundle")
            if shapes != wanted:
                raise UserError(f"source={path}: images are {shapes}, the bundle's policy sees {wanted}")
            record = EpisodeRecord(str(arrays[f"{index}/instruction"]), states=[*state], actions=[*action])
            record.images = [{name: value[step] for name, value in images.items()} for step in range(len(state))]
            found.records.append(record)
            found.successes.append(bool(arrays[f"{index}/success"]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"source={path} is not the {EPISODES_FILE} of a report: {error}") from error
    return found
