"""Algorithms that train policies. Importing this package registers all of them."""

from __future__ import annotations

from embodied.algos import grounding as grounding
from embodied.algos import grpo as grpo
from embodied.algos import ppo as ppo
from embodied.algos import sft as sft
from embodied.algos.registry import ALGORITHMS

__all__ = ["ALGORITHMS"]
