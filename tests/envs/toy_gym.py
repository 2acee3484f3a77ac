"""Environments of gymnasium for tests, as a package of others would have them. Importing it registers them."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit


class Toy(gymnasium.Env[Any, Any]):
    """A counter with a random start. Subclasses change what is observed and how it ends."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (gymnasium's own way)
    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space: Any = spaces.Box(np.array([0.0, -3.0]), np.array([1.0, 5.0]), dtype=np.float64)

    def __init__(self, render_mode: str | None = None, offset: float = 0.0) -> None:
        self.render_mode, self.offset, self.steps, self.last = render_mode, offset, 0, np.zeros(2)
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.start = 0, float(self.np_random.uniform())
        return self.observation(), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.steps += 1
        self.last = np.asarray(action)
        self.start += float(self.np_random.uniform()) * 0.01
        return self.observation(), self.start + float(np.sum(self.last)), *self.ends(), self.info()

    def observation(self) -> Any:
        return np.array([self.start + self.offset, self.steps])

    def ends(self) -> tuple[bool, bool]:
        return False, False

    def info(self) -> dict[str, Any]:
        return {}

    def render(self) -> Any:
        frame = np.zeros((40, 60, 3), np.uint8)
        frame[:, : 10 + self.steps] = 255
        return frame


class Ending(Toy):
    """Truncates itself after 5 steps, or terminates in the same step if its start is large; succeeds from step 3 on."""

    def ends(self) -> tuple[bool, bool]:
        return self.steps == 5 and self.start > 0.5, self.steps == 5

    def info(self) -> dict[str, Any]:
        return {"is_success": self.steps >= 3}


class Nested(Toy):
    """A dictionary with tuples, choices, bits and images."""

    observation_space = spaces.Dict(
        {
            "arm": spaces.Dict({"pos": spaces.Box(-1, 1, (2, 2), np.float32), "mode": spaces.Discrete(3, start=5)}),
            "bits": spaces.MultiBinary(3),
            "front": spaces.Box(0, 255, (24, 32, 3), np.uint8),
            "pair": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (1,), np.float32))),
            "gray": spaces.Box(0, 255, (16, 16), np.uint8),
        }
    )

    def observation(self) -> Any:
        return {
            "arm": {"pos": np.arange(4, dtype=np.float32).reshape(2, 2), "mode": 5 + self.steps % 3},
            "bits": np.array([1, 0, 1], np.int8),
            "front": np.full((24, 32, 3), self.steps, np.uint8),
            "pair": (np.array([1, 2]), np.array([0.5], np.float32)),
            "gray": np.full((16, 16), 7, np.uint8),
        }


class Pixels(Toy):
    """Observes an image alone."""

    observation_space = spaces.Box(0, 255, (16, 16, 3), np.uint8)

    def observation(self) -> Any:
        return np.full((16, 16, 3), self.steps, np.uint8)


class Masked(Toy):
    """Two choices at once, of which masks allow some. The reward is the first choice."""

    action_space = spaces.MultiDiscrete([3, 2])
    observation_space = spaces.Discrete(4)

    def observation(self) -> Any:
        return self.steps % 4

    def step(self, action: Any) -> Any:
        first, second = self.info()["action_mask"]
        assert first[action[0]]
        assert second[action[1]]
        observation, _, *rest = super().step(action)
        return observation, float(action[0]), *rest

    def ends(self) -> tuple[bool, bool]:
        return self.steps == 6, False

    def info(self) -> dict[str, Any]:
        if self.steps == 6:
            return {"action_mask": (np.zeros(3, np.int8), np.zeros(2, np.int8))}  # the game is over
        return {"action_mask": (np.array([1, self.steps % 2, 1], np.int8), np.array([1, 0], np.int8))}


class MaskedChoice(Masked):
    """One choice, of which masks allow some."""

    action_space = spaces.Discrete(3)

    def step(self, action: Any) -> Any:
        assert self.info()["action_mask"][action]
        return Toy.step(self, action)

    def info(self) -> dict[str, Any]:
        return {"action_mask": super().info()["action_mask"][0]}


class PixelChoice(Pixels):
    """Observes an image alone, and acts by choices."""

    action_space = spaces.Discrete(3)


