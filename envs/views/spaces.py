"""Observations and actions as the views give them: spaces of gymnasium, and arrays in their form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.spec import Box, EnvSpec, MultiDiscrete
from embodied.core.types import Obs

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


def unbounded(size: int) -> gymnasium.spaces.Box:
    """Return the space of a vector of ``size`` numbers without bounds."""
    return gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)


@dataclass(frozen=True)
class Form:
    """The form in which a library gets observations: the state vector, or a dictionary of it and the images."""

    spec: EnvSpec
    """Description of the environments."""
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
        state = gymnasium.spaces.Box(-self.bound, self.bound, (self.spec.state_dim,), np.float32)
        images = {
            camera.name: gymnasium.spaces.Box(0, 255, (camera.height, camera.width, 3), np.uint8)
            for camera in self.spec.cameras
        }
        instruction = gymnasium.spaces.Discrete(len(self.spec.instructions)) if self._instructed else None
        return _space(self._arranged(state, images, instruction))

    def __call__(self, obs: Obs) -> Observation:
        """Return observations [n, ...] as arrays in the space."""
        images = {camera.name: obs[f"images.{camera.name}"].cpu().numpy() for camera in self.spec.cameras}
        instruction = obs["instruction"].cpu().numpy() if self._instructed else None
        observation: Observation = self._arranged(obs["state"].cpu().numpy(), images, instruction)
        return observation

    @property
    def _instructed(self) -> bool:
        return self.instruction and not self.flat and bool(self.spec.instructions)

    def _arranged(self, state: Any, images: dict[str, Any], instruction: Any) -> Any:
        """Return the parts in this form."""
        if self.flat:
            return state
        beside = {f"images_{name}": image for name, image in images.items()}
        nested = {self.images: images} if images else {}
        words = {} if instruction is None else {"instruction": instruction}
        return {self.state: state, **(beside if self.images is None else nested), **words}


def take_row(observation: Observation, row: int) -> Observation:
    """Return the observation of one env."""
    if isinstance(observation, dict):
        return {key: take_row(value, row) for key, value in observation.items()}
    taken: NDArray[Any] = observation[row]
    return taken


def _space(parts: Any) -> gymnasium.Space[Any]:
    """Return nested dictionaries of spaces as a space."""
    if isinstance(parts, dict):
        return gymnasium.spaces.Dict({key: _space(part) for key, part in parts.items()})
    space: gymnasium.Space[Any] = parts
    return space
