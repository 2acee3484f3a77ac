"""Buffers of a fragment, filled decision by decision."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.episodes import EpisodeStats
from embodied.core.types import Fragment, Obs, PolicySample, Timestep
from embodied.runtime.ledger import Ticket


class Recorder:
    """Buffers [T, N, ...] of one fragment. Every fragment has new ones, because the learner keeps them."""

    def __init__(self, decisions: int, num_envs: int) -> None:
        self.decisions = decisions
        self.obs: Obs = {}
        self.final_obs: list[Obs] = []
        self.final_index: list[Tensor] = []
        self.chain = self.reward_TNE = self.action_TNEA = torch.empty(0)  # allocated at the first decision
        self.log_prob_TN = torch.empty(decisions, num_envs)
        self.value_TN = torch.empty(decisions, num_envs)
        self.num_steps_TN = torch.empty(decisions, num_envs, dtype=torch.int64)
        self.terminated_TN = torch.empty(decisions, num_envs, dtype=torch.bool)
        self.truncated_TN = torch.empty(decisions, num_envs, dtype=torch.bool)
        self.final_value_TN = torch.zeros(decisions, num_envs)
        self.version_TN = torch.empty(decisions, num_envs, dtype=torch.int64)
        self.episodes: list[EpisodeStats] = []

    def observe(self, t: int, obs: Obs) -> None:
        """Copy the observations [N, ...] of decision t."""
        if t == 0:
            self.obs = {key: _rows(self.decisions, value) for key, value in obs.items()}
        for key, buffer in self.obs.items():
            buffer[t] = obs[key]

    def record(self, t: int, sample: PolicySample, action_NEA: Tensor, step: Timestep) -> None:
        """Keep decision t, its executed actions and their outcome."""
        if t == 0:
            self.chain = _rows(self.decisions, sample.chain)
            self.reward_TNE = _rows(self.decisions, step.reward_NE)
            self.action_TNEA = _rows(self.decisions, action_NEA)
        self.chain[t] = sample.chain
        self.action_TNEA[t] = action_NEA
        self.log_prob_TN[t] = sample.log_prob_N
        self.value_TN[t] = sample.value_N
        self.version_TN[t] = sample.version_N
        self.reward_TNE[t] = step.reward_NE
        self.num_steps_TN[t] = step.num_steps_N
        self.terminated_TN[t] = step.terminated_N
        self.truncated_TN[t] = step.truncated_N
        if len(step.episodes):
            self.episodes.append(step.episodes.counted())

    def end(self, t: int, ids: Tensor, final_obs: Obs) -> None:
        """Keep the last observations [M, ...] of the episodes that ended at decision t in envs ``ids`` [M]."""
        self.final_obs.append({key: value.clone() for key, value in final_obs.items()})
        self.final_index.append(torch.stack([torch.full_like(ids, t), ids], dim=-1))

    def fragment(self, last_obs: Obs, bootstrap_value_N: Tensor, ticket: Ticket) -> Fragment:
        """Return the fragment of all decisions. last_obs: observations [N, ...] after the last decision."""
        ends = self.final_obs
        return Fragment(
            obs=self.obs,
            chain=self.chain,
            log_prob_TN=self.log_prob_TN,
            value_TN=self.value_TN,
            reward_TNE=self.reward_TNE,
            num_steps_TN=self.num_steps_TN,
            terminated_TN=self.terminated_TN,
            truncated_TN=self.truncated_TN,
            final_value_TN=self.final_value_TN,
            bootstrap_value_N=bootstrap_value_N,
            version_TN=self.version_TN,
            episodes=EpisodeStats.concatenate(self.episodes),
            action_TNEA=self.action_TNEA,
            last_obs={key: value.clone() for key, value in last_obs.items()},
            final_obs={key: torch.cat([obs[key] for obs in ends]) for key in ends[0]} if ends else {},
            final_index_M2=torch.cat([torch.empty(0, 2, dtype=torch.int64), *self.final_index]),
            worker=ticket.worker,
            group=ticket.group,
            incarnation=ticket.incarnation,
            sequence=ticket.sequence,
        )


def _rows(decisions: int, like: Tensor) -> Tensor:
    return torch.empty((decisions, *like.shape), dtype=like.dtype)
