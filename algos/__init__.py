"""Algorithms that train policies. Importing this package registers all of them."""

from __future__ import annotations

from algos import grounding as grounding
from algos import grpo as grpo
from algos import ppo as ppo
from algos import sft as sft
from algos.registry import ALGORITHMS

__all__ = ["ALGORITHMS"]
