"""A robot arm with a parallel gripper and position actuators.

``GripperArm`` is a robot (``embodied.envs.mujoco.robots.base``); a subclass gives the MJCF and a few numbers, as
``Panda`` does.
"""

from __future__ import annotations

from mujoco.batch import Batch

from embodied.envs.mujoco.arrays import Simulations
from embodied.envs.mujoco.robots.attached_arm import AttachedArm
from embodied.envs.mujoco.robots.device_arm import DeviceArm
from embodied.envs.mujoco.robots.gripper_description import ControlConfig, GripperDescription

__all__ = ["ControlConfig", "GripperArm"]


class GripperArm(GripperDescription):
    """A described arm that simulations can attach."""

    def attach(self, batch: Batch) -> AttachedArm:
        return AttachedArm(batch, self)

    def attach_tensors(self, batch: Simulations) -> DeviceArm:
        return DeviceArm(batch, self)
