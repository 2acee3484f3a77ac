"""Policies that know the delay of inference: the prefix is kept, and the likelihood is that of the other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.types import Obs
from embodied.policies import POLICIES
from embodied.policies.flow.chains import FlowChains
from embodied.policies.flow.prefix import draw_prefix, fixed_rows, learned_rows
from embodied.policies.flow.step import time_grid
from tests.algos.fragments import DELAYS, prefixes
from tests.policies import builders, vla_builders
from tests.policies.builders import assert_gradient, generator

NUM, D, A = 48, 2, 2
MODES: dict[str, dict[str, Any]] = {
    "noise": {},
    "noise, one": {"stochastic_steps": "one"},
    "noise, last": {"stochastic_steps": "last"},
    "SDE": {"exploration": "flow_sde"},
    "SDE, one": {"exploration": "flow_sde", "stochastic_steps": "one"},
    "SDE, last": {"exploration": "flow_sde", "stochastic_steps": "last"},
    "checkpointed": {"checkpoint_steps": True},
    "longer": {"horizon": 7},
}
BUILD: dict[str, Callable[..., FlowChains]] = {
    "flow": lambda **options: builders.build("flow", **options),  # type: ignore[dict-item,return-value]
    "vla": vla_builders.build,
}
OBSERVE: dict[str, Callable[[int], Obs]] = {"flow": builders.observe, "vla": vla_builders.observe}
every_policy = pytest.mark.parametrize("kind", list(BUILD))
every_mode = pytest.mark.parametrize("mode", list(MODES))


def build(kind: str, mode: str = "noise", **options: Any) -> FlowChains:
    return BUILD[kind](**(DELAYS | MODES[mode] | options))


def observe(kind: str, num: int = NUM, seed: int = 3) -> Obs:
    return OBSERVE[kind](num) | prefixes(num, D, generator(seed))


def drawn(policy: FlowChains, obs: Obs, seed: int = 0) -> Any:
    return policy.act(obs, torch.randn(len(obs["delay"]), *policy.noise_shape, generator=generator(seed)))


def states(policy: FlowChains, chain: Tensor) -> Tensor:
    """The states of a chain, without the plane that names the stochastic step."""
    return chain[:, :2] if policy.one_stochastic_step else chain


def fixed(obs: Obs, rows: int) -> Tensor:
    return torch.arange(rows) < obs["delay"][:, None]


@every_policy
@every_mode
def test_the_prefix_is_in_every_state_and_in_the_chunk(kind: str, mode: str) -> None:
    policy, obs = build(kind, mode), observe(kind)
    policy.update_normalizer(obs)
    sample = drawn(policy, obs)
    noise = torch.randn(NUM, *policy.plan_noise_shape, generator=generator())
    given = fixed(obs, D)
    for chunk in (sample.action_NHA, policy.plan(obs), policy.plan(obs, noise)):
        assert torch.equal(chunk[:, :D][given], obs["prefix"][given])
        assert not (chunk[:, :D] == obs["prefix"])[~given].any()
    for state in states(policy, sample.chain).unbind(1):
        assert torch.equal(state[:, :D, :A][given], obs["prefix"][given])
        assert not state[:, :D, A:][given].any(), "padding of actions is 0"


@every_policy
@every_mode
def test_evaluate_repeats_the_sampler(kind: str, mode: str) -> None:
    policy, obs = build(kind, mode), observe(kind)
    policy.update_normalizer(obs)
    sample = drawn(policy, obs)
    found = policy.evaluate(obs, sample.chain)
    torch.testing.assert_close(found.log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.value_B, sample.value_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.value(obs), sample.value_N, atol=1e-5, rtol=1e-5)
    steps = 1 if policy.one_stochastic_step else policy.denoise_steps
    assert found.terms_B is not None
    assert found.terms_B.tolist() == [steps * A * (5 - d) for d in obs["delay"].tolist()]


@every_policy
@every_mode
def test_the_density_is_that_of_the_free_rows(kind: str, mode: str) -> None:
    """Against the formulas of docs/flow_rl.md, in numpy, on the velocities and noises of the network."""
    policy, obs = build(kind, mode), observe(kind)
    chain = drawn(policy, obs).chain
    found, count = policy.evaluate(obs, chain), policy.denoise_steps
    expected, entropy = np.zeros(NUM), np.zeros(NUM)
    for k in range(count):
        x, after = (chain[:, 0], chain[:, 1]) if policy.one_stochastic_step else (chain[:, k], chain[:, k + 1])
        mean, std = numpy_step(policy, policy.encode(obs), x, k)
        z = (after.double().numpy() - mean) / std
        counts = np.broadcast_to(~fixed(obs, policy.horizon).numpy()[:, :, None], z.shape).copy()
        counts[:, 5:] = counts[..., A:] = False
        if policy.one_stochastic_step:
            counts[chain[:, 2, 0, 0].numpy() != k] = False
        density = -0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)
        expected += np.where(counts, density, 0).sum((1, 2))
        entropy += np.where(counts, np.log(std) + 0.5 * np.log(2 * np.pi * np.e), 0).sum((1, 2))
    np.testing.assert_allclose(found.log_prob_B.detach().numpy(), expected, atol=2e-4, rtol=2e-5)
    np.testing.assert_allclose(found.entropy_B.detach().numpy(), entropy, atol=2e-4, rtol=2e-5)


def numpy_step(policy: FlowChains, encoding: Any, x: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of denoise step k at x [N, H, W], float64."""
    at, count, t = x.double().numpy(), policy.denoise_steps, float(time_grid(policy.denoise_steps)[k])
    if policy.noise_network is not None:
        v, std = (part.detach().double().numpy() for part in policy.noisy_velocity(encoding, x, k))
        return at - v / count, std
    v = policy.velocity(encoding, x, k).detach().double().numpy()
    sigma = 0.5 * np.sqrt(t / (1 - t if k else 1 / count))
    drift = sigma**2 / count / (2 * t) * (at + (1 - t) * v)
    return at - v / count - drift, np.full_like(at, sigma / np.sqrt(count))


