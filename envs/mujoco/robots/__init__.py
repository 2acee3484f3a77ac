"""Robots, one a file."""

from embodied.envs.mujoco.config import ROBOTS

__all__ = ["ROBOTS"]
