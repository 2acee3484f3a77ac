"""The flow's step, sampler, likelihood and imitation loss against closed forms."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch.distributions import Normal

from embodied.policies.flow import step
from embodied.policies.flow.sampler import Transition, integrate, sample_chain, sample_one_step
from tests.policies.builders import SMALL, build, generator, observe

MU, S = 0.7, 0.3  # data N(MU, S^2)


def gaussian_data_velocity(x, t, mu=MU, s=S):
    """Exact velocity of the flow from N(0, 1) at t = 1 to N(mu, s^2) at t = 0.

    x_t ~ N((1-t) mu, (1-t)^2 s^2 + t^2); v = E[noise - action | x_t], both jointly Gaussian with x_t.
    """
    variance = (1 - t) ** 2 * s**2 + t**2
    centred = x - (1 - t) * mu
    return t / variance * centred - (mu + (1 - t) * s**2 / variance * centred)


def test_time_grid_runs_from_noise_towards_the_action():
    torch.testing.assert_close(step.time_grid(4), torch.tensor([1.0, 0.75, 0.5, 0.25], dtype=torch.float64))
    assert step.time_grid(1).tolist() == [1.0]


@pytest.mark.parametrize("t", [1.0, 0.6, 0.001])
def test_identities_of_path_velocity_action_and_noise(t):
    action, noise = torch.randn(2, 100, dtype=torch.float64, generator=generator())
    x, velocity = step.interpolate(action, noise, t), noise - action
    torch.testing.assert_close(step.initial_noise(x, velocity, t), noise)
    torch.testing.assert_close(step.velocity_to(action, x, t), velocity)
    torch.testing.assert_close(step.euler(x, velocity, t), action)  # one straight step to t = 0


def test_ode_samples_have_the_datas_moments_as_steps_grow():
    start = torch.randn(20_000, 1, 1, dtype=torch.float64, generator=generator())
    errors = []
    for steps in (4, 16, 64, 256):
        grid = step.time_grid(steps)
        end = integrate(lambda x, k, grid=grid: gaussian_data_velocity(x, grid[k]), start, steps)[:, -1]
        # the exact flow map is affine: MU + S * start
        errors.append(float((end - (MU + S * start)).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02
    assert float(end.mean()) == pytest.approx(MU, abs=0.01)
    assert float(end.std()) == pytest.approx(S, abs=0.01)


def test_flow_noise_adds_its_noise_once_the_steps_are_small():
    """With the velocity known, the chain's variance follows the linear recursion of its transitions."""
    steps, sigma = 32, 0.05
    noise = torch.randn(50_000, steps + 1, 1, 1, dtype=torch.float64, generator=generator())
    grid = step.time_grid(steps)

    def denoise(x, k):
        velocity = gaussian_data_velocity(x, grid[k])
        return Transition(velocity, *step.flow_noise(x, velocity, torch.full_like(x, sigma), 1.0 / steps))

    chain, mean, std = sample_chain(denoise, noise)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    m, variance = zero, one
    for t in grid:
        bias = gaussian_data_velocity(zero, t)
        slope = gaussian_data_velocity(one, t) - bias
        m = m - (slope * m + bias) / steps
        variance = (1 - slope / steps) ** 2 * variance + sigma**2
    assert float(chain[:, -1].mean()) == pytest.approx(float(m), abs=0.01)
    assert float(chain[:, -1].std()) == pytest.approx(sqrt(float(variance)), rel=0.02)
    torch.testing.assert_close(chain[:, 1:], mean + std * noise[:, 1:])


