"""What passes between the views and their libraries: spaces of gymnasium, arrays in their form, outcomes, seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.episodes import EpisodeStats
from embodied.core.errors import UserError
from embodied.core.spec import Box, EnvSpec, MultiDiscrete
from embodied.core.types import Obs, Timestep

Observation = NDArray[Any] | dict[str, Any]


def action_space(spec: EnvSpec) -> gymnasium.Space[Any]:
    """Return the space of one action, from -1 to 1 in each dimension or one choice or several."""
    if isinstance(spec.action, Box):
        return gymnasium.spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
    if isinstance(spec.action, MultiDiscrete):
        return gymnasium.spaces.MultiDiscrete(np.array(spec.action.counts))
    return gymnasium.spaces.Discrete(spec.action.n)


def box_or_discrete(space: gymnasium.Space[Any]) -> gymnasium.spaces.Box | gymnasium.spaces.Discrete:
    """Return a space. UserError for several choices, which the library of the view does not have."""
    if not isinstance(space, (gymnasium.spaces.Box, gymnasium.spaces.Discrete)):
        raise UserError(f"this view serves a Box or Discrete, got {space}")
    return space


@dataclass(frozen=True)
class Form:
    """The form in which a library gets observations: the state vector, or a dictionary of it and the images."""

    spec: EnvSpec
    flat: bool
    """Whether an observation is the state vector alone."""
    state: str = "state"
    """Key of the state vector in the dictionary."""
    images: str | None = None
    """Key of a dictionary of images by camera; None: each image is beside the state, as ``images_<camera>``. Names of
    torch modules, which stable-baselines3 makes of keys, may have no dot."""
    instruction: bool = False
    """Whether the dictionary has the number of the instruction, if the task has instructions."""
    bound: float = np.inf
    """Greatest absolute value of the state."""

    @property
    def space(self) -> gymnasium.Space[Any]:
        """The space of one observation."""
        spaces: dict[str, gymnasium.Space[Any]] = {
            "state": gymnasium.spaces.Box(-self.bound, self.bound, (self.spec.state_dim,), np.float32)
        }
        for camera in self.spec.cameras:
            spaces[f"images.{camera.name}"] = gymnasium.spaces.Box(0, 255, (camera.height, camera.width, 3), np.uint8)
        if self.spec.instructions:
            spaces["instruction"] = gymnasium.spaces.Discrete(len(self.spec.instructions))
        space: gymnasium.Space[Any] = self._arrange(spaces.__getitem__, gymnasium.spaces.Dict)
        return space

    def __call__(self, obs: Obs) -> Observation:
        """Return observations [n, ...] as arrays in the space."""
        observation: Observation = self._arrange(lambda key: obs[key].cpu().numpy(), dict)
        return observation

    def _arrange(self, part: Callable[[str], Any], group: Callable[[dict[str, Any]], Any]) -> Any:
        """Return the parts of an observation, by their keys in ``Obs``, in this form; group: makes a dictionary."""
        if self.flat:
            return part("state")
        parts = {self.state: part("state")}
        images = {camera.name: part(f"images.{camera.name}") for camera in self.spec.cameras}
        if self.images is None:
            parts |= {f"images_{name}": image for name, image in images.items()}
        else:
            parts[self.images] = group(images)
        if self.instruction and self.spec.instructions:
            parts["instruction"] = part("instruction")
        return group(parts)


def take_row(observation: Observation, row: int) -> Observation:
    """Return the observation of one env."""
    if isinstance(observation, dict):
        return {key: take_row(value, row) for key, value in observation.items()}
    taken: NDArray[Any] = observation[row]
    return taken


def success_of(step: Timestep) -> Tensor:
    """Return the outcome ``success``, bool [N]; False for an environment without it."""
    return step.info.get("success", torch.zeros_like(step.terminated_N))


def episode_means(episodes: EpisodeStats) -> dict[str, float]:
    """Return the means over episodes that ended: ``return``, ``length`` and each outcome at the end."""
    return {
        "return": float(episodes.return_M.mean()),
        "length": float(episodes.length_M.float().mean()),
        **{name: float(held_M.float().mean()) for name, held_M in episodes.at_end.items()},
    }


def seeds_of(seed: Any, num_envs: int) -> list[int | None]:
    """Return the env seed of each env: ``seed + i`` for a number, else those of the list. UserError for others."""
    if isinstance(seed, int | np.integer):
        seed = range(int(seed), int(seed) + num_envs)
    seeds = list(seed) if np.iterable(seed) else [seed] * num_envs
    if len(seeds) != num_envs:
        raise UserError(f"seed: got {len(seeds)} seeds, needed one for each of {num_envs} envs")
    for one in seeds:
        if one is not None and (not isinstance(one, int | np.integer) or not 0 <= one < 2**63):
            raise UserError(f"seed: got {one!r}, allowed: an integer, at least 0 and below 2**63, or None")
    return [None if one is None else int(one) for one in seeds]


def first_seed(seed: Any, num_envs: int) -> int:
    """Return the env seed of env 0, which the others follow. UserError unless all are env seeds."""
    last = 2**63 - num_envs
    if not isinstance(seed, int | np.integer) or not 0 <= seed <= last:
        raise UserError(f"seed: got {seed!r}, allowed: an integer, at least 0 and at most {last}")
    return int(seed)
