"""What tests of policies' cameras share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.rendering.cameras import Camera
from embodied.envs.rendering.vision import CAMERAS, CameraRig
from tests.envs.helpers import actions, pool

FRONT, WRIST = (replace(CAMERAS[name], width=40, height=40) for name in ("front", "wrist"))
EVERYTHING = {"depth": True, "segmentation": True}


def rig_of(env: MujocoPool, *cameras: Camera, **options: Any) -> CameraRig:
    rig = CameraRig(env.batch, env.task.scene(), env.task.robot.coarse, cameras or (FRONT, WRIST), **options)
    env.batch.forward()  # outputs that are bound now are filled by the next call
    return rig


def cast_every_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each geom be tested against the rays of all tiles."""

    def everywhere(_: Any, center_3ng: Any, *rest: Any) -> Any:
        grid = rest[-1]
        return tuple(np.ones((len(tiles), *center_3ng.shape[1:]), bool) for tiles in (grid.x_c, grid.y_r))

    monkeypatch.setattr("embodied.envs.rendering.layers.touched", everywhere)


def moved(task: str = "pick_place", num_envs: int = 3, anywhere: bool = False, **options: Any) -> MujocoPool:
    """A pool after some steps, or with arms wherever their joints allow."""
    env = pool(task, num_envs, **options)
    for action in actions(list(range(num_envs)), 6, env.spec.action_dim).unbind(1):
        env.step(action)
    if anywhere:
        low, high = env.model.actuator_ctrlrange[:7].T
        env.batch.bind("qpos")[:, :7] = np.random.default_rng(0).uniform(low, high, (num_envs, 7))
        env.batch.forward()
    return env


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key
