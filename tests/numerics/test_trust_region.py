"""The KL that steers the trust region: closed form, and the same meaning in every mode and under every correction."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from embodied.algos import losses
from embodied.algos.config import CORRECTIONS, PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies.flow.chains import ChainConfig, FlowChains
from tests.algos.fragments import rollout
from tests.numerics.test_every_combination import build
from tests.numerics.tiny_policy import TinyPolicy, make_fragment

CPU = torch.device("cpu")
FROZEN: dict[str, Any] = {"learning_rate": 0.0, "schedule": "fixed"}


def moved(policy: nn.Module, scale: float = 0.02) -> Any:
    newer = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return newer


# -- what the number means ---------------------------------------------------------------------------------------------
class LinearFlow(FlowChains):
    """A flow of one number whose velocity is that of data N(center, SPREAD^2), linear in x; only ``center`` learns."""

    SPREAD = 0.3

    def __init__(self, config: ChainConfig) -> None:
        super().__init__(EnvSpec.of_sizes("line", state=1, action=1), config, (1, 1), 1, 1)
        self.center = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def encode(self, obs: Obs) -> Tensor:
        return obs["state"]

    def expand_steps(self, encoding: Tensor) -> Tensor:
        return encoding

    def encoded_value(self, encoding: Tensor, obs: Obs) -> Tensor:
        return encoding[:, 0]

    def velocity(self, encoding: Tensor, x: Tensor, k: int | slice | Tensor) -> Tensor:
        t = self.grid[k][..., None, None]
        centred = x - (1 - t) * self.center
        clean = self.center + (1 - t) * self.SPREAD**2 / ((1 - t) ** 2 * self.SPREAD**2 + t**2) * centred
        return (x - clean) / t

    def noisy_velocity(self, encoding: Tensor, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.velocity(encoding, x, k), torch.full_like(x, 0.15)


def action_density(flow: LinearFlow, grid: Tensor) -> Tensor:
    """Density of the action at ``grid``: every step is linear, so each choice of noisy steps gives a Gaussian."""
    steps, delta = flow.denoise_steps, 1.0 / flow.denoise_steps
    probe = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None, None]
    everything = list(range(steps))
    modes = {1: [everything], 0: [[k] for k in everything[flow.first_stochastic_step :]]}
    density = torch.zeros_like(grid)
    choices = modes[0 if flow.one_stochastic_step else 1]
    for noisy in choices:
        mean, variance = 0.0, 1.0
        for k in everything:
            step = flow.transition(torch.zeros(2, 1), probe, k)
            after = step.mean if k in noisy else probe - delta * step.velocity
            offset, gain = float(after[0]), float(after[1] - after[0])
            mean = gain * mean + offset
            variance = gain**2 * variance + (float(step.std[0]) ** 2 if k in noisy else 0.0)
        density += Normal(mean, math.sqrt(variance)).log_prob(grid).exp() / len(choices)
    return density


@pytest.mark.parametrize("exploration", ["flow_noise", "flow_sde"])
@pytest.mark.parametrize(
    ("mode", "steps", "lowest", "highest"),
    [
        ("all", 1, 0.9, 1.01), ("all", 4, 0.45, 1.0), ("all", 10, 0.45, 1.0), ("one", 4, 0.5, 1.4),
        ("one", 10, 0.5, 1.4), ("last", 4, 0.7, 1.5),
    ],
)  # fmt: skip
@torch.no_grad()
def test_the_kl_agrees_with_that_of_the_executed_action_in_every_mode(
    exploration: Any, mode: Any, steps: int, lowest: float, highest: float
) -> None:
    """On a linear policy, whose actions have a known density. Unscaled, ``one`` would be too low by the factor K."""
    assert lowest < executed_over_measured_kl(exploration, mode, steps) < highest


@pytest.mark.parametrize("exploration", ["flow_noise", "flow_sde"])
@pytest.mark.parametrize(("mode", "lowest", "highest"), [("all", 0.5, 1.0), ("last", 0.7, 1.2), ("one", 20.0, 500.0)])
@torch.no_grad()
def test_on_a_flow_as_sharp_as_after_imitation_the_kl_says_little_with_one_step(
    exploration: Any, mode: Any, lowest: float, highest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow removes the noise of early steps, so the action is almost exact if the noisy step is an early one."""
    monkeypatch.setattr(LinearFlow, "SPREAD", 0.05)
    assert lowest < executed_over_measured_kl(exploration, mode, 4) < highest


