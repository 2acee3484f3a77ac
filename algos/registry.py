"""The algorithms by name."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from embodied.core.protocols import Policy
from embodied.core.registry import Registry


class AlgorithmClass(Protocol):
    """The class of an algorithm, with what a run of it is."""

    trainer: str
    """Name in ``embodied.training.TRAINERS`` of the trainer that it belongs to. An algorithm of the trainer
    ``reinforcement`` is an ``embodied.core.protocols.Algorithm``."""
    explores: bool
    """Whether it learns from the policy's own exploration. Only then are exploration and critic trained, and does a run
    that starts from it (init=) take them over."""

    def __call__(self, policy: Policy, config: Any, *, seed: int, device: torch.device) -> Any:
        """Build the algorithm. config: an instance of the dataclass that it is registered with."""
        ...


ALGORITHMS: Registry[AlgorithmClass] = Registry("algorithm")
