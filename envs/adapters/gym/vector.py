"""Environments of gymnasium that step all together: the vector environment that a registration names.

    start(ids, seeds) ─► env.reset(seed=[...], options={"reset_mask": ...}) ─┐
    step(ids)         ─► env.step(...)                                       ├─► arrays, see ``rows``
                                                                             ┘
It must leave resets to us (``AutoresetMode.DISABLED``), so that every episode begins where its plan says.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from embodied.core.errors import UserError, describe_error
from embodied.envs.adapters.gym.results import (
    NUMBERS,
    WrongResult,
    advice,
    array_of,
    flat_mask,
    info_of,
    truths,
)
from embodied.envs.adapters.gym.rows import Arrays, EncodedRows, Ints
from embodied.envs.adapters.gym.source import Source
from embodied.envs.adapters.pixels import Pixels, resized, shown


class VectorRows(EncodedRows):
    """Rows of a vector environment; see ``rows.Rows``. UserError for whatever goes wrong in it."""

    def __init__(self, source: Source, arrays: Arrays, render: bool) -> None:
        num_envs = len(arrays["reward"])
        self.env = source.build_vector(num_envs, render)
        self.thread = threading.get_ident()  # that has built it
        super().__init__(source, arrays, self.env.single_observation_space, self.env.single_action_space)
        self.over_N = np.zeros(num_envs, np.bool_)  # the environment itself has ended the episode

    def start(self, ids: Ints, seeds: Ints) -> None:
        self.seed_N[ids], self.step_N[ids] = seeds, 0
        seed_N: list[int | None] = [None] * len(self.seed_N)
        for i, seed in zip(ids.tolist(), seeds.tolist(), strict=True):
            seed_N[i] = seed
        with self.guarded():
            self._observe(ids, *self._reset(ids, seed_N))
        self.check_finite(ids)

    def step(self, ids: Ints) -> None:
        self.step_N[ids] += 1
        over_N = self.over_N.copy()
        over_N[ids] = False
        with self.guarded():
            if over_N.any():  # it cannot step these, and nobody reads them before ``start``
                self._reset(np.flatnonzero(over_N), [None] * len(over_N))
            actions = self.codec.decode(self.arrays["action"])
            observations, reward_N, terminated_N, truncated_N, infos = self.env.step(actions)
            num = len(over_N)
            results = {
                "reward": array_of(reward_N, (num,), NUMBERS, "rewards"),
                "terminated": truths(terminated_N, num, "terminated"),
                "truncated": truths(truncated_N, num, "truncated"),
            }
            self.over_N = results["terminated"] | results["truncated"]
            if self.source.success is not None:
                success = info_of(infos).get(self.source.success, np.zeros(num, np.bool_))
                results["success"] = truths(success, num, f"infos['{self.source.success}']")
            for key, values in results.items():
                self.arrays[key][ids] = values[ids]
            self._observe(ids, observations, info_of(infos))
        self.check_finite(ids)

    def render(self, width: int, height: int) -> Pixels:
        with self.guarded():
            return np.stack([resized(shown(frame), width, height) for frame in self._frames()])

    def close(self) -> None:
        self.env.close()

    def failure(self, error: BaseException) -> UserError:  # nobody knows of which environment
        steps = int(self.step_N.max())
        when = f"(after {steps} control steps)"
        what = f"{error}" if isinstance(error, WrongResult) else f"raised {describe_error(error)}"
        return UserError(f"task {self.source.name}: its vector environment {what} {when}{advice(error, self.thread)}")

    def _reset(self, ids: Ints, seed_N: list[int | None]) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in each of envs ``ids``; return the observations and infos of all."""
        mask_N = np.zeros(len(seed_N), np.bool_)
        mask_N[ids] = True
        self.over_N[ids] = False
        options = None if mask_N.all() else {"reset_mask": mask_N}
        seed: Any = None if seed_N[ids[0]] is None else seed_N
        return self.env.reset(seed=seed, options=options)

    def _frames(self) -> Any:
        """Return what every env shows people. WrongResult if there is no image for each."""
        frames = self.env.render()
        if frames is None or len(frames) != self.env.num_envs:
            raise WrongResult(f"gave no image of each of {self.env.num_envs} environments from render()")
        return frames

    def _observe(self, ids: Ints, observations: Any, infos: Mapping[str, Any]) -> None:
        """Write the observations of envs ``ids``."""
        num = len(self.seed_N)
        for leaf, where in self.parts:
            values = leaf.value(observations, num)
            if isinstance(leaf.space, Box):
                self.arrays["state"][ids, where] = values[ids].reshape(len(ids), -1)
            else:
                for i in ids.tolist():
                    leaf.encode(values[i], self.arrays["state"][i, where])
        for leaf, shots in self.images:
            values = leaf.value(observations, num)
            for frame, images in shots:
                for i in ids.tolist():
                    frame.write(values[i : i + 1], images[i : i + 1])
        if self.rendered is not None:
            frames = self._frames()
            for i in ids.tolist():
                self.rendered[i] = resized(shown(frames[i]), *self.rendered.shape[2:0:-1])
        if self.source.has_mask:
            for i in ids.tolist():
                self.write_mask(i, None if self.over_N[i] else flat_mask(infos["action_mask"][i]))