@every_policy
@every_mode
def test_a_fixed_row_is_no_choice(kind: str, mode: str) -> None:
    """It has no density, no KL between different weights, and no effect of the noise."""
    policy, other, obs = build(kind, mode), build(kind, mode, seed=1), observe(kind)
    noise = torch.randn(NUM, *policy.noise_shape, generator=generator())
    sample = policy.act(obs, noise)
    ours, theirs = (p.evaluate(obs, sample.chain) for p in (policy, other))
    given = fixed(obs, 5)
    assert ours.log_prob_BE is not None
    assert ours.log_prob_BE.shape == (NUM, 5)
    assert not ours.log_prob_BE[given].any()
    assert ours.log_prob_BE[~given].all()
    rows = given[:, None, None, :, None].expand_as(ours.distribution)
    assert torch.equal(ours.distribution[rows], theirs.distribution[rows])
    assert (policy.kl_divergence(ours.distribution, theirs.distribution) > 1e-3).all()
    assert not policy.kl_divergence(ours.distribution, ours.distribution).any()
    most = 2 if policy.one_stochastic_step else len(noise[0])
    noise[:, :most] += 5.0 * fixed(obs, policy.horizon)[:, None, :, None]
    again = policy.act(obs, noise)
    assert torch.equal(again.chain, sample.chain)
    assert torch.equal(again.log_prob_N, sample.log_prob_N)


@every_mode
def test_gradient_of_the_likelihood_matches_finite_differences(mode: str) -> None:
    policy = build("flow", mode).double()
    obs = {key: value.double() if value.is_floating_point() else value for key, value in observe("flow", 6).items()}
    chain = drawn(policy, obs).chain
    assert chain.dtype == torch.float64
    assert_gradient(policy, obs, chain, seeds=3)


