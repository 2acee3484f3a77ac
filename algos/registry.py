"""Registry of the algorithms.

The class of an algorithm is built with ``(policy, options, *, seed, device)``. It has two attributes. ``trainer`` names
its trainer in ``embodied.trainers.TRAINERS``; those of ``reinforcement`` are an ``embodied.core.algorithm.Algorithm``.
``explores`` says whether it learns from the policy's own exploration. Only such algorithms train exploration and
critic, and only from their runs does ``init=`` load them.
"""

from typing import Any

from embodied.algos.config import GroundingConfig, GRPOConfig, PPOConfig, SFTConfig
from embodied.core.registry import Registry

ALGORITHMS: Registry[Any] = Registry("algorithm", group="embodied.algorithms")
ALGORITHMS.declare("ppo", "embodied.algos.ppo:PPO", PPOConfig)
ALGORITHMS.declare("grpo", "embodied.algos.grpo:GRPO", GRPOConfig)
ALGORITHMS.declare("sft", "embodied.algos.supervised:SFT", SFTConfig)
ALGORITHMS.declare("grounding", "embodied.algos.supervised:Grounding", GroundingConfig)
