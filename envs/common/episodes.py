"""Which episode every env of a pool is in, how long it has lasted and what it has brought."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from embodied.core.types import EpisodeStats
from envs.common.seeding import EpisodeRng


class Episodes:
    """Counters of N envs.

    seed_N, number_N: int64 arrays, the env's seed and its episode's number; elapsed_N: control steps towards the time
    limit, which for staggered first episodes begin anywhere; length_N: those really made; return_N, success_once_N.
    """

    def __init__(self, num_envs: int, group_size: int, seed: int, max_steps: int, stagger: bool) -> None:
        self.group_size, self.max_steps, self.stagger = group_size, max_steps, stagger
        self._group_N = np.arange(num_envs, dtype=np.int64) // group_size
        self.seed_N = self._group_N + seed
        self.number_N = np.full(num_envs, -1, dtype=np.int64)
        self.elapsed_N = torch.zeros(num_envs, dtype=torch.int64)
        self.length_N = torch.zeros(num_envs, dtype=torch.int64)
        self.return_N = torch.zeros(num_envs)
        self.success_once_N = torch.zeros(num_envs, dtype=torch.bool)

    def rewind(self, seed: int) -> None:
        """The next episode of every env is the first one of seeds that begin at ``seed``."""
        self.seed_N = self._group_N + seed
        self.number_N[:] = -1

    def begin(self, ids: np.ndarray) -> EpisodeRng:
        """Envs ``ids`` are in their next episode now; returns its random numbers."""
        self.number_N[ids] += 1
        rng = self.rng(ids)
        offset = (rng.uniform("stagger", 0.0, 1.0) * self.max_steps).astype(np.int64)
        rows = torch.from_numpy(ids)
        self.elapsed_N[rows] = torch.from_numpy(np.where(self.stagger & (self.number_N[ids] == 0), offset, 0))
        self.length_N[rows] = 0
        self.return_N[rows] = 0
        self.success_once_N[rows] = False
        return rng

    def rng(self, ids: np.ndarray) -> EpisodeRng:
        """The random numbers of the episodes that envs ``ids`` are in."""
        return EpisodeRng(self.seed_N[ids], self.number_N[ids])

    def again_in_step(self, ended: Tensor) -> tuple[Tensor, Tensor]:
        """The envs among ``ended`` that diverged while their group goes on, and how many steps the others have made.
        They will begin the same episode again, as late, so that the group meets at its end and in the next one."""
        elapsed_N = self.elapsed_N.view(-1, self.group_size).amax(1).repeat_interleave(self.group_size)
        early = ended[elapsed_N[ended] < self.max_steps]
        self.number_N[early.numpy()] -= 1
        return early, elapsed_N[early]

    def count(self, alive_N: Tensor, reward_N: Tensor, success_N: Tensor) -> None:
        """One control step of the envs that are ``alive``; reward and success are 0 elsewhere."""
        self.success_once_N |= success_N
        self.return_N += reward_N
        self.elapsed_N += alive_N
        self.length_N += alive_N

    def stats(self, ended: Tensor, success_N: Tensor, instruction_N: Tensor) -> EpisodeStats:
        """What came of the episodes of envs ``ended`` [M]."""
        return EpisodeStats(
            ended,
            self.return_N[ended],
            self.length_N[ended],
            self.success_once_N[ended],
            success_N[ended],
            instruction_N[ended],
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "seed": torch.from_numpy(self.seed_N.copy()),
            "episode": torch.from_numpy(self.number_N.copy()),
            "elapsed": self.elapsed_N.clone(),
            "length": self.length_N.clone(),
            "return": self.return_N.clone(),
            "success_once": self.success_once_N.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.seed_N[:] = state["seed"].numpy()
        self.number_N[:] = state["episode"].numpy()
        self.elapsed_N.copy_(state["elapsed"])
        self.length_N.copy_(state["length"])
        self.return_N.copy_(state["return"])
        self.success_once_N.copy_(state["success_once"])