@every_policy
@every_mode
def test_without_a_delay_it_is_the_plain_policy(kind: str, mode: str) -> None:
    """With the same weights, apart from those that read prefix and delay."""
    policy, obs = build(kind, mode), observe(kind)
    plain = build(kind, mode, max_delay=0, execute=5, seed=1)
    policy.update_normalizer(obs)
    weights = policy.state_dict()
    for key, value in plain.state_dict().items():
        if weights[key].shape != value.shape:
            assert key in ("denoiser.encoder.0.weight", "critic.network.0.weight")
            weights[key] = weights[key][:, : value.shape[1]]
    plain.load_state_dict(weights)
    obs = obs | {"delay": obs["delay"] * 0, "prefix": obs["prefix"] * 0}
    noise = torch.randn(NUM, *policy.noise_shape, generator=generator())
    ours, theirs = policy.act(obs, noise), plain.act(obs, noise)
    torch.testing.assert_close(ours.chain, theirs.chain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.log_prob_N, theirs.log_prob_N, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(policy.plan(obs), plain.plan(obs), atol=1e-5, rtol=1e-5)


@every_policy
def test_the_other_rows_and_the_value_depend_on_the_prefix(kind: str) -> None:
    policy, obs = build(kind), observe(kind)
    other = obs | {"prefix": obs["prefix"] * -1.0}
    some = obs["delay"] > 0
    before, after = policy.plan(obs), policy.plan(other)
    assert ((before - after)[:, D:].abs().amax((1, 2))[some] > 1e-4).all()
    torch.testing.assert_close(before[~some], after[~some])
    assert ((policy.value(obs) - policy.value(other))[some].abs() > 1e-5).all()
    longer = obs | {"delay": obs["delay"].clamp(min=1)}  # told that a row is given, which is 0
    assert ((policy.value(longer) - policy.value(obs))[~some].abs() > 1e-5).all()


@every_policy
def test_a_policy_that_imitates_goes_on_from_the_prefix(kind: str) -> None:
    """Half of the demonstrations go one way and half the other, whatever is seen: only the prefix tells which."""
    options = {"head_hidden": (32,)} if kind == "flow" else {"freeze": vla_builders.FROZEN}
    policy, num = build(kind, **options), 64 if kind == "flow" else 16
    seen = {key: value.expand(num, *value.shape[1:]) for key, value in OBSERVE[kind](1).items()}
    seen["state"] = torch.zeros_like(seen["state"])
    if kind == "vla":
        seen = policy.precompute(seen)  # type: ignore[operator]
    way = torch.where(torch.arange(num) % 2 == 0, 0.5, -0.5)
    chunk, valid = way[:, None, None].expand(num, 5, A), torch.ones(num, 5, dtype=torch.bool)
    optimizer, draws = torch.optim.Adam(policy.parameters(), lr=3e-3), generator()
    for _ in range(400 if kind == "flow" else 100):
        loss = policy.imitation_loss(seen, chunk, valid, draws)  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for delay in (1, 2):
        prefix = chunk[:, :D] * (torch.arange(D) < delay)[:, None]
        plan = policy.plan(seen | {"prefix": prefix, "delay": torch.full((num,), delay)})
        assert (plan[:, delay:].mean((1, 2)) * way.sign() > 0.15).all(), delay


def test_delays_of_imitation_are_uniform_and_leave_a_demonstrated_row_to_learn() -> None:
    valid = torch.arange(5) < torch.tensor([1, 2, 3, 5]).repeat(3000)[:, None]
    chunk = torch.where(valid[..., None], 0.5, 9.0).expand(-1, -1, A)
    obs = draw_prefix({}, chunk, valid, D, generator())
    counts = [obs["delay"][i::4].bincount(minlength=D + 1) / 3000 for i in range(4)]
    expected = [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 3]]
    torch.testing.assert_close(torch.stack(counts), torch.tensor(expected), atol=0.04, rtol=0)
    assert set(obs["prefix"].unique().tolist()) == {0.0, 0.5}
    fixed = fixed_rows(obs, 5)
    assert (learned_rows(valid, fixed).sum(1) == valid.sum(1) - obs["delay"]).all()


@every_policy
def test_what_pads_a_chunk_has_no_part_in_the_loss(kind: str) -> None:
    policy, obs = build(kind), OBSERVE[kind](16)
    valid = torch.arange(5) < 1 + torch.arange(16)[:, None] % 5
    chunk = torch.rand(16, 5, A, generator=generator()) * 2 - 1
    losses = set()
    for pad in (0.0, 1.0, 50.0):
        padded = chunk.masked_fill(~valid[..., None], pad)
        losses.add(policy.imitation_loss(obs, padded, valid, generator(1)).item())  # type: ignore[operator]
    assert len(losses) == 1


@every_policy
def test_options_that_do_not_fit_are_named(kind: str) -> None:
    with pytest.raises(
        UserError, match=r"max_delay: got 3, allowed: at most 2, the smaller of execute=3 and horizon - "
    ):
        build(kind, max_delay=3)
    with pytest.raises(
        UserError, match=r"max_delay: got 2, allowed: at most 1, the smaller of execute=1 and horizon - "
    ):
        build(kind, execute=1)
    with pytest.raises(UserError, match=r"max_delay: got 2, allowed: 0, as dsrl"):
        POLICIES["dsrl"].config(**DELAYS)