@pytest.mark.parametrize("noise_level", [0.3, 1.0])
def test_sde_samples_have_the_datas_moments_as_steps_grow(noise_level):
    """Whatever the noise, the SDE has the marginals of the ODE: exact velocity in, the data's distribution out."""
    errors = []
    for steps in (8, 32, 128):
        noise = torch.randn(20_000, steps + 1, 1, 1, dtype=torch.float64, generator=generator())
        grid, sigma = step.time_grid(steps), step.sde_sigma(steps, noise_level)

        def denoise(x, k, grid=grid, sigma=sigma, steps=steps):
            velocity = gaussian_data_velocity(x, grid[k])
            return Transition(velocity, *step.flow_sde(x, velocity, grid[k], sigma[k], 1.0 / steps))

        end = sample_chain(denoise, noise)[0][:, -1]
        errors.append(abs(float(end.mean()) - MU) + abs(float(end.std()) - S))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


def test_sde_sigma_by_hand():
    expected = [0.5 * sqrt(4.0), 0.5 * sqrt(3.0), 0.5, 0.5 * sqrt(1 / 3)]  # t = 1: the next grid point is 0.75
    torch.testing.assert_close(step.sde_sigma(4, 0.5), torch.tensor(expected, dtype=torch.float64))
    assert step.sde_sigma(1, 0.5).tolist() == [0.5]


def test_one_stochastic_step_leaves_the_others_on_the_ode():
    """Rows that draw step k leave the ODE there, by that step's noise, and follow it before and after."""
    steps, num = 4, 1000
    grid, sigma = step.time_grid(steps), step.sde_sigma(steps, 0.5)
    start, noise = torch.randn(2, num, 1, 1, dtype=torch.float64, generator=generator())
    index = torch.arange(num) % steps

    def denoise(x, k):
        velocity = gaussian_data_velocity(x, grid[k])
        return Transition(velocity, *step.flow_sde(x, velocity, grid[k], sigma[k], 1.0 / steps))

    def follow(x, first, last):
        for k in range(first, last):
            x = step.euler(x, gaussian_data_velocity(x, grid[k]), 1.0 / steps)
        return x

    one = sample_one_step(denoise, start, noise, index, steps)
    for k in range(steps):
        rows = index == k
        before = follow(start[rows], 0, k)
        transition = denoise(before, k)
        after = transition.mean + transition.std * noise[rows]
        torch.testing.assert_close(one.before[rows], before)
        torch.testing.assert_close(one.after[rows], after)
        torch.testing.assert_close(one.action[rows], follow(after, k + 1, steps))


def test_the_stochastic_step_is_drawn_uniformly():
    policy = build("flow, SDE, one step")
    noise = torch.randn(40_000, *policy.noise_shape, generator=generator())
    counts = torch.bincount(policy.pick_step(noise[:, 2, 0, 0]), minlength=4)
    assert ((counts - 10_000).abs() < 400).all()
    assert policy.pick_step(torch.tensor([-40.0, 40.0])).tolist() == [0, 3]


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_the_last_step_alone_adds_its_noise_to_the_action(steps):
    policy, obs = build("flow, SDE, last step", denoise_steps=steps), observe(8)
    noise = torch.randn(8, *policy.noise_shape, generator=generator())
    assert policy.pick_step(torch.tensor([-40.0, 0.0, 40.0])).tolist() == [steps - 1] * 3
    drawn, middle = policy.act(obs, noise), policy.act(obs, noise.index_fill(1, torch.tensor([1]), 0.0))
    torch.testing.assert_close(drawn.action_NHA, drawn.chain[:, 1])
    torch.testing.assert_close(drawn.chain[:, 0], policy.integrate_ode(obs, noise[:, 0])[:, -2])
    std = 0.5 / sqrt(steps * (steps - 1)) if steps > 1 else 0.5
    torch.testing.assert_close(drawn.action_NHA - middle.action_NHA, std * noise[:, 1])


