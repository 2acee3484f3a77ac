"""Steering: the base stays as it is, the noise decides, and only PPO on the noise is needed."""

from __future__ import annotations

import torch

from algos.ppo import PPO
from algos.ppo_config import PPOConfig
from policies import DSRLPolicy
from tests.policies.builders import build, generator, observe


def test_the_action_is_where_the_bases_ode_leads_from_the_noise() -> None:
    policy, obs = build("dsrl"), observe(16)
    assert isinstance(policy, DSRLPolicy)
    sample = policy.act(obs, policy.sample_noise(16, generator()))
    torch.testing.assert_close(sample.action_NHA, policy.base.follow(obs, sample.chain[:, 0])[:, -1])
    other = policy.act(obs, policy.sample_noise(16, generator(1)))
    assert not torch.allclose(other.action_NHA, sample.action_NHA)
    torch.testing.assert_close(policy.act(obs, None).chain[:, 0], policy.mean(policy.normalized_state(obs)))


def test_learning_leaves_the_base_alone() -> None:
    policy, obs = build("dsrl"), observe(64)
    assert isinstance(policy, DSRLPolicy)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    PPO(policy, PPOConfig(), seed=0, device=torch.device("cpu"))
    evaluation = policy.evaluate(obs, policy.act(obs, policy.sample_noise(64, generator())).chain)
    (evaluation.log_prob_B.sum() + evaluation.value_B.sum()).backward()
    policy.update_normalizer(obs)
    after = policy.state_dict()
    assert all(parameter.grad is None for parameter in policy.base.parameters())
    assert all(torch.equal(after[key], before[key]) for key in after if key.startswith("base."))
    assert not torch.equal(after["state_normalizer.mean"], before["state_normalizer.mean"])