def executed_over_measured_kl(exploration: Any, mode: Any, steps: int) -> float:
    """KL of the executed action over the one that steers the trust region, for a small shift of ``center``."""
    options: dict[str, Any] = {"denoise_steps": steps, "exploration": exploration, "stochastic_steps": mode}
    before = LinearFlow(ChainConfig(horizon=1, execute=1, **options)).double()
    after = copy.deepcopy(before)
    after.center += 0.01
    grid = torch.linspace(-3.0, 4.0, 40_001, dtype=torch.float64)
    p, q = action_density(before, grid), action_density(after, grid)
    executed = float((p * (p.log() - q.log())).sum() * (grid[1] - grid[0]))

    obs = {"state": torch.zeros(100_000, 1, dtype=torch.float64)}
    noise = torch.randn(100_000, *before.noise_shape, generator=torch.Generator().manual_seed(0))
    chain = before.act(obs, noise.double()).chain
    old, new = before.evaluate(obs, chain), after.evaluate(obs, chain)
    return executed / float((before.kl_divergence(old.distribution, new.distribution) / new.scored_share).mean())


@pytest.mark.parametrize("name", ["gaussian", "flow", "flow, one step", "flow, last step", "flow, SDE", "dsrl"])
def test_the_closed_form_is_the_mean_of_the_sampled_estimate(name: str) -> None:
    """Of the transitions that are scored, over their draws, on the same observations."""
    policy: Any = build(name)
    newer = moved(policy)
    state, privileged = torch.randn(8, 5), torch.randn(8, 3)
    rows = {"state": state.repeat(4000, 1), "privileged": privileged.repeat(4000, 1)}
    fragment = rollout(policy, seed=0, version=0, T=4000, N=8, rows=rows)
    chain = fragment.chain.flatten(0, 1)
    with torch.no_grad():
        old, new = policy.evaluate(rows, chain), newer.evaluate(rows, chain)
        closed = policy.kl_divergence(old.distribution, new.distribution)
        sampled = old.log_prob_B - new.log_prob_B
    assert float(closed.mean()) > 1e-3
    error = float(sampled.std()) / math.sqrt(len(sampled))
    assert float(closed.mean()) == pytest.approx(float(sampled.mean()), abs=4 * error)
    assert closed.std() < sampled.std() / 2, "the closed form varies less"


# -- under every correction --------------------------------------------------------------------------------------------
CASES: list[dict[str, Any]] = [{"correction": name} for name in CORRECTIONS] + [{"proximal": "interpolate"}]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_staleness_is_no_part_of_the_kl(options: dict[str, Any]) -> None:
    """No learning rate could remove it. All that counts is how far this update moves the policy."""
    behaviour = TinyPolicy()
    fragment = make_fragment(behaviour, seed=1, version=3)
    stays = PPO(moved(behaviour), PPOConfig(**FROZEN, **options), seed=0, device=CPU)
    assert stays.update([fragment], version=5)["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)

    now = moved(behaviour)
    algorithm = PPO(now, PPOConfig(**options), seed=0, device=CPU)
    batch = algorithm.prepare(fragment, torch.full((5, 6), 2), torch.ones(5, 6, dtype=torch.bool))
    start = copy.deepcopy(now)
    with torch.no_grad():
        for parameter in now.parameters():
            parameter += 0.05
        rows, chain = {"state": fragment.obs["state"].flatten(0, 1)}, fragment.chain.flatten(0, 1)
        old, new = start.evaluate(rows, chain), now.evaluate(rows, chain)
        expected = now.kl_divergence(old.distribution, new.distribution).mean()
    measured = algorithm.loss(batch).statistics[2]
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["flow", "flow, one step"])
def test_fresh_decisions_are_measured_in_a_sample(name: str) -> None:
    """The KL of the sample is close to that of all; decisions that do not count are not measured."""
    policy: Any = build(name)
    fragment = rollout(policy, seed=0, version=0, T=8, N=512)
    fragment.num_steps_TN[:, :100] = 0
    algorithm = PPO(policy, PPOConfig(), seed=0, device=CPU)
    batch = algorithm.prepare(fragment, torch.zeros_like(fragment.version_TN), fragment.num_steps_TN > 0)
    measured_B, valid_B = batch.column("kl_weight"), batch.column("weight")
    assert 0.15 < float(measured_B.mean()) < 0.25
    assert not (measured_B.bool() & ~valid_B.bool()).any()
    start = policy.evaluate(batch.obs, batch.chain).distribution
    newer = moved(policy)
    policy.load_state_dict(newer.state_dict())
    now = policy.evaluate(batch.obs, batch.chain)
    everywhere = policy.kl_divergence(start, now.distribution).detach()[valid_B > 0].mean() / now.scored_share
    assert float(algorithm.trust_region_kl(batch, now).detach()) == pytest.approx(float(everywhere), rel=0.1)