@pytest.mark.parametrize("prediction", ["action", "velocity"])
@pytest.mark.parametrize("variant", [name for name in SMALL if name.startswith("flow")])
def test_likelihood_is_the_sum_of_hand_written_transitions(variant, prediction):
    """In float64, so that only the constants of Flow-SDE are rounded."""
    policy, obs = build(variant, prediction=prediction, execute=2).double(), observe(8)
    obs = {key: value.double() if value.is_floating_point() else value for key, value in obs.items()}
    sample = policy.act(obs, torch.randn(8, *policy.noise_shape, generator=generator()).double())
    evaluation = policy.evaluate(obs, sample.chain)
    steps, (expected, entropy) = 4, torch.zeros(2, 8, dtype=torch.float64)
    one_step, sde = variant.endswith(" step"), "SDE" in variant
    with torch.no_grad():
        code = policy.denoiser.encode(policy.state_normalizer(obs["state"]))
        for k in range(steps):
            t = 1.0 - k / steps
            x, after = (sample.chain[:, 0], sample.chain[:, 1]) if one_step else sample.chain[:, k : k + 2].unbind(1)
            features = policy.denoiser.features(code, x.flatten(1), policy.grid_features[k])
            output = policy.denoiser.predict(code, features).view_as(x)
            velocity = output if prediction == "velocity" else (x - output) / t
            if sde:
                sigma = 0.5 * sqrt(t / (1 - t)) if k else 0.5 * sqrt(steps)
                mean = x - velocity / steps - sigma**2 / (2 * t * steps) * (x + (1 - t) * velocity)
                normal = Normal(mean, sigma * sqrt(1 / steps) * torch.ones_like(x))
            else:
                normal = Normal(x - velocity / steps, policy.noise_network(features).view_as(x))
            drawn = sample.chain[:, 2, 0, 0] == k if one_step else torch.ones(8, dtype=torch.bool)
            expected += torch.where(drawn, normal.log_prob(after)[:, :2].sum((1, 2)), 0.0)
            entropy += torch.where(drawn, normal.entropy()[:, :2].sum((1, 2)), 0.0)
    torch.testing.assert_close(sample.log_prob_N, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.log_prob_B.detach(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.entropy_B.detach(), entropy, atol=1e-5, rtol=1e-5)


def test_predicting_the_action_the_last_step_lands_on_the_prediction():
    policy, obs = build("flow"), observe(8)
    chain = policy.integrate_ode(obs, torch.zeros(8, *policy.plan_noise_shape))
    with torch.no_grad():
        code = policy.denoiser.encode(policy.state_normalizer(obs["state"]))
        features = policy.denoiser.features(code, chain[:, -2].flatten(1), policy.grid_features[-1])
        prediction = policy.denoiser.predict(code, features).view(8, 3, 2)
    torch.testing.assert_close(chain[:, -1], prediction, atol=1e-6, rtol=1e-5)


def test_sigma_starts_as_configured_and_stays_bounded():
    policy = build("flow", spread=0.0, sigma_min=0.1, sigma_max=0.9, sigma_init=0.3)
    torch.testing.assert_close(policy.noise_network(torch.zeros(1, 8)), torch.full((1, 6), 0.3))
    network = build("flow", spread=3.0, sigma_min=0.1, sigma_max=0.9, sigma_init=0.3).noise_network
    for scale in (1.0, 1e3, 1e30):
        sigma = network(scale * torch.randn(1000, 8, generator=generator())).detach()
        assert sigma.min() >= 0.1 * (1 - 1e-6)
        assert sigma.max() <= 0.9 * (1 + 1e-6)
    assert float(sigma.min()) == pytest.approx(0.1, rel=1e-5)
    assert float(sigma.max()) == pytest.approx(0.9, rel=1e-5)


def test_weights_of_the_noise_network_move_sigma_no_faster_than_its_bias():
    """One Adam step on all weights changes log sigma by at most what one on the bias does, for features in [-1, 1]."""
    features = torch.randn(256, 8, generator=generator()).tanh()
    change = {}
    for parameter in ("weight", "bias"):
        network = build("flow", spread=0.0).noise_network
        before = network(features).detach()
        optimizer = torch.optim.Adam([getattr(network, parameter)], lr=1e-3)
        network(features).log().sum().backward()
        optimizer.step()
        change[parameter] = (network(features) / before).log().abs().max().item()
    assert 0.0 < change["weight"] <= change["bias"] * 1.001


def test_extreme_observations_give_finite_numbers():
    policy, obs = build("flow"), observe(64)
    policy.update_normalizer(obs)
    extreme = {key: value * 1e20 for key, value in obs.items()}
    sample = policy.act(extreme, torch.randn(64, *policy.noise_shape, generator=generator()))
    assert sample.log_prob_N.isfinite().all()
    assert sample.chain.isfinite().all()
    torch.testing.assert_close(
        policy.evaluate(extreme, sample.chain).log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5
    )


def test_deterministic_action_needs_no_noise_network():
    policy, obs = build("flow"), observe(8)
    action = policy.plan(obs)
    del policy.noise_network
    assert torch.equal(policy.plan(obs), action)
    assert torch.equal(policy.plan(obs, torch.zeros(8, *policy.plan_noise_shape)), action)


@pytest.mark.parametrize("prediction", ["action", "velocity"])
def test_imitation_learns_a_state_conditional_distribution(prediction):
    """Demonstrations N(0.5 * tanh(first state), 0.2^2): the ODE from many noises must give them back."""
    options = {"horizon": 1, "execute": 1, "head_hidden": (64, 64), "denoise_steps": 8, "activation": "silu"}
    policy = build("flow", spread=0.0, prediction=prediction, **options)
    iterations, draws, losses = 500, generator(), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, iterations)

    def demonstrations(num):
        state = torch.randn(num, 6, generator=draws)
        return state, 0.5 * state[:, None, :1].tanh()

    for _ in range(iterations):
        state, mean = demonstrations(256)
        action = mean + 0.2 * torch.randn(256, 1, 2, generator=draws)
        loss = policy.imitation_loss({"state": state}, action, torch.ones(256, 1, dtype=torch.bool), draws)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert sum(losses[-50:]) < 0.8 * sum(losses[:50])

    state, mean = demonstrations(4000)
    with torch.no_grad():
        code = policy.denoiser.encode(policy.state_normalizer(state))
        start = torch.randn(4000, 1, 2, generator=draws)
        chain = integrate(lambda x, k: policy.velocity(code, x, k), start, policy.denoise_steps)
    residual = (chain[:, -1] - mean)[:, 0]
    assert residual.mean(0).abs().max() < 0.05
    exact = integrate(lambda x, k: gaussian_data_velocity(x, policy.grid[k], 0.0, 0.2), start, policy.denoise_steps)
    torch.testing.assert_close(residual.std(0), exact[:, -1, 0].std(0), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("prediction", ["action", "velocity"])
def test_imitation_loss_targets_noise_minus_action(prediction):
    """A policy whose output is a constant has a loss that can be computed by hand, up to sampling.

    Half of the chunks have one valid row: what stands in the others has no part in the loss.
    """
    policy = build("flow", spread=0.0, prediction=prediction)
    with torch.no_grad():
        policy.denoiser.output.weight.zero_()
        policy.denoiser.direct.weight.zero_()
        policy.denoiser.direct.bias.fill_(0.2)
    num, a = 200_000, 0.7
    valid = torch.arange(3) < torch.where(torch.arange(num) % 2 == 0, 1, 3)[:, None]
    action = torch.where(valid[..., None], a, 50.0).expand(-1, -1, 2)
    loss = policy.imitation_loss({"state": torch.zeros(num, 6)}, action, valid, generator()).item()
    if prediction == "velocity":  # E (0.2 - (noise - a))^2
        expected = 1.0 + (0.2 + a) ** 2
    else:  # (a - 0.2)^2 E[max(t, 0.05)^-2]
        u = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
        t = u ** (2 / 3) * 0.999 + 0.001
        expected = (a - 0.2) ** 2 * float(t.clamp_min(0.05).pow(-2).mean())
    assert loss == pytest.approx(expected, rel=0.02)
