"""Observations and actions of the gymnasium views: spaces, and arrays in their form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Space
from numpy.typing import ArrayLike, NDArray

from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs

Observation = NDArray[Any] | dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of observations: the state vector alone, or a dictionary of it and the images."""

    flat: bool
    """Whether an observation is the state vector."""
    names: dict[str, str]
    """Keys of the dictionary, by those of the pool: ``images.front`` → ``images_front``. Names of torch modules, which
    stable-baselines3 makes of them, may have no dot."""

    @staticmethod
    def of(spec: EnvSpec, flat: bool | None) -> Form:
        """Return the form of a pool's observations; flat unless there are cameras if ``flat`` is None.

        UserError for a flat form with cameras.
        """
        cameras = [camera.name for camera in spec.cameras]
        if flat and cameras:
            raise UserError(f"flat: got True with the cameras {', '.join(cameras)}, allowed: True without cameras")
        names = {key: key.replace(".", "_") for key in ("state", *(f"images.{name}" for name in cameras))}
        return Form(not cameras if flat is None else flat, names)

    def space(self, spec: EnvSpec) -> Space[Any]:
        """Return the space of one env's observations."""
        limit = np.full(spec.state_dim, mujoco.mjMAXVAL, np.float32)
        boxes: dict[str, Space[Any]] = {"state": Box(-limit, limit)}
        for camera in spec.cameras:
            boxes[f"images.{camera.name}"] = Box(0, 255, (camera.height, camera.width, 3), np.uint8)
        return boxes["state"] if self.flat else Dict({self.names[key]: box for key, box in boxes.items()})

    def __call__(self, obs: Obs) -> Observation:
        """Return the part of the pool's observation that is in the space, [N, ...]."""
        return obs["state"].numpy() if self.flat else {name: obs[key].numpy() for key, name in self.names.items()}


def take_row(observation: Observation, row: int) -> Observation:
    """Return the observation of one env."""
    if isinstance(observation, dict):
        return {key: value[row] for key, value in observation.items()}
    taken: NDArray[Any] = observation[row]
    return taken


def check_shape(action: ArrayLike, space: Space[Any]) -> torch.Tensor:
    """Return the action as a tensor; ValueError unless it has the space's shape. The pool checks its values."""
    array = np.asarray(action, dtype=np.float32)
    if array.shape != space.shape:
        raise ValueError(f"action: got shape {array.shape}, needed {space.shape}")
    return torch.from_numpy(array)
