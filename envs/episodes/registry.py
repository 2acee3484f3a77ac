"""Registry of the samplers of episodes, and what one is built with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embodied.core.options import config_dataclass
from embodied.core.registry import Registry
from embodied.core.spec import EnvSpec

if TYPE_CHECKING:
    from embodied.core.episodes import EpisodeSampler


@dataclass(frozen=True, slots=True)
class SamplerSetup:
    """Envs that a sampler serves, and how their episodes vary."""

    num_envs: int
    """Number N of envs of the VecEnv."""
    seed: int = 0
    """Env i has env seed ``seed + i // group_size``."""
    splits: tuple[str, ...] | None = None
    """Splits of the instructions, which episodes take in turn; None: all splits."""
    stagger: bool = False
    """Cut each env's first episode short by a random time, so that resets spread over time."""
    stages: bool = False
    """Start a fraction of the episodes, ``StartStage.share``, from a later stage of the task."""
    group_size: int = 1
    """Number of consecutive envs that have the same episodes at the same time, as GRPO needs."""
    incarnation: int = 0
    """How often the worker was replaced; every incarnation draws different episodes."""
    repeat_failures: float = 0.0
    """Share of the ordinary starts that repeat one of the last ``num_envs / 2`` that failed. It is multiplied by the
    success of the last ``num_envs`` episodes, and is less while there are fewer failures."""


@config_dataclass
class UniformConfig:
    """Options of the uniform sampler: none."""


SAMPLERS: Registry[Callable[[EnvSpec, Any, SamplerSetup], EpisodeSampler]] = Registry(
    "sampler", group="embodied.samplers"
)
SAMPLERS.declare("uniform", "embodied.envs.episodes.sampler:UniformSampler", UniformConfig)
