"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodied.core.registry import Registry

ALGORITHMS: Registry[Callable[..., Any]] = Registry("algorithm")
"""Classes called as ``build(policy, config, seed=, device=)``, config an instance of the entry's dataclass.

Class attributes tell what a run of the algorithm is:

- ``trainer``: name in ``embodied.training.TRAINERS`` of the trainer that it belongs to. An algorithm of the trainer
  ``reinforcement`` is an ``embodied.core.protocols.Algorithm``.
- ``explores``: whether it learns from the policy's own exploration. Only then are exploration and critic trained, and
  a run that starts from it (init=) takes them over.
"""
