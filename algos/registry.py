"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodied.core.registry import Registry

ALGORITHMS: Registry[Callable[..., Any]] = Registry("algorithm")
"""Builders called as ``build(policy, config, seed=, device=)``, config an instance of the entry's dataclass. They give
an ``embodied.core.protocols.Algorithm``, which learns from its own experience, or the ``SFT`` of imitation."""
