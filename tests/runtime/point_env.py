"""A small real VecEnv for tests of the runtime: point masses that should reach the origin."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core.types import EnvSpec, EpisodeStats, Obs, Timestep

LIMIT = 1.5  # leaving this square terminates


class PointEnv:
    """Positions in the plane, action is a velocity. Starts differ per env and episode and depend on its seed alone.

    Success within 0.3 of the origin; terminates outside ``LIMIT``, truncates after ``max_episode_steps``.
    """

    def __init__(self, num_envs: int, max_episode_steps: int = 20, stagger: bool = False) -> None:
        self.num_envs = num_envs
        self.spec = EnvSpec("point", 3, 0, 2, 0.1, max_episode_steps)
        self.stagger = stagger
        self.seed_N = torch.arange(num_envs)
        self.episode_N = torch.zeros(num_envs, dtype=torch.int64)
        self.position_N2 = torch.zeros(num_envs, 2)
        self.elapsed_N = torch.zeros(num_envs, dtype=torch.int64)
        self.return_N = torch.zeros(num_envs)
        self.success_once_N = torch.zeros(num_envs, dtype=torch.bool)
        self.closed = False

    def reset(self, seed: int | None = None) -> Obs:
        self.seed_N = torch.arange(self.num_envs) + (seed or 0)
        self.episode_N.zero_()
        self._begin(torch.arange(self.num_envs))
        if self.stagger:
            self.elapsed_N = self.seed_N % self.spec.max_episode_steps
        return self._obs()

    def step(self, action: Tensor) -> Timestep:
        if not torch.isfinite(action).all():
            raise ValueError("action has NaN")
        num_actions = action.shape[1]
        reward_NE = torch.zeros(self.num_envs, num_actions)
        num_steps_N = torch.zeros(self.num_envs, dtype=torch.int64)
        alive_N = torch.ones(self.num_envs, dtype=torch.bool)
        terminated_N = torch.zeros(self.num_envs, dtype=torch.bool)
        for e in range(num_actions):
            self.position_N2 += 0.1 * action[:, e].clamp(-1, 1) * alive_N[:, None]
            reward_NE[:, e] = -self.position_N2.norm(dim=-1) * alive_N
            num_steps_N += alive_N
            self.elapsed_N += alive_N
            self.success_once_N |= alive_N & self._success()
            terminated_N |= alive_N & (self.position_N2.abs() > LIMIT).any(-1)
            alive_N &= ~terminated_N & (self.elapsed_N < self.spec.max_episode_steps)
        self.return_N += reward_NE.sum(-1)
        ended = (~alive_N).nonzero().squeeze(-1)
        once, now = self.success_once_N[ended], self._success()[ended]
        stats = EpisodeStats(ended, self.return_N[ended], self.elapsed_N[ended], once, now, torch.zeros_like(ended))
        final_obs = {key: rows[ended] for key, rows in self._obs().items()}
        self._begin(ended)
        truncated_N = ~alive_N & ~terminated_N
        return Timestep(self._obs(), reward_NE, terminated_N, truncated_N, num_steps_N, ended, final_obs, stats)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            setattr(self, name, value.clone())

    def close(self) -> None:
        self.closed = True

    def _success(self) -> Tensor:
        return self.position_N2.norm(dim=-1) < 0.3

    def _begin(self, ids: Tensor) -> None:
        phase = (self.seed_N[ids] * 7 + self.episode_N[ids] * 13).double()
        self.position_N2[ids] = torch.stack([phase.mul(0.7).sin(), phase.mul(1.3).cos()], -1).float()
        self.episode_N[ids] += 1
        self.elapsed_N[ids] = 0
        self.return_N[ids] = 0.0
        self.success_once_N[ids] = False

    def _obs(self) -> Obs:
        time = self.elapsed_N.float()[:, None] / self.spec.max_episode_steps
        return {"state": torch.cat([self.position_N2, time], -1)}
