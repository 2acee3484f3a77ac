"""The Franka Emika Panda with its hand. Sources of every number of the model: assets/franka/README.md."""

from functools import cached_property

import mujoco
import numpy as np

from embodied.envs.mujoco.robots.base import ASSETS
from embodied.envs.mujoco.robots.gripper_arm import GripperArm


class Panda(GripperArm):
    """Seven hinges. At home the gripper points down and the tool centre point is at (0.615, 0, 0.17) m."""

    name = "franka_panda"
    mjcf = ASSETS / "franka" / "panda.xml"
    visual = ASSETS / "franka" / "visual.xml"
    home_qpos = np.array([0, np.pi / 8, 0, -5 * np.pi / 8, 0, 3 * np.pi / 4, np.pi / 4])
    home_spread = np.full(7, 0.05)
    held_spread = np.array([0.4, 0.15, 0.05, 0.15, 0.05, 0.1, 0.05])  # tool: |y| to 0.25 m, z from 0.06 to 0.3 m
    finger_open_m, finger_closed_m = 0.04, -0.01
    max_velocity = np.array([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61])

    @cached_property
    def coarse(self) -> mujoco.MjModel:
        """The few geoms that policies' cameras show, made by hand."""
        return mujoco.MjModel.from_xml_path(str(ASSETS / "franka" / "coarse.xml"))
