"""Episodes of a robot as a LeRobotDataset, which ``algo=sft`` reads."""

import numpy as np
import torch

from embodied.data import Episode
from embodied.data.lerobot import TIME
from embodied.deployment.report import Deployment


def episodes_of(deployment: Deployment) -> list[Episode]:
    """Return the episodes with at least one control step.

    States and actions are as an environment has them: scaled, and in [-1, 1]. Rewards are not known and are 0. The
    last step has the success that was reported. Frames have the times at which they were measured: while the robot
    waited for a chunk, there is none.
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
            time = torch.tensor([step.time_s - record.steps[0].time_s for step in record.steps], dtype=torch.float32)
            reward, extra = torch.zeros(len(record.steps)), {TIME: time}
            episodes.append(Episode(state, action, reward, success, record.instruction, images, extra))
    return episodes
