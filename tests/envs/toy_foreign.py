"""Environments of gymnasium that a stranger might write: odd types, images and threads. Importing it registers them."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeAwareObservation

from tests.envs.toy_gym import Toy, together

THREE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
RESULTS: dict[str, Any] = {
    "one": np.ones(1, np.float32),
    "column": np.ones((3, 1), np.float32),
    "row": np.ones((1, 3), np.float32),
    "complex": np.ones(3, np.complex64),
    "text": np.array(["1", "2", "3"]),
    "objects": np.array([None, 1.0, 2.0]),
    "none": None,
    "ragged": [[1.0], [1.0, 2.0], 3.0],
    "list": [1.0, 2.0, 3.0],
    "float64": np.ones(3),
    "int": np.ones(3, np.int64),
}
"""Observations of ``THREE``; the last three are as good as float32."""


class Foreign(Toy):
    """Returns what its arguments say from the control step ``since`` on."""

    observation_space: Any = THREE
    fields: Any = None

    def __init__(self, since: int = 0, render_mode: str | None = None, **returned: Any) -> None:
        super().__init__(render_mode)
        self.since, self.returned = since, returned

    def observation(self) -> Any:
        observation = np.array([self.start, self.steps, 0.0], np.float32)
        key = self.returned.get("observation")
        return observation if key is None or self.steps < self.since else RESULTS[key]

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        found = {"reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
        if self.steps >= self.since:
            found |= {key: RETURNED[value] for key, value in self.returned.items() if key in found}
        return observation, *found.values()


RETURNED: dict[str, Any] = {
    "array": np.array([1.0]), "text": "1.5", "complex": np.complex128(1j), "none": None,
    "array of no": np.array([False]),
    "no": "False", "third": 0.3, "success as text": {"is_success": "False"}, "success as array": {"is_success": [True]},
    "np.float32": np.float32(2.0), "np.array": np.array(2.0), "int": 2, "np.bool": np.bool_(True), "one": 1,
}  # fmt: skip


class Shared(Toy):
    """Returns the same array in all environments."""

    array = np.zeros(2)

    def observation(self) -> Any:
        self.array[:] = super().observation()
        return self.array


class ForeignDict(Foreign):
    """The same observation in a dictionary."""

    observation_space = spaces.Dict({"arm": THREE})

    def observation(self) -> Any:
        return {"arm": super().observation()}


class Choices(Toy):
    """Observes choices; those of the last steps do not exist."""

    observation_space = spaces.Dict({"one": spaces.Discrete(3), "two": spaces.MultiDiscrete([2, 2])})

    def __init__(self, one: Any = 0, two: Any = (0, 0), render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.one, self.two = one, np.array(two)

    def observation(self) -> Any:
        return {"one": self.one, "two": self.two}


class Images(Toy):
    """Observes an image of any type and shape, all of whose entries are ``value``, or the frame's number."""

    def __init__(
        self,
        shape: Any = (24, 32, 3),
        dtype: str = "uint8",
        low: float = 0,
        high: float = 255,
        value: float | None = None,
        returned: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode)
        self.observation_space = spaces.Box(low, high, tuple(shape), np.dtype(dtype))
        self.value, self.returned = value, returned or dtype

    def observation(self) -> Any:
        shape = self.observation_space.shape
        if self.value is not None:
            return np.full(shape, self.value, self.returned)
        numbers = np.arange(shape[0]).reshape(-1, *(1 for _ in shape[1:]))
        return np.broadcast_to(numbers, shape).astype(self.returned)


FRAMES: dict[str, Any] = {
    "rgba": np.full((40, 60, 4), 200, np.uint8),
    "grey": np.full((40, 60), 200, np.uint8),
    "bool": np.ones((40, 60, 3), bool),
    "int64": np.full((40, 60, 3), 200),
    "float": np.ones((40, 60, 3), np.float32),
    "beyond": np.full((40, 60, 3), 300),
    "list": [np.zeros((40, 60, 3), np.uint8)],
    "none": None,
    "two channels": np.zeros((40, 60, 2), np.uint8),
}


