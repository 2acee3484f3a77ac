"""PPO on the policies that ship: the invariants hold beyond the tests' own tiny policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algos.ppo import PPO
from algos.ppo_config import PPOConfig
from embodied.core.protocols import Policy
from embodied.core.types import EnvSpec, EpisodeStats, Fragment
from policies import POLICIES

SPEC = EnvSpec("none", state_dim=5, privileged_dim=3, action_dim=2, control_dt_s=0.05, max_episode_steps=50)
FLOW: dict[str, Any] = {"actor_hidden": (32, 32), "critic_hidden": (32, 32), "head_hidden": (32, 16)}
SIZES: dict[str, dict[str, Any]] = {
    "gaussian": {"actor_hidden": (32, 32), "critic_hidden": (32, 32)},
    "flow": FLOW,
    "flow, one step": FLOW | {"stochastic_steps": "one"},
    "flow, SDE": FLOW | {"exploration": "flow_sde"},
    "flow, SDE, one step": FLOW | {"exploration": "flow_sde", "stochastic_steps": "one"},
}


def rollout(policy: Policy, *, seed: int, version: int, T: int = 4, N: int = 16) -> Fragment:
    """Decisions on random observations; the reward prefers actions near 0.3."""
    generator = torch.Generator().manual_seed(seed)
    obs = {
        "state": torch.randn(T, N, SPEC.state_dim, generator=generator) * 3 + 1,
        "privileged": torch.randn(T, N, SPEC.privileged_dim, generator=generator),
    }
    rows = {key: value.flatten(0, 1) for key, value in obs.items()}
    sample = policy.act(rows, policy.sample_noise(T * N, generator))
    executed = sample.action_NHA[:, : policy.execute]
    return Fragment(
        obs=obs,
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
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(SIZES))
def policy(request: pytest.FixtureRequest) -> Policy:
    entry = POLICIES[request.param.split(",")[0]]
    return entry.build(SPEC, entry.config(**SIZES[request.param]))


def test_first_ratio_is_one_in_every_update_and_the_reward_grows(policy: Policy) -> None:
    algorithm = PPO(policy, PPOConfig(learning_rate=2e-3, gamma=1.0), seed=0, device=torch.device("cpu"))
    rewards = []
    for version in range(15):
        fragment = rollout(policy, seed=version, version=version, N=64)
        rewards.append(fragment.reward_TNE.mean().item())
        metrics = algorithm.update([fragment], version)
        assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_stale_data_has_a_first_ratio_of_one_after_the_normaliser_moved(policy: Policy) -> None:
    algorithm = PPO(policy, PPOConfig(learning_rate=1e-3, epochs=1), seed=0, device=torch.device("cpu"))
    old = [rollout(policy, seed=seed, version=0) for seed in range(2)]
    algorithm.update(old[:1], 0)
    metrics = algorithm.update(old[1:], 1)
    assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["async/ess"] < 1.0
    assert metrics["async/staleness_max"] == 1.0