@pytest.mark.parametrize("name", ["gaussian", "flow", "dsrl"])
def test_the_kl_of_a_sample_can_be_a_penalty(name: str) -> None:
    """Its gradient is that of the measured decisions alone."""
    policy: Any = build(name)
    fragment = rollout(policy, seed=0, version=0, T=2, N=512)
    algorithm = PPO(policy, PPOConfig(), seed=0, device=CPU)
    batch = algorithm.prepare(fragment, torch.zeros_like(fragment.version_TN), fragment.num_steps_TN > 0)
    measured = batch.select(batch.column("kl_weight").nonzero()[:, 0])
    assert 0 < len(measured) < len(batch)
    policy.load_state_dict(moved(policy).state_dict())
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    found, expected = (
        torch.autograd.grad(
            algorithm.trust_region_kl(part, policy.evaluate(part.obs, part.chain)),
            weights, allow_unused=True, materialize_grads=True,
        )
        for part in (batch, measured)
    )  # fmt: skip
    torch.testing.assert_close(found, expected)


# -- the clip range ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "bound"), [("flow", 0.2), ("flow, last step", 0.2), ("flow, one step", 0.1)])
def test_the_clip_range_follows_the_share_of_the_transitions_that_is_scored(name: str, bound: float) -> None:
    """One of K = 4 steps has half the standard deviation of the log ratio of all four, so half the range."""
    policy: Any = build(name)
    fragment = rollout(policy, seed=0, version=0, T=4, N=64)
    algorithm = PPO(policy, PPOConfig(clip_range=0.2), seed=0, device=CPU)
    batch = algorithm.prepare(fragment, torch.zeros_like(fragment.version_TN), torch.ones(4, 64, dtype=torch.bool))
    policy.load_state_dict(moved(policy, 0.01).state_dict())
    ratio_B = losses.log_ratio(policy.evaluate(batch.obs, batch.chain).log_prob_B, batch.column("proximal")).exp()
    outside = ((ratio_B - 1).abs() > bound).float().mean()
    assert 0.02 < float(outside) < 0.98
    assert float(algorithm.loss(batch).statistics[3]) == pytest.approx(float(outside))


# -- the KL to the first policy ----------------------------------------------------------------------------------------
def test_the_pull_to_the_first_policy_grows_with_the_distance() -> None:
    """The sampled estimate (r - 1) - log r loses its pull at 11 nats, and pushes away at 20."""
    start = TinyPolicy()
    pulls = []
    for nats in (1.0, 5.0, 11.0, 20.0, 80.0):
        policy = copy.deepcopy(start)
        algorithm = PPO(policy, PPOConfig(reference_kl_coef=1.0, value_coef=0.0), seed=0, device=CPU)
        shift = math.sqrt(2 * nats / 4) * float(policy.log_std[0].exp().detach())  # of each of the 4 numbers of a chunk
        with torch.no_grad():
            policy.actor[2].bias += shift
        fragment = make_fragment(policy, seed=0)
        fragment.reward_TNE.zero_()
        batch = algorithm.prepare(fragment, torch.zeros_like(fragment.version_TN), torch.ones(5, 6, dtype=torch.bool))
        batch.columns[batch.COLUMNS.index("advantage")] = 0.0
        loss = algorithm.loss(batch).total
        assert float(loss.detach()) == pytest.approx(nats, rel=1e-3)
        loss.backward()
        pulls.append(float(policy.actor[2].bias.grad.mean()))
    assert pulls == sorted(pulls)
    assert pulls[-1] == pytest.approx(pulls[0] * math.sqrt(80), rel=1e-3)


