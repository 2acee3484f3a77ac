"""Algorithms that train policies."""

from embodied.algos.registry import ALGORITHMS

__all__ = ["ALGORITHMS"]
