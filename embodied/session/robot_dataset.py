"""Episodes of a robot as a LeRobotDataset, which ``algo=sft`` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from embodied.data import Episode, write
from embodied.deployment.report.record import Deployment


def write_episodes(path: Path, deployment: Deployment) -> int:
    """Write the episodes with at least one control step; return their number. UserError if ``path`` exists.

    States and actions are as an environment has them: scaled, and in [-1, 1]. Rewards are not known and are 0. The
    last step has the success that was reported.
    """
    episodes = episodes_of(deployment)
    if episodes:
        write(path, episodes, deployment.bundle.env_spec)
    return len(episodes)


def episodes_of(deployment: Deployment) -> list[Episode]:
    """Return the episodes with at least one control step; see ``write_episodes``."""
    bundle = deployment.bundle
    state_scale = np.array([term.scale for term in bundle.state for _ in range(term.size)], np.float32)
    scale, offset = (
        np.array([getattr(term, name) for term in bundle.action], np.float32) for name in ("scale", "offset")
    )
    cameras = [camera.name for camera in bundle.cameras]
    episodes = []
    for record in deployment.records:
        if not record.steps:
            continue
        length = len(record.steps)
        success = torch.zeros(length, dtype=torch.bool)
        success[-1] = bool(record.success)
        episodes.append(
            Episode(
                torch.from_numpy(record.stack("state") * state_scale),
                torch.from_numpy((record.stack("action") - offset) / scale),
                torch.zeros(length),
                success,
                record.instruction,
                {name: torch.from_numpy(np.stack([step.images[name] for step in record.steps])) for name in cameras},
            )
        )
    return episodes
