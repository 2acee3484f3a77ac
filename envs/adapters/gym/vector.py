"""Environments of gymnasium that step all together: the vector environment that a registration names.

It must leave resets to us (``AutoresetMode.DISABLED``), so that every episode begins where its plan says. Resets take
the mask of envs and their seeds; results go into arrays, see ``rows``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied.core.errors import UserError, describe_error
from embodied.envs.adapters.gym.results import NUMBERS, WrongResult, advice, array_of, flat_mask, info_of, truths
from embodied.envs.adapters.gym.rows import Arrays, EncodedRows, Ints
from embodied.envs.adapters.gym.source import Source
from embodied.envs.adapters.pixels import Pixels, resized, shown


class VectorRows(EncodedRows):
    """Rows of a vector environment, with the methods of ``LocalRows``. UserError for whatever goes wrong in it."""

    def __init__(self, source: Source, arrays: Arrays, render: bool) -> None:
        self.env = source.build_vector(len(arrays["reward"]), render)
        super().__init__(source, arrays, self.env.single_observation_space, self.env.single_action_space)
        self.over_N = np.zeros(len(self.seed_N), np.bool_)  # the environment itself has ended the episode

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
        others_N = self.over_N.copy()
        others_N[ids] = False
        with self.guarded():
            if others_N.any():  # it cannot step these, and nobody reads them before ``start``
                self._reset(np.flatnonzero(others_N), None)
            actions = self.codec.decode(self.arrays["action"])
            observations, reward_N, terminated_N, truncated_N, infos = self.env.step(actions)
            num = len(self.seed_N)
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
        what = f"{error}" if isinstance(error, WrongResult) else f"raised {describe_error(error)}"
        when = f"(after {self.step_N.max()} control steps)"
        return UserError(f"task {self.source.name}: its vector environment {what} {when}{advice(error, self.thread)}")

    def _reset(self, ids: Ints, seeds: list[int | None] | None) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in each of envs ``ids``; return the observations and infos of all."""
        mask_N = np.zeros(len(self.seed_N), np.bool_)
        mask_N[ids] = True
        self.over_N[ids] = False
        given: Any = seeds  # gymnasium's types know no None in the list
        return self.env.reset(seed=given, options=None if mask_N.all() else {"reset_mask": mask_N})

    def _frames(self) -> Any:
        """Return what every env shows people. WrongResult if there is no image for each."""
        frames = self.env.render()
        if frames is None or len(frames) != self.env.num_envs:
            raise WrongResult(f"gave no image of each of {self.env.num_envs} environments from render()")
        return frames

    def _observe(self, ids: Ints, observations: Any, infos: Mapping[str, Any]) -> None:
        self.write_observations(ids, lambda leaf: leaf.value(observations, len(self.seed_N))[ids])
        if self.rendered is not None:
            frames = self._frames()
            for i in ids.tolist():
                self.rendered[i] = resized(shown(frames[i]), *self.rendered.shape[2:0:-1])
        if self.source.has_mask:
            for i in ids.tolist():
                self.write_mask(i, None if self.over_N[i] else flat_mask(infos["action_mask"][i]))