class Shown(Toy):
    """Shows people what its argument says."""

    def __init__(self, frame: str = "rgba", render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.frame = frame

    def render(self) -> Any:
        return FRAMES[self.frame]


class Unshown(gymnasium.Env[Any, Any]):
    """Names a render mode, but cannot render."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (gymnasium's own way)
    observation_space: Any = THREE
    action_space: Any = Toy.action_space
    render_mode = None

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 0.0, False, False, {}


class Timed(Toy):
    """Says how long a control step is."""

    def __init__(self, dt: str = "float32", render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.dt = {
            "float32": np.float32(0.25),
            "int": 2,
            "int64": np.int64(2),
            "zero": 0,
            "text": "slow",
            "nan": np.nan,
        }[dt]


class Aware(Toy):
    """Is wrapped by ``TimeAwareObservation``, which reads the time limit of the spec."""


class Database(Toy):
    """Belongs to the thread that has built it."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.table = sqlite3.connect(":memory:")

    def observation(self) -> Any:
        self.table.execute("SELECT 1")
        return super().observation()


class Alarm(Toy):
    """Uses signals, which belong to the main thread."""

    def observation(self) -> Any:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        return super().observation()


class Leaving(Toy):
    """Ends its process in its eighth step, as a script does that has finished."""

    def __init__(self, how: str = "sys", render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.how = how

    def observation(self) -> Any:
        if self.steps == 8:
            (sys.exit if self.how == "sys" else os._exit)(0)
        return super().observation()


class Asserting(Toy):
    """Fails by an assertion without a message."""

    def observation(self) -> Any:
        assert self.steps < 8
        return super().observation()


CLASSES = (Foreign, Shared, ForeignDict, Choices, Images, Shown, Unshown, Timed, Database, Alarm, Leaving, Asserting)
for each in CLASSES:
    gymnasium.register(f"{each.__name__}-v0", entry_point=f"{__name__}:{each.__name__}", max_episode_steps=12)
gymnasium.register(
    "Aware-v0",
    f"{__name__}:Aware",
    max_episode_steps=12,
    additional_wrappers=(TimeAwareObservation.wrapper_spec(flatten=True, normalize_time=True),),
)


def choosy(num_envs: int, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> SyncVectorEnv:
    """Return a vector environment that refuses to leave resets to its user, as that of ale_py does."""
    if autoreset_mode == AutoresetMode.DISABLED:
        raise ValueError(f"Invalid autoreset_mode: {autoreset_mode.value}")
    return together(Toy)(num_envs, autoreset_mode=autoreset_mode, **kwargs)


gymnasium.register("Choosy-v0", f"{__name__}:Foreign", vector_entry_point=choosy, max_episode_steps=12)
gymnasium.register("ChoosyAlone-v0", vector_entry_point=choosy, max_episode_steps=12)


class ForeignVector(SyncVectorEnv):
    """Returns what its arguments say in the seventh step."""

    def __init__(self, num_envs: int, max_episode_steps: int, render_mode: str | None = None, **returned: str) -> None:
        super().__init__([Toy for _ in range(num_envs)], autoreset_mode=AutoresetMode.DISABLED)
        self.returned, self.steps = returned, 0

    def reset(self, **options: Any) -> Any:
        self.steps = 0
        return super().reset(**options)

    def step(self, actions: Any) -> Any:
        self.steps += 1
        names = "observation", "reward", "terminated", "truncated", "info"
        found = dict(zip(names, super().step(actions), strict=True))
        if self.steps == 7:
            found |= {part: CHANGES[value](found[part]) for part, value in self.returned.items()}
        return tuple(found.values())


CHANGES: dict[str, Any] = {
    "one": lambda array: array[..., :1],
    "column": lambda array: array[..., None],
    "complex": lambda array: array.astype(np.complex64),
    "text": lambda array: array.astype(str),
    "third": lambda array: np.full(len(array), 0.3),
    "none": lambda _: None,
}
gymnasium.register("ForeignVector-v0", vector_entry_point=ForeignVector, max_episode_steps=12)
