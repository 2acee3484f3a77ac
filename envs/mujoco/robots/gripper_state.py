"""The state of a ``GripperArm`` in the simulations of a batch, as tensors over its live arrays."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.mujoco.arrays import Simulations, live
from embodied.envs.mujoco.robots.gripper_description import GripperDescription

Numbers = TypeVar("Numbers", np.ndarray, Tensor)


class GripperState:
    """State of the arm for tasks, and the movements of experts; see ``embodied.envs.mujoco.robots.base.ArmState``.

    An arm action is relative to the present pose. So the controller's only state is the fingers' target, which is in
    ``ctrl`` and observed. With backlash the joints' last targets are state too, and they are in ``ctrl``.
    """

    def __init__(self, batch: Simulations, robot: GripperDescription) -> None:
        model = batch.model
        self.robot, self.config = robot, robot.config
        self.num_joints = robot.num_joints
        self.move_scale = np.array([term.scale for term in robot.action.terms[:-1]])  # of all entries but the gripper
        self.tcp_site = model.site("tcp").id
        qpos, qvel = live(batch.bind("qpos")), live(batch.bind("qvel"))
        joints, fingers = slice(self.num_joints), slice(self.num_joints, self.num_joints + 2)
        self.joint_pos, self.joint_vel = qpos[:, joints], qvel[:, joints]
        self.finger_qpos, self.finger_qvel = qpos[:, fingers], qvel[:, fingers]
        self.finger_targets = live(batch.bind("ctrl"))[:, fingers]
        self.tcp_pos = live(batch.bind("site_xpos"))[:, self.tcp_site]
        self.tcp_mat = live(batch.bind("site_xmat"))[:, self.tcp_site]
        velocity = model.sensor("tcp_vel").adr[0]
        self.tcp_vel = live(batch.bind("sensordata"))[:, velocity : velocity + 3]

    def true_state(self) -> dict[str, Tensor]:
        """Return the quantities of ``Robot.terms`` by name, each [N, size]."""
        return {
            "joint_pos": self.joint_pos,
            "joint_vel": self.joint_vel,
            "fingers": self.finger_qpos,
            "finger_target": self.finger_targets[:, :1],
            "tcp_pos": self.tcp_pos,
            "tcp_vel": self.tcp_vel,
        }

    def finger_goal(self, gripper: Numbers) -> Numbers:
        """Return the finger position (m) that gripper actions ask for: 1 open, -1 closed."""
        closed_m, open_m = self.robot.finger_closed_m, self.robot.finger_open_m
        return closed_m + (open_m - closed_m) * (gripper + 1) / 2

    def opening(self) -> Tensor:
        closed_m, open_m = self.robot.finger_closed_m, self.robot.finger_open_m
        return (self.finger_targets[:, 0] - closed_m) / (open_m - closed_m)

    def move_tool(self, displacement_N3: Tensor, gripper_N: Tensor, limit_N1: Tensor) -> Tensor:
        """Return the action of a displacement, see ``ArmState``; UserError unless the mode is ``ee_delta``."""
        if self.config.mode != "ee_delta":
            raise UserError(f"control.mode: the scripted experts need ee_delta, got '{self.config.mode}'")
        step = displacement_N3 / self.config.delta_m
        step = step.clamp(-limit_N1, limit_N1)
        yaw = [torch.zeros_like(step[:, :1])] if self.config.rotation else []
        return torch.cat([step, *yaw, gripper_N.to(step.dtype).unsqueeze(-1)], dim=-1).float()
