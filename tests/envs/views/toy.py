"""A simulator of a few lines, whose episodes end by action: what a view makes of them can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from embodied.core.episodes import EpisodePlans, Ints
from embodied.core.spec import SUCCESS, EnvSpec
from embodied.core.types import Obs
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.views.stepper import Stepper

LIMIT = 3  # control steps
FAIL, SOLVE, GO = 1.0, -1.0, 0.0  # actions
INSTALL = "pip install -c constraints.txt -e '.[trainers]'"
# Env 0 fails in the second step, env 1 runs to its time limit and is then solved.
ACTIONS = [[[GO], [GO]], [[FAIL], [GO]], [[GO], [SOLVE]]]
FIRST, FAILED = [[7, 0, 0], [8, 0, 0]], [7, 0, 2]
SECOND = [7, 1, 0]


class Toy(EpisodicEnv):
    """State: seed of the episode, its number, control steps. Reward: control steps. Action FAIL ends the episode."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(EnvSpec.of_sizes("toy", state=3, action=1, privileged=1, max_episode_steps=LIMIT), num_envs)
        self.state = torch.zeros(num_envs, 3)
        self.closed = False

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        first = np.stack([plans.seed_n, plans.number_n, np.zeros(len(ids))], -1)
        self.state[torch.from_numpy(ids)] = torch.from_numpy(first).float()

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        rows = torch.arange(self.num_envs) if ids is None else torch.from_numpy(ids)
        self.state[rows, 2] += 1
        return Advance(self.state[:, 2].clone(), {SUCCESS: action_NA[:, 0] == SOLVE}, action_NA[:, 0] == FAIL)

    def observe(self, ids: Ints | None = None) -> Obs:
        state = self.state.clone() if ids is None else self.state[torch.from_numpy(ids)]
        return {"state": state, "privileged": 10 * state[:, 2:]}

    def close(self) -> None:
        self.closed = True


def toy(autoreset: AutoresetMode = AutoresetMode.SAME_STEP) -> Stepper:
    return Stepper(Toy(2), seed=7, autoreset=autoreset)


def rows(values: Any) -> Any:
    return values.tolist()
