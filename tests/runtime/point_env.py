"""A small real VecEnv for tests of the runtime: point masses that should reach the origin."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core.episodes import EpisodePlans, EpisodeSampler, Ints
from embodied.core.spec import SUCCESS, ActionTerm, Box, EnvSpec, Term
from embodied.core.types import Obs
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.episodes.sampler import SamplerSetup, UniformConfig, UniformSampler

LIMIT = 1.5  # leaving this square terminates


def point_spec(max_episode_steps: int = 20) -> EnvSpec:
    return EnvSpec(
        task="point",
        state=(Term("position", 2, "m"), Term("time", 1)),
        action=Box((ActionTerm("vx"), ActionTerm("vy"))),
        control_dt_s=0.1,
        max_episode_steps=max_episode_steps,
    )


class PointEnv(EpisodicEnv):
    """Positions in the plane, action is a velocity. Starts are a function of the plan.

    Success within 0.3 of the origin; terminates outside ``LIMIT``, truncates after ``max_episode_steps``.
    """

    resumes_exactly = True

    def __init__(
        self,
        num_envs: int,
        max_episode_steps: int = 20,
        spec: EnvSpec | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(spec or point_spec(max_episode_steps), num_envs, device)
        self.position_N2 = torch.zeros(num_envs, 2, device=device)
        self.closed = False

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        phase = torch.from_numpy(plans.seed_n * 7 + plans.number_n * 13).double()
        start_n2 = torch.stack([phase.mul(0.7).sin(), phase.mul(1.3).cos()], -1).float()
        self.position_N2[torch.from_numpy(ids)] = start_n2.to(self.device)

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        rows = slice(None) if ids is None else torch.from_numpy(ids)
        self.position_N2[rows] += 0.1 * action_NA[rows]
        distance_N = self.position_N2.norm(dim=-1)
        outside_N = (self.position_N2.abs() > LIMIT).any(-1)
        return Advance(-distance_N, {SUCCESS: distance_N < 0.3}, failed_N=outside_N)

    def observe(self, ids: Ints | None = None) -> Obs:
        time = (1 - self.steps_left_N.float() / self.spec.max_episode_steps)[:, None]
        state = torch.cat([self.position_N2, time], -1)
        return {"state": state if ids is None else state[torch.from_numpy(ids)]}

    def state_dict(self) -> dict[str, Tensor]:
        return {"position": self.position_N2.clone(), **self.episode_state()}

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        self.position_N2.copy_(state["position"])
        self.load_episode_state(state, sampler)

    def close(self) -> None:
        self.closed = True


def point_sampler(spec: EnvSpec, num_envs: int, first_seed: int, incarnation: int = 0) -> UniformSampler:
    """Staggered episodes."""
    setup = SamplerSetup(num_envs, first_seed, stagger=True, incarnation=incarnation)
    return UniformSampler(spec, UniformConfig(), setup)
