"""What EnvPool's ``spec`` says of environments: their spaces, arrays and options."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Dict

from embodied.core.spec import EnvSpec
from embodied.envs.views.spaces import Form, action_space, box_or_discrete


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Description of an array of EnvPool."""

    dtype: type
    """Type of an entry."""
    shape: list[int]
    """Shape for one env; -1 is the number of envs."""
    minimum: Any
    """Least value."""
    maximum: Any
    """Greatest value."""
    is_discrete: bool = False
    """Whether it is a choice."""


class Spec:
    """``spec`` of environments with EnvPool's API."""

    reward_threshold = None

    def __init__(self, spec: EnvSpec, config: dict[str, Any]) -> None:
        self.config: Any = namedtuple("Config", [*config])(**config)
        self.observation_space = self.gymnasium_observation_space = form_of(spec).space
        self.action_space = self.gymnasium_action_space = action_space(spec)

    @property
    def state_array_spec(self) -> dict[str, ArraySpec]:
        """Arrays that ``recv`` returns."""
        space = self.observation_space
        boxes = {"obs": space} if not isinstance(space, Dict) else {
            f"obs:{path}": box for path, box in _flat(space).items()
        }  # fmt: skip
        ints = ArraySpec(np.int32, [], -(2**31), 2**31 - 1)
        flags = ArraySpec(np.bool_, [], False, True)
        reward = ArraySpec(np.float32, [-1], -np.inf, np.inf)
        arrays = {"info:env_id": ints, "elapsed_step": ints, "done": flags, "trunc": flags, "reward": reward}
        return {**arrays, **{name: _array(box) for name, box in boxes.items()}}

    @property
    def action_array_spec(self) -> dict[str, ArraySpec]:
        """Arrays that ``send`` takes."""
        array = _array(self.action_space)
        ids = ArraySpec(np.int32, [], -(2**31), 2**31 - 1)
        action = ArraySpec(array.dtype, [-1, *array.shape], array.minimum, array.maximum, array.is_discrete)
        return {"env_id": ids, "players.env_id": ids, "action": action}


def form_of(spec: EnvSpec) -> Form:
    """Return the form of observations: the state, or with cameras {"state", "images": {camera: image}}."""
    return Form(spec, flat=not spec.cameras, images="images")


def _flat(space: Dict) -> dict[str, gymnasium.Space[Any]]:
    """Return the spaces in a nested Dict by their dotted paths."""
    flat: dict[str, gymnasium.Space[Any]] = {}
    for name, part in space.spaces.items():
        flat |= {f"{name}.{path}": box for path, box in _flat(part).items()} if isinstance(part, Dict) else {name: part}
    return flat


def _array(space: gymnasium.Space[Any]) -> ArraySpec:
    """Return the description of a Box or Discrete. UserError for several choices."""
    space = box_or_discrete(space)
    if isinstance(space, gymnasium.spaces.Discrete):
        return ArraySpec(np.int64, [], 0, int(space.n) - 1, True)
    return ArraySpec(space.dtype.type, list(space.shape), space.low.min(), space.high.max())
