"""The policies that ship, small, in every way they explore, and fragments of theirs."""

from __future__ import annotations

from typing import Any

import torch

from embodied.core.episodes import EpisodeStats
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment, Obs

SPEC = EnvSpec.of_sizes("none", state=5, privileged=3, action=2)
FLOW: dict[str, Any] = {"actor_hidden": (32, 32), "critic_hidden": (32, 32), "head_hidden": (32, 16)}
DELAYS = {"horizon": 5, "execute": 3, "max_delay": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gaussian": {"actor_hidden": (32, 32), "critic_hidden": (32, 32)},
    "gaussian, scaled values": {"actor_hidden": (32, 32), "critic_hidden": (32, 32), "scale_values": True},
    "flow": FLOW,
    "flow, one step": FLOW | {"stochastic_steps": "one"},
    "flow, last step": FLOW | {"stochastic_steps": "last"},
    "flow, SDE": FLOW | {"exploration": "flow_sde"},
    "flow, checkpointed": FLOW | {"checkpoint_steps": True},
    "dsrl": FLOW | {"noise_hidden": (32,), "prediction": "velocity"},
    "flow, SDE, one step": FLOW | {"exploration": "flow_sde", "stochastic_steps": "one"},
    "flow, SDE, last step": FLOW | {"exploration": "flow_sde", "stochastic_steps": "last"},
    "flow, delays": FLOW | DELAYS,
    "flow, SDE, one step, delays": FLOW | DELAYS | {"exploration": "flow_sde", "stochastic_steps": "one"},
}


def prefixes(num: int, max_delay: int, generator: torch.Generator) -> Obs:
    """Delays in turn and random prefixes, as a policy with ``max_delay`` observes them; nothing without."""
    if not max_delay:
        return {}
    delay_N = torch.arange(num) % (max_delay + 1)
    prefix = 2 * torch.rand(num, max_delay, SPEC.action_dim, generator=generator) - 1
    prefix[torch.arange(max_delay) >= delay_N[:, None]] = 0.0
    return {"prefix": prefix, "delay": delay_N}


def rollout(policy: Policy, *, seed: int, version: int, T: int = 4, N: int = 16, rows: Obs | None = None) -> Fragment:
    """Decisions on random observations (or on ``rows`` [T * N, ...]); the reward prefers actions near 0.3."""
    generator = torch.Generator().manual_seed(seed)
    if rows is None:
        state = torch.randn(T * N, SPEC.state_dim, generator=generator) * 3 + 1
        rows = {"state": state, "privileged": torch.randn(T * N, SPEC.privileged_dim, generator=generator)}
        rows |= prefixes(T * N, getattr(policy, "max_delay", 0), generator)
    sample = policy.act(rows, torch.randn(T * N, *policy.noise_shape, generator=generator))
    executed = sample.action_NHA[:, : policy.execute]
    return Fragment(
        obs={key: value.unflatten(0, (T, N)) for key, value in rows.items()},
        chain=sample.chain.unflatten(0, (T, N)),
        log_prob_TN=sample.log_prob_N.view(T, N),
        value_TN=sample.value_N.view(T, N),
        reward_TNE=-(executed - 0.3).square().sum(-1).view(T, N, -1),
        num_steps_TN=torch.full((T, N), policy.execute),
        terminated_TN=torch.ones(T, N, dtype=torch.bool),
        truncated_TN=torch.zeros(T, N, dtype=torch.bool),
        final_value_TN=torch.zeros(T, N),
        bootstrap_value_N=torch.zeros(N),
        version_TN=torch.full((T, N), version),
        episodes=EpisodeStats.concatenate([]),
        action_TNEA=executed.unflatten(0, (T, N)),
    )
