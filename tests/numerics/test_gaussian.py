"""GaussianPolicy against torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from embodied.policies.likelihood import gaussian_entropy, gaussian_kl, gaussian_log_prob
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
        normal = Normal(mean, policy.std)
    expected = normal.log_prob(sample.action_NHA)[:, :2].sum((1, 2))
    torch.testing.assert_close(evaluation.log_prob_B.detach(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.entropy_B.detach(), normal.entropy()[:, :2].sum((1, 2)))
    torch.testing.assert_close(policy.plan(obs), mean)


def test_closed_form_kl_is_that_of_torch():
    p, q = (torch.randn(2, 5, 2, 3, 4, 6, dtype=torch.float64, generator=generator(seed)) for seed in (0, 1))
    p, q = (torch.stack((moments[0, :, 0], moments[0, :, 1].exp()), 1) for moments in (p, q))
    expected = kl_divergence(Normal(p[:, 0], p[:, 1]), Normal(q[:, 0], q[:, 1])).sum((1, 2, 3))
    torch.testing.assert_close(gaussian_kl(p, q), expected)
    assert gaussian_kl(p, p).abs().max() == 0


@pytest.mark.parametrize("name", ["gaussian", "dsrl"])
def test_the_standard_deviation_starts_as_configured_and_can_return_from_its_bounds(name):
    """A clamp has no gradient beyond its bounds: a standard deviation that once left them would never come back."""
    options = {"gaussian": "min_std max_std init_std", "dsrl": "noise_std_min noise_std_max noise_std"}[name].split()
    policy = build(name, spread=0.0, **dict(zip(options, (0.1, 0.8, 0.3), strict=True)))
    assert torch.allclose(policy.std, torch.tensor(0.3))
    optimizer = torch.optim.Adam([policy.bounded_std.z], lr=0.05)
    for target in (0.0, 1.0, 0.4):  # below the lower bound, above the upper one, between them
        for _ in range(800):
            optimizer.zero_grad()
            (policy.std - target).square().sum().backward()
            assert policy.bounded_std.z.grad.abs().min() > 0
            optimizer.step()
        assert torch.allclose(policy.std, torch.tensor(min(max(target, 0.1), 0.8)), atol=0.01), target


def test_standard_deviation_is_bounded():
    policy, obs = build("gaussian", min_std=0.1, max_std=0.8), observe(4096)
    for z, bound in ((-20.0, 0.1), (20.0, 0.8)):
        with torch.no_grad():
            policy.bounded_std.z.fill_(z)
        noise = torch.randn(4096, *policy.noise_shape, generator=generator())
        deviation = policy.act(obs, noise).action_NHA - policy.plan(obs)
        assert math.isclose(float(deviation.std()), bound, rel_tol=0.02)
        assert torch.allclose(policy.std, torch.tensor(bound))
