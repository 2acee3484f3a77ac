"""Spaces of gymnasium for the views of other libraries."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from embodied.core.errors import UserError
from embodied.core.spec import Box, CameraSpec, EnvSpec, MultiDiscrete


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


def pixels(camera: CameraSpec) -> gymnasium.spaces.Box:
    """Return the space of a camera's images."""
    return gymnasium.spaces.Box(0, 255, (camera.height, camera.width, 3), np.uint8)
