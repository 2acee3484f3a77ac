"""PPO on the policies that ship: the invariants hold beyond the tests' own tiny policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.policy import Policy
from embodied.policies import POLICIES
from tests.algos.fragments import SIZES, SPEC, rollout


@pytest.fixture(params=sorted(SIZES.keys() - {"flow, checkpointed"}))  # which has the gradient of "flow"
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


@pytest.mark.parametrize("unit", [1e-5, 1e5])
def test_it_learns_from_an_observation_in_any_unit(unit: float) -> None:
    """The best action is 0.3 where the first feature is positive and -0.3 elsewhere."""
    torch.manual_seed(0)
    entry = POLICIES["gaussian"]
    policy = entry.build(SPEC, entry.config(**SIZES["gaussian"]))
    algorithm = PPO(policy, PPOConfig(learning_rate=5e-3, gamma=1.0), seed=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for version in range(20):
        state = torch.randn(256, SPEC.state_dim, generator=generator)
        obs = {"state": state * unit, "privileged": torch.zeros(256, SPEC.privileged_dim)}
        fragment = rollout(policy, seed=version, version=version, N=64, rows=obs)
        wanted = (0.3 * state[:, 0].sign()).view(4, 64, 1, 1)
        error_TNEA = fragment.chain.view(4, 64, policy.execute, -1) - wanted
        algorithm.update([replace(fragment, reward_TNE=-error_TNEA.square().sum(-1))], version)
    assert (policy.plan(obs) - wanted.view(256, 1, 1)).abs().mean() < 0.2


@pytest.mark.parametrize("unit", [1e-4, 1e4])
def test_a_critic_that_scales_values_learns_rewards_of_any_size(unit: float) -> None:
    torch.manual_seed(0)
    entry = POLICIES["gaussian"]
    policy = entry.build(SPEC, entry.config(**SIZES["gaussian"], scale_values=True))
    algorithm = PPO(policy, PPOConfig(learning_rate=1e-3, gamma=1.0), seed=0, device=torch.device("cpu"))
    for version in range(30):
        fragment = rollout(policy, seed=version, version=version, N=64)
        fragment = replace(fragment, reward_TNE=unit * fragment.obs["state"][..., :1].expand_as(fragment.reward_TNE))
        metrics = algorithm.update([fragment], version)
    assert metrics["train/explained_variance"] > 0.9
    obs = {key: value[0] for key, value in fragment.obs.items()}
    before = policy.value(obs)
    policy.scale_values(torch.tensor(50.0), 0.5)
    torch.testing.assert_close(policy.value(obs), before, rtol=1e-4, atol=1e-4 * unit)


def test_with_scaled_values_the_size_of_rewards_changes_the_unit_alone() -> None:
    """From the first update on, in episodes that go on: their value targets contain values of the new critic."""
    found = []
    for size in (1.0, 2.0**-20):
        torch.manual_seed(0)
        entry = POLICIES["gaussian"]
        policy = entry.build(SPEC, entry.config(**SIZES["gaussian"], scale_values=True))
        algorithm = PPO(policy, PPOConfig(), seed=0, device=torch.device("cpu"))
        for version in range(3):
            fragment = rollout(policy, seed=version, version=version)
            going_on = torch.zeros_like(fragment.terminated_TN)
            algorithm.update(
                [replace(fragment, terminated_TN=going_on, reward_TNE=size * fragment.reward_TNE)], version
            )
        found.append(dict(policy.named_parameters()) | {"unit": policy.critic.unit / size})
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-4, atol=1e-5, msg=name)


def test_a_batch_that_is_all_too_old_leaves_the_unit_of_values() -> None:
    entry = POLICIES["gaussian"]
    policy = entry.build(SPEC, entry.config(**SIZES["gaussian"], scale_values=True))
    algorithm = PPO(policy, PPOConfig(max_staleness=1), seed=0, device=torch.device("cpu"))
    fragment = rollout(policy, seed=0, version=0)
    algorithm.update([fragment], 0)
    unit = policy.critic.unit.clone()
    algorithm.update([fragment], 5)
    assert torch.equal(policy.critic.unit, unit)


def test_the_deployed_average_normalises_as_the_policy_does() -> None:
    entry = POLICIES["gaussian"]
    policy = entry.build(SPEC, entry.config(**SIZES["gaussian"]))
    algorithm = PPO(policy, PPOConfig(ema_decay=0.5), seed=0, device=torch.device("cpu"))
    fragment = rollout(policy, seed=0, version=0)
    algorithm.update([fragment], 0)
    state = fragment.obs["state"]
    assert torch.equal(algorithm.deployed.state_normalizer(state), policy.state_normalizer(state))
    assert not torch.equal(policy.state_normalizer(state), state)
