"""Robots, one a file."""

from embodied.envs.mujoco.robots.config import ROBOTS

__all__ = ["ROBOTS"]
