"""Robots, one a file. Importing this fills the registry."""

from embodied.envs.mujoco.robots import panda
from embodied.envs.mujoco.robots.base import ROBOTS

__all__ = ["ROBOTS", "panda"]
