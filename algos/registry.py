"""Registry of the algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from embodied.algos.config import GroundingConfig, GRPOConfig, PPOConfig, SFTConfig
from embodied.core.registry import Registry

if TYPE_CHECKING:
    import torch

    from embodied.core.policy import Policy


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
ALGORITHMS.declare("ppo", "embodied.algos.ppo:PPO", PPOConfig)
ALGORITHMS.declare("grpo", "embodied.algos.grpo:GRPO", GRPOConfig)
ALGORITHMS.declare("sft", "embodied.algos.supervised:SFT", SFTConfig)
ALGORITHMS.declare("grounding", "embodied.algos.supervised:Grounding", GroundingConfig)
