"""Scenes: labelled observations while a scripted expert and random actions move the robot.

LabeledPool ──► Scenes.render_next: labelled observations [N, ...] ──► SceneDataset: the newest ones ──► draw
"""

from collections.abc import Callable

import numpy as np
import torch

from embodied.core.types import Obs
from embodied.envs.mujoco.labels import LabeledPool

FRAMES_PER_SCENE = 10  # observations of a scene before the next one starts
RANDOM_SHARE = 0.2  # fraction of random decisions, so that images also show states off the expert's path


class Scenes:
    """Render scenes, FRAMES_PER_SCENE observations each, ``steps`` control steps apart. seed: of random actions."""

    def __init__(self, env: LabeledPool, steps: int, seed: int) -> None:
        self.env, self.steps = env, steps
        self.random = np.random.default_rng(seed)  # torch would use 32 bits of the seed
        self.rendered = 0

    def render_next(self) -> Obs:
        """Return the next labelled observation of every env, [N, ...]."""
        self.rendered += 1
        if (self.rendered - 1) % FRAMES_PER_SCENE == 0:
            return self.env.next_scene()
        # ``steps`` actions of the expert, or with some probability one random action throughout
        num = self.env.num_envs
        random_NA = torch.from_numpy(self.random.uniform(-1.0, 1.0, (num, self.env.spec.action_dim)))
        chance_N1 = torch.from_numpy(self.random.random((num, 1)) < RANDOM_SHARE)
        for _ in range(self.steps - 1):
            self.env.act(torch.where(chance_N1, random_NA, self.env.expert()))
        return self.env.act_and_render(torch.where(chance_N1, random_NA, self.env.expert()))


class SceneDataset:
    """Keep the newest observations of scenes, draw random batches from them, and render new ones.

    capacity: number of observations to draw from. reuse: how often each observation is drawn, on average. keep:
    transforms N observations before they are stored.
    """

    def __init__(
        self, scenes: Scenes, *, capacity: int, reuse: float, keep: Callable[[Obs], Obs] = lambda obs: obs
    ) -> None:
        self.scenes, self.capacity, self.reuse, self.keep = scenes, capacity, reuse, keep
        self.added = self.drawn = 0
        self._rows: Obs = {}
        for _ in range(FRAMES_PER_SCENE):  # the first frames show only robots at rest
            self.add(self.keep(self.scenes.render_next()))

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
            self.add(self.keep(self.scenes.render_next()))
        chosen = torch.randint(len(self), (num,), generator=generator)
        return {key: rows[chosen] for key, rows in self._rows.items()}
