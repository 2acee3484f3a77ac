"""Algorithms that train policies. Importing this package registers all of them."""

from embodied.algos import grpo as grpo
from embodied.algos import ppo as ppo
from embodied.algos import supervised as supervised
from embodied.algos.registry import ALGORITHMS

__all__ = ["ALGORITHMS"]
