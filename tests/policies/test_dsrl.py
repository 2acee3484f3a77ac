"""Steering: the base stays as it is, the noise decides, and only PPO on the noise is needed."""

from __future__ import annotations

import torch

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.policies import POLICIES
from embodied.policies.config import DSRLConfig
from embodied.policies.dsrl import DSRLPolicy
from tests.algos import fragments
from tests.policies.builders import build, generator, observe


def test_the_action_is_where_the_bases_ode_leads_from_the_noise() -> None:
    policy, obs = build("dsrl"), observe(16)
    assert isinstance(policy, DSRLPolicy)
    sample = policy.act(obs, torch.randn(16, *policy.noise_shape, generator=generator()))
    torch.testing.assert_close(sample.action_NHA, policy.base.integrate_ode(obs, sample.chain[:, 0])[:, -1])
    other = policy.act(obs, torch.randn(16, *policy.noise_shape, generator=generator(1)))
    assert not torch.allclose(other.action_NHA, sample.action_NHA)
    mean = policy.mean(policy.normalized_state(obs)).detach()
    torch.testing.assert_close(policy.plan(obs), policy.base.integrate_ode(obs, mean)[:, -1])


def test_learning_leaves_the_base_alone() -> None:
    policy = POLICIES["dsrl"].build(fragments.SPEC, DSRLConfig(**fragments.SIZES["dsrl"]))
    assert isinstance(policy, DSRLPolicy)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    algorithm = PPO(policy, PPOConfig(ema_decay=0.5), seed=0, device=torch.device("cpu"))
    for version in range(2):
        algorithm.update([fragments.rollout(policy, seed=version, version=version)], version)
    assert isinstance(algorithm.deployed, DSRLPolicy)
    for weights in (policy.state_dict(), algorithm.deployed.state_dict()):
        changed = {key for key in before if not torch.equal(weights[key], before[key])}
        assert not any(key.startswith("base.") for key in changed)
        assert {"bounded_std.z", "actor.0.weight", "state_normalizer.mean"} <= changed
