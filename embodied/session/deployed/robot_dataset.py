"""Episodes of a robot as a LeRobotDataset, which ``algo=sft`` reads."""

import numpy as np
import torch

from embodied.data import Episode
from embodied.deployment.report import Deployment


def episodes_of(deployment: Deployment) -> list[Episode]:
    """Return the episodes with at least one control step.

    States and actions are as an environment has them: scaled, and in [-1, 1]. Rewards are not known and are 0. The
    last step has the success that was reported.
    """
    bundle = deployment.bundle
    state_scale = np.array([term.scale for term in bundle.state for _ in range(term.size)], np.float32)
    scale = np.array([term.scale for term in bundle.action], np.float32)
    offset = np.array([term.offset for term in bundle.action], np.float32)
    episodes = []
    for record in deployment.records:
        if record.steps:
            success = torch.zeros(len(record.steps), dtype=torch.bool)
            success[-1] = bool(record.success)
            state = torch.from_numpy(record.stack("state") * state_scale)
            action = torch.from_numpy((record.stack("action") - offset) / scale)
            frames = {camera.name: [step.images[camera.name] for step in record.steps] for camera in bundle.cameras}
            images = {name: torch.from_numpy(np.stack(of_camera)) for name, of_camera in frames.items()}
            reward = torch.zeros(len(record.steps))
            episodes.append(Episode(state, action, reward, success, record.instruction, images))
    return episodes
