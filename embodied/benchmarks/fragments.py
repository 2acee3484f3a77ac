"""Batches for measured updates: a policy's own decisions on given observations."""

from __future__ import annotations

import torch

from embodied.core.episodes import EpisodeStats
from embodied.core.policy import Policy
from embodied.core.types import Fragment, Obs


def fragment_of(policy: Policy, rows: Obs, decisions: int, generator: torch.Generator) -> Fragment:
    """Return a fragment of the policy's decisions on ``rows`` [decisions * envs, ...], with random rewards."""
    num = len(next(iter(rows.values())))
    shape = (decisions, num // decisions)
    sample = policy.act(rows, torch.randn(num, *policy.noise_shape, generator=generator))
    return Fragment(
        obs={key: value.unflatten(0, shape) for key, value in rows.items()},
        chain=sample.chain.unflatten(0, shape),
        log_prob_TN=sample.log_prob_N.view(shape),
        value_TN=sample.value_N.view(shape),
        reward_TNE=torch.randn(*shape, policy.execute, generator=generator),
        num_steps_TN=torch.full(shape, policy.execute),
        terminated_TN=torch.zeros(shape, dtype=torch.bool),
        truncated_TN=torch.zeros(shape, dtype=torch.bool),
        final_value_TN=torch.zeros(shape),
        bootstrap_value_N=torch.zeros(shape[1]),
        version_TN=torch.zeros(shape, dtype=torch.int64),
        episodes=EpisodeStats.concatenate([]),
    )
