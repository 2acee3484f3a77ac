"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from embodied.core.protocols import Algorithm
from embodied.core.registry import Registry

ALGORITHMS: Registry[Callable[..., Algorithm]] = Registry("algorithm")
"""Builders called as ``build(policy, config, seed=, device=)``, config an instance of the entry's dataclass."""
