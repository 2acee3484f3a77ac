"""Scenes: labelled observations while a scripted expert and random actions move the robot.

LabeledPool ──► render_scenes: labelled observations [N, ...] ──► SceneDataset: the newest ones ──► draw
"""

from collections.abc import Iterator

import numpy as np
import torch

from embodied.core.types import Obs
from embodied.envs.mujoco.labels import LabeledPool

FRAMES_PER_SCENE = 10  # observations of a scene before the next one starts
RANDOM_SHARE = 0.2  # fraction of random decisions, so that images also show states off the expert's path


def render_scenes(env: LabeledPool, seed: int) -> Iterator[Obs]:
    """Yield labelled observations of all envs, [N, ...]: FRAMES_PER_SCENE of a scene, over half of its time limit.

    seed: of random actions.
    """
    steps = max(1, env.spec.max_episode_steps // (2 * FRAMES_PER_SCENE))
    random = np.random.default_rng(seed)  # torch would use 32 bits of the seed
    while True:
        yield env.next_scene()
        for _ in range(FRAMES_PER_SCENE - 1):
            # ``steps`` actions of the expert, or with some probability one random action throughout
            random_NA = torch.from_numpy(random.uniform(-1.0, 1.0, (env.num_envs, env.spec.action_dim)))
            chance_N1 = torch.from_numpy(random.random((env.num_envs, 1)) < RANDOM_SHARE)
            for _ in range(steps - 1):
                env.act(torch.where(chance_N1, random_NA, env.expert()))
            yield env.act_and_render(torch.where(chance_N1, random_NA, env.expert()))


class SceneDataset:
    """Keep the newest observations of scenes, draw random batches from them, and render new ones.

    scenes: of ``render_scenes``. capacity: number of observations to draw from. reuse: how often each observation is
    drawn, on average.
    """

    def __init__(self, scenes: Iterator[Obs], *, capacity: int, reuse: float) -> None:
        self.scenes, self.capacity, self.reuse = scenes, capacity, reuse
        self.added = self.drawn = 0
        self._rows: Obs = {}
        for _ in range(FRAMES_PER_SCENE):  # the first frames show only robots at rest
            self.add(next(self.scenes))

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, obs: Obs) -> None:
        """Add N observations in place of the oldest."""
        num = len(obs["state"])
        if not self._rows:
            self._rows = {key: value.new_empty((self.capacity, *value.shape[1:])) for key, value in obs.items()}
        place = torch.arange(self.added, self.added + num) % self.capacity
        for key, value in obs.items():
            self._rows[key][place] = value
        self.added += num

    def rows(self, *keys: str) -> Obs:
        """Return all observations, with these keys alone."""
        return {key: self._rows[key][: len(self)] for key in keys}

    def draw(self, num: int, generator: torch.Generator) -> Obs:
        """Draw ``num`` observations with replacement."""
        self.drawn += num
        while self.drawn > self.reuse * self.added:
            self.add(next(self.scenes))
        chosen = torch.randint(len(self), (num,), generator=generator)
        return {key: rows[chosen] for key, rows in self._rows.items()}
