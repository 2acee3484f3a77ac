"""The control law of an arm gives the same targets in numpy and in torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.core.arm import ArmLaw, Chain, ToolPose
from embodied.core.spec import ArmSpec
from embodied.envs.mujoco.config import ROBOTS
from embodied.envs.mujoco.robots.gripper_arm import damped_least_squares

ARMS = 5


def panda(**changes: object) -> ArmSpec:
    arm: ArmSpec = ROBOTS["panda"].build(ROBOTS["panda"].config()).kinematics
    return replace(arm, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"rotation": True}, {"control": "joint_delta"}])
def test_numpy_and_torch_compute_the_same_targets(changes: dict[str, object]) -> None:
    arm, random = panda(**changes), np.random.default_rng(0)
    home = np.array([joint.home for joint in arm.joints])
    qpos = home[:, None] + random.uniform(-0.4, 0.4, (len(home), ARMS))
    move = random.uniform(-0.1, 0.1, (7 if arm.control == "joint_delta" else 4, ARMS))
    position, rotation, jacobian = Chain(arm).tools(qpos)
    pose = ToolPose(position, rotation.reshape(9, ARMS), jacobian)
    in_torch = ArmLaw(arm, torch, lambda numbers: torch.tensor(numbers, dtype=torch.float64), damped_least_squares)
    tensors = ToolPose(*map(torch.from_numpy, pose))
    expected = ArmLaw(arm).joint_targets(move, qpos, lambda: pose)
    found = in_torch.joint_targets(torch.from_numpy(move), torch.from_numpy(qpos), lambda: tensors)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    assert np.abs(expected - qpos).max() > 1e-3


def test_fingers_follow_at_a_limited_rate() -> None:
    step = ArmLaw(panda()).finger_step(np.array([0.04, 0.0, 0.021]), np.array([0.0, 0.04, 0.02]))
    np.testing.assert_allclose(step, [0.01, -0.01, 0.001])
