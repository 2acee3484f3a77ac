"""The algorithms by name."""

from __future__ import annotations

from embodied.core.protocols import Algorithm
from embodied.core.registry import Registry

ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")
