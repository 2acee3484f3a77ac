"""Episodes of a robot as a LeRobotDataset, which ``algo=sft`` reads."""

from collections.abc import Sequence

import numpy as np
import torch

from embodied.core.spec import Box
from embodied.data import Episode
from embodied.data.lerobot import TIME
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.report import EpisodeRecord


def episodes_of(records: Sequence[EpisodeRecord], bundle: Bundle) -> list[Episode]:
    """Return the episodes of a bundle's policy that have at least one control step.

    States and actions are as an environment has them: scaled, and in [-1, 1]. Rewards are not known and are 0. The
    last step has the success that was reported. Frames have the times at which they were measured: while the robot
    waited for a chunk, there is none.
    """
    state_scale, space, episodes = bundle.env_spec.state_scale, Box(bundle.action), []
    for record in records:
        if record.steps:
            success = torch.zeros(len(record.steps), dtype=torch.bool)
            success[-1] = bool(record.success)
            state = torch.from_numpy(record.stack("state") * state_scale)
            action = torch.from_numpy((record.stack("action") - space.offset) / space.scale)
            frames = {camera.name: [step.images[camera.name] for step in record.steps] for camera in bundle.cameras}
            images = {name: torch.from_numpy(np.stack(of_camera)) for name, of_camera in frames.items()}
            time = torch.tensor([step.time_s - record.steps[0].time_s for step in record.steps], dtype=torch.float32)
            reward, extra = torch.zeros(len(record.steps)), {TIME: time}
            episodes.append(Episode(state, action, reward, success, record.instruction, images, extra))
    return episodes
