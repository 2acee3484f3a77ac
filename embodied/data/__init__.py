"""Demonstrations, in memory and as LeRobotDataset v3 on disk."""

from embodied.data.demonstrations import Demonstrations, Episode
from embodied.data.lerobot import read
from embodied.data.lerobot_writer import write

__all__ = ["Demonstrations", "Episode", "read", "write"]
