"""Registry of the algorithms."""

from typing import Any, Protocol

import torch

from embodied.core.policy import Policy
from embodied.core.registry import Registry


class AlgorithmClass(Protocol):
    """The class of an algorithm."""

    trainer: str
    """Name of its trainer in ``embodied.trainers.TRAINERS``. Algorithms of the trainer ``reinforcement`` are
    instances of ``embodied.core.algorithm.Algorithm``."""
    explores: bool
    """Whether it learns from the policy's own exploration. Only such algorithms train exploration and critic, and only
    from their runs does ``init=`` load them."""

    def __call__(self, policy: Policy, config: Any, *, seed: int, device: torch.device) -> Any:
        """Build the algorithm. config: an instance of the dataclass that it is registered with."""
        ...


ALGORITHMS: Registry[AlgorithmClass] = Registry("algorithm")
