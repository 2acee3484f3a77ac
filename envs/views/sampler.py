"""The sampler of a view's episodes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.episodes import EpisodePlans, EpisodeStats
from embodied.core.spec import EnvSpec
from embodied.envs.episodes.sampler import SamplerSetup, UniformConfig, UniformSampler


class PresentSampler(UniformSampler):
    """A uniform sampler that keeps the time limits and instructions of the present episodes."""

    def __init__(self, spec: EnvSpec, setup: SamplerSetup) -> None:
        super().__init__(spec, UniformConfig(), setup)
        self.skipped_N: NDArray[np.int64] | None = None  # control steps by which ``start`` cuts the episodes short
        self.time_limit_N = np.full(setup.num_envs, spec.max_episode_steps, dtype=np.int64)
        self.instruction_N = np.zeros(setup.num_envs, dtype=np.int64)

    def start(self) -> EpisodePlans:
        """Return the plans of a new episode in every env."""
        plans = super().start()
        if self.skipped_N is not None:
            plans.time_limit_n[:] = self.spec.max_episode_steps - self.skipped_N
        return self._keep(np.arange(self.num_envs), plans)

    def next(self, ended: EpisodeStats, steps_left_N: Tensor) -> EpisodePlans:
        """Return the next plans of envs in ``ended``."""
        plans = super().next(ended, steps_left_N)
        return self._keep(ended.env_id_M.cpu().numpy(), plans)

    def skip_to_next(self, ids: NDArray[np.int64]) -> EpisodePlans:
        """Return the next plans of envs ``ids``, whether or not their present episodes have ended."""
        return self._keep(ids, super().skip_to_next(ids))

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that ``load_state_dict`` needs."""
        present = {"time_limit": self.time_limit_N, "instruction": self.instruction_N}
        return {**super().state_dict(), **{key: torch.from_numpy(value.copy()) for key, value in present.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        self.time_limit_N[:], self.instruction_N[:] = state["time_limit"].numpy(), state["instruction"].numpy()

    def _keep(self, ids: NDArray[np.int64], plans: EpisodePlans) -> EpisodePlans:
        self.time_limit_N[ids], self.instruction_N[ids] = plans.time_limit_n, plans.instruction_n
        return plans
