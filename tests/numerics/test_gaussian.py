"""GaussianPolicy against torch.distributions."""

from __future__ import annotations

import math

import torch
from torch.distributions import Normal

from policies.likelihood import gaussian_entropy, gaussian_log_prob
from tests.policies.builders import build, generator, observe


def test_elementwise_formulas():
    x, mean, std = torch.randn(3, 50, dtype=torch.float64, generator=generator())
    std = std.exp()
    torch.testing.assert_close(gaussian_log_prob(x, mean, std), Normal(mean, std).log_prob(x))
    torch.testing.assert_close(gaussian_entropy(std), Normal(mean, std).entropy())


def test_likelihood_and_entropy_are_sums_of_normals():
    policy, obs = build("gaussian", horizon=4, execute=2), observe(16)
    sample = policy.act(obs, torch.randn(16, *policy.noise_shape, generator=generator()))
    evaluation = policy.evaluate(obs, sample.chain)
    with torch.no_grad():
        mean = policy.actor(policy.state_normalizer(obs["state"])).view(16, 4, 2)
        normal = Normal(mean, policy.log_std.exp())
    expected = normal.log_prob(sample.action_NHA)[:, :2].sum((1, 2))
    torch.testing.assert_close(evaluation.log_prob_B.detach(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.entropy_B.detach(), normal.entropy()[:, :2].sum((1, 2)))
    torch.testing.assert_close(policy.plan(obs), mean)


def test_standard_deviation_is_bounded():
    policy, obs = build("gaussian", min_std=0.1, max_std=0.8), observe(4096)
    for log_std, bound in ((-20.0, 0.1), (20.0, 0.8)):
        with torch.no_grad():
            policy.log_std.fill_(log_std)
        noise = torch.randn(4096, *policy.noise_shape, generator=generator())
        deviation = policy.act(obs, noise).action_NHA - policy.plan(obs)
        assert math.isclose(float(deviation.std()), bound, rel_tol=0.02)
        assert torch.allclose(policy.std, torch.tensor(bound))
