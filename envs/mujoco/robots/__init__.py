"""Robots, one a file. Importing this fills the registry."""

from envs.mujoco.robots import panda
from envs.mujoco.robots.base import ROBOTS

__all__ = ["ROBOTS", "panda"]
