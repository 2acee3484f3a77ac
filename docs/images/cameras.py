"""Makes cameras.png: ``python docs/images/cameras.py``. Six moments of the task tabletop, as policies see them.

Rows: colour, depth and segmentation of the front and of the wrist camera, and both with randomisation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.rendering.vision import CAMERAS

MOMENTS, EVERY, SCALE, GAP = 6, 9, 3, 2  # control steps, pixels
VARIED = {
    "position_m": 0.06, "mounted_position_m": 0.006, "lookat_m": 0.05, "fovy_deg": 3.0, "object_color": 0.1,
    "robot_color": 0.2, "table_color": 0.2, "light_direction": 0.4, "brightness": 0.25,
}  # fmt: skip


def pool(**randomization: float) -> MujocoPool:
    made = make_pool(
        "tabletop", {}, num_envs=MOMENTS, cameras=list(CAMERAS.values()), sim={"camera_randomization": randomization}
    )
    made.reset(make_sampler(made, seed=2))
    return made


def moments(env: MujocoPool) -> dict[str, np.ndarray]:
    """What is seen of env i after i * EVERY steps of the expert, [MOMENTS, h, w, ...] by name."""
    assert env.rig is not None
    seen = []
    for i in range(MOMENTS):
        seen.append(env.rig.render(np.array([i]), depth=True, segmentation=True))
        for _ in range(EVERY):
            env.step(env.task.expert())
    return {key: np.concatenate([one[key].numpy() for one in seen]) for key in seen[0]}


def grey(depth: np.ndarray) -> np.ndarray:
    """Near is light: brightness falls with distance as the size of things does."""
    light = 255 * depth.min(axis=(1, 2), keepdims=True) / depth
    return np.repeat(light[..., None], 3, axis=-1).astype(np.uint8)


def colored(segmentation: np.ndarray) -> np.ndarray:
    """A colour of its own for each geom; what is not there is black."""
    palette = np.random.default_rng(3).integers(60, 256, (segmentation.max() + 2, 3)).astype(np.uint8)
    palette[-1] = 0
    return palette[segmentation]


def main() -> None:
    torch.set_num_threads(1)
    plain, varied = moments(pool()), moments(pool(**VARIED))
    rows = []
    for name in CAMERAS:
        rows += [plain[f"images.{name}"], grey(plain[f"depth.{name}"]), colored(plain[f"segmentation.{name}"])]
    rows += [varied["images.front"], varied["images.wrist"]]
    large = [row.repeat(SCALE, 1).repeat(SCALE, 2) for row in rows]
    tiles = [np.pad(row, ((0, 0), (GAP, GAP), (GAP, GAP), (0, 0)), constant_values=255) for row in large]
    picture = np.concatenate([np.concatenate(list(row), axis=1) for row in tiles])
    Image.fromarray(picture).save(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