def test_the_kl_to_the_first_policy_is_that_of_the_current_policy_from_it() -> None:
    """KL(current || first), not the reverse: they differ where the standard deviations do."""
    first = TinyPolicy()
    policy = copy.deepcopy(first)
    algorithm = PPO(policy, PPOConfig(reference_kl_coef=1.0, value_coef=0.0), seed=0, device=CPU)
    with torch.no_grad():
        policy.log_std -= 1.0
    fragment = make_fragment(policy, seed=0)
    batch = algorithm.prepare(fragment, torch.zeros_like(fragment.version_TN), torch.ones(5, 6, dtype=torch.bool))
    batch.columns[batch.COLUMNS.index("advantage")] = 0.0
    zero = torch.zeros(4)
    wide, narrow = (Independent(Normal(zero, p.log_std.detach().exp()), 1) for p in (first, policy))
    expected = kl_divergence(narrow, wide)
    assert abs(float(expected - kl_divergence(wide, narrow))) > 1.0
    torch.testing.assert_close(algorithm.loss(batch).total.detach(), expected, rtol=1e-4, atol=1e-5)


def optimal_shift(flow: LinearFlow) -> float:
    """Shift of ``center`` at which the gradients of the action and of the KL of all steps cancel; both are linear."""
    moved, zero, x = copy.deepcopy(flow), torch.zeros(2, 1), torch.tensor([0.0, 1.0])[:, None, None]
    moved.center += 1.0
    action, pull = 0.0, 0.0
    for k in range(flow.denoise_steps):
        old, new = flow.transition(zero, x, k), moved.transition(zero, x, k)
        after = x - old.velocity / flow.denoise_steps if flow.one_stochastic_step else old.mean
        force = float(new.mean[0] - old.mean[0])
        action = action * float(after[1] - after[0]) + force
        pull += (force / float(old.std[0])) ** 2
    return action / pull


@pytest.mark.parametrize("exploration", ["flow_noise", "flow_sde"])
@pytest.mark.parametrize("steps", [4, 10])
@pytest.mark.parametrize("mode", ["all", "one"])
def test_the_reference_holds_as_strongly_whatever_share_of_the_steps_is_scored(
    mode: Any, steps: int, exploration: Any
) -> None:
    """With reward = action the optimum is known. Were only one of the two terms divided by K, it would be K times off.

    Under Flow-SDE ``one`` carries the noise of a step on by the ODE, so its optimum is 10% from that of ``all``.
    """
    flow = LinearFlow(
        ChainConfig(horizon=1, execute=1, denoise_steps=steps, exploration=exploration, stochastic_steps=mode)
    )
    config = PPOConfig(
        reference_kl_coef=1.0, learning_rate=0.01, schedule="fixed", epochs=1, num_minibatches=1, value_coef=0.0,
        normalize_advantage=False, gamma=1.0,
    )  # fmt: skip
    algorithm, path = PPO(flow, config, seed=0, device=CPU), []
    with torch.no_grad():
        expected = optimal_shift(flow)
    for version in range(80):
        fragment = rollout(flow, seed=version, version=version, T=1, N=2048, rows={"state": torch.zeros(2048, 1)})
        fragment.value_TN.zero_()
        fragment.reward_TNE[:] = fragment.action_TNEA[..., 0] - 0.5
        algorithm.update([fragment], version)
        path.append(float(flow.center.detach()) - 0.5)
    assert sum(path[40:]) / 40 == pytest.approx(expected, rel=0.06)