class Sides(Toy):
    """Shows an image whose left or right half is bright. Choosing that side gives the reward 1."""

    observation_space = spaces.Box(0, 255, (36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def observation(self) -> Any:
        self.side = int(self.np_random.integers(2))
        image = np.zeros((36, 36), np.uint8)
        image[:, 18 * self.side : 18 * (self.side + 1)] = 255
        return image

    def step(self, action: Any) -> Any:
        reward = float(action == self.side)
        observation, _, *rest = super().step(action)
        return observation, reward, *rest


class Bits(Toy):
    """Actions of bits."""

    action_space = spaces.MultiBinary(3)


class Raising(Toy):
    """Raises in its fourth step."""

    def observation(self) -> Any:
        if self.steps == 8:
            raise RuntimeError("the simulator\nis broken")
        return super().observation()


class Infinite(Toy):
    """Observes an infinity in its eighth step."""

    def observation(self) -> Any:
        return np.array([np.inf if self.steps == 8 else 0.0, self.steps])


class Dying(Toy):
    """Kills its process in its eighth step."""

    def observation(self) -> Any:
        if self.steps == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().observation()


class Hanging(Toy):
    """Hangs in one of its first steps after those of the probe."""

    total = 0

    def observation(self) -> Any:
        self.total += 1
        if self.total > 30:
            print("hanging", file=sys.stderr, flush=True)
            time.sleep(1e6)
        return super().observation()


class OldStep(Toy):
    """Its step returns what gym's did."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class OldReset(Toy):
    """Its reset returns what gym's did."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class Words(Toy):
    """Observes a text."""

    observation_space = spaces.Text(10)


class Unbounded(Toy):
    """Actions without limits."""

    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Agents(Toy):
    """Actions of two agents."""

    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))


class Channels(Toy):
    """Observes an image of four channels: RGBA, or four frames."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)


class Colours(Toy):
    """Observes six images, or two with colours."""

    observation_space = spaces.Box(0, 255, (6, 84, 84), np.uint8)


CLASSES = (
    Toy, Ending, Nested, Pixels, PixelChoice, Sides, Masked, MaskedChoice, Bits, Raising, Infinite,
    Dying, Hanging, OldStep, OldReset, Words, Unbounded, Agents, Channels, Colours,
)  # fmt: skip
for each in CLASSES:
    gymnasium.register(f"{each.__name__}-v0", entry_point=f"{__name__}:{each.__name__}", max_episode_steps=12)


def together(cls: type[Toy]) -> Any:
    """Return what builds a vector environment of ``cls`` in any mode of autoreset."""

    def build(
        num_envs: int, max_episode_steps: int, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any
    ) -> SyncVectorEnv:
        one = partial(TimeLimit, max_episode_steps=max_episode_steps)
        return SyncVectorEnv([lambda: one(cls(**kwargs)) for _ in range(num_envs)], autoreset_mode=autoreset_mode)

    return build


class Resetting:
    """Builds vector environments that reset their environments themselves."""

    def __init__(self, cls: type[Toy], mode: AutoresetMode) -> None:
        self.cls, self.mode = cls, mode

    def __call__(self, num_envs: int, max_episode_steps: int, **kwargs: Any) -> SyncVectorEnv:
        env = together(self.cls)(num_envs, max_episode_steps, self.mode, **kwargs)
        reset = env.reset

        def reset_with_one_seed(*, seed: int | None = None, options: Any = None) -> Any:
            assert seed is None or isinstance(seed, int)  # as vector environments of gymnasium itself
            return reset(seed=seed, options=options)

        env.reset = reset_with_one_seed  # type: ignore[method-assign]
        return env


def modeless(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    """Return a vector environment that does not say how it resets."""
    env = together(Toy)(num_envs, **kwargs)
    env.metadata = {key: value for key, value in env.metadata.items() if key != "autoreset_mode"}
    return env


for each in (Toy, Ending, Nested, Masked, MaskedChoice, Bits, Raising, Infinite):
    gymnasium.register(f"Vector{each.__name__}-v0", vector_entry_point=together(each), max_episode_steps=12)
gymnasium.register("Both-v0", f"{__name__}:Ending", vector_entry_point=together(Ending), max_episode_steps=12)
gymnasium.register("Unlike-v0", f"{__name__}:Ending", vector_entry_point=together(Nested), max_episode_steps=12)
gymnasium.register("Modeless-v0", vector_entry_point=modeless, max_episode_steps=12)
for each in (Ending, Nested, MaskedChoice):
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        name = f"{each.__name__}{mode.value}-v0"
        gymnasium.register(name, vector_entry_point=Resetting(each, mode), max_episode_steps=12)
