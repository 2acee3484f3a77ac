"""The categorical policy: exact likelihoods of choices, and who may use it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.errors import UserError
from embodied.core.spec import Discrete, EnvSpec, MultiDiscrete
from embodied.core.types import Obs
from embodied.policies import POLICIES
from embodied.policies.categorical import CategoricalPolicy
from embodied.policies.config import CategoricalConfig
from tests.algos import fragments

SPEC = replace(EnvSpec.of_sizes("choices", state=5, privileged=3, action=1), action=Discrete(("a", "b", "c")))
NUM = 4000


def build(**options: int) -> CategoricalPolicy:
    torch.manual_seed(0)
    policy = CategoricalPolicy(SPEC, CategoricalConfig(actor_hidden=(16,), critic_hidden=(16,), **options))
    with torch.no_grad():
        policy.actor[-1].weight.normal_(0.0, 0.5)
    return policy


def observe(num: int) -> Obs:
    generator = torch.Generator().manual_seed(1)
    return {"state": torch.randn(num, 5, generator=generator), "privileged": torch.randn(num, 3, generator=generator)}


def noise(policy: CategoricalPolicy, num: int) -> torch.Tensor:
    return torch.randn(num, *policy.noise_shape, generator=torch.Generator().manual_seed(2))


def test_log_probability_and_entropy_are_those_of_the_executed_choices() -> None:
    policy, obs = build(horizon=3, execute=2), observe(64)
    sample = policy.act(obs, noise(policy, 64))
    assert sample.action_NHA.shape == (64, 3, 1)
    assert sample.action_NHA.dtype == torch.int64
    choices = Categorical(logits=policy.actor(policy.normalized_state(obs)).view(64, 3, 3).detach())
    expected = choices.log_prob(sample.action_NHA[..., 0])[:, :2].sum(-1)
    torch.testing.assert_close(sample.log_prob_N, expected)
    evaluation = policy.evaluate(obs, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(evaluation.entropy_B, choices.entropy()[:, :2].sum(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(evaluation.value_B, sample.value_N)


def test_choices_come_as_often_as_they_are_likely() -> None:
    policy = build()
    obs = {key: value.expand(NUM, -1) for key, value in observe(1).items()}
    drawn = policy.act(obs, noise(policy, NUM)).action_NHA.flatten()
    likely = policy.log_probs(policy.normalized_state(obs))[0, 0].exp()
    share = torch.bincount(drawn, minlength=3) / NUM
    assert (share - likely).abs().max() < 4 * (0.25 / NUM) ** 0.5
    assert (policy.plan(obs) == likely.argmax()).all()
    assert torch.equal(policy.plan(obs, noise(policy, NUM)).flatten(), drawn)


def test_the_first_ratio_is_one() -> None:
    policy = build()
    algorithm = PPO(policy, PPOConfig(learning_rate=0.0, epochs=1), seed=0, device=torch.device("cpu"))
    rows = observe(64)
    fragment = fragments.rollout(policy, seed=0, version=0, rows=rows)
    metrics = algorithm.update([fragment], 0)
    assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_policy_that_does_not_fit_the_action_space_is_refused() -> None:
    continuous = EnvSpec.of_sizes("arm", state=5, action=2)
    with pytest.raises(UserError, match=r"CategoricalPolicy gives choices .*, task arm needs continuous actions"):
        build_named("categorical", continuous)
    for name in ("gaussian", "flow", "dsrl"):
        with pytest.raises(UserError, match=r"gives continuous actions .*, task choices needs choices"):
            build_named(name, SPEC)


def build_named(name: str, spec: EnvSpec) -> None:
    POLICIES[name].build(spec, POLICIES[name].config())


MANY = replace(
    EnvSpec.of_sizes("masked", state=5, action=1), action=MultiDiscrete(("a", "b"), (3, 2)), action_mask=True
)


def masked(num: int) -> tuple[CategoricalPolicy, Obs]:
    """Return a policy of two dimensions, and observations with masks that allow at least one choice in each."""
    torch.manual_seed(0)
    policy = CategoricalPolicy(MANY, CategoricalConfig(actor_hidden=(16,), critic_hidden=(16,)))
    with torch.no_grad():
        policy.actor[-1].weight.normal_(0.0, 0.5)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(num, 5, generator=generator) < 0.5
    mask[:, 1] = mask[:, 4] = True
    return policy, {"state": torch.randn(num, 5, generator=generator), "action_mask": mask}


def dimensions(policy: CategoricalPolicy, obs: Obs) -> tuple[Categorical, Categorical]:
    """Return the distributions of the two dimensions as torch has them."""
    logits = policy.actor(policy.normalized_state(obs)).masked_fill(~obs["action_mask"], float("-inf"))
    first, second = logits.split((3, 2), -1)
    return Categorical(logits=first), Categorical(logits=second)


def test_dimensions_are_independent_and_masked_choices_have_no_part() -> None:
    policy, obs = masked(64)
    sample = policy.act(obs, noise(policy, 64))
    assert sample.action_NHA.shape == (64, 1, 2)
    first, second = dimensions(policy, obs)
    choice = sample.action_NHA[:, 0]
    expected = first.log_prob(choice[:, 0]) + second.log_prob(choice[:, 1])
    torch.testing.assert_close(sample.log_prob_N, expected)
    evaluation = policy.evaluate(obs, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(evaluation.entropy_B, first.entropy() + second.entropy(), atol=1e-6, rtol=1e-5)
    (evaluation.log_prob_B.sum() + evaluation.entropy_B.sum()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in policy.actor.parameters() if p.grad is not None)


def test_masked_choices_are_never_drawn_nor_planned() -> None:
    policy, obs = masked(NUM)
    rows = torch.arange(NUM)
    drawn = policy.act(obs, noise(policy, NUM)).action_NHA
    for choice in (drawn, policy.plan(obs), policy.plan(obs, noise(policy, NUM))):
        assert obs["action_mask"][:, :3][rows, choice[:, 0, 0]].all()
        assert obs["action_mask"][:, 3:][rows, choice[:, 0, 1]].all()
    log_probs = policy.log_probs(policy.normalized_state(obs), obs["action_mask"])[:, 0]
    assert (log_probs[:, 0].exp()[~obs["action_mask"][:, :3]] == 0).all()
    assert (log_probs[:, 1, 2].exp() == 0).all()


def test_kl_is_that_of_the_masked_distributions() -> None:
    policy, obs = masked(64)
    other, _ = masked(64)
    with torch.no_grad():
        other.actor[-1].weight.add_(0.3)
    chain = policy.act(obs, noise(policy, 64)).chain
    p, q = policy.evaluate(obs, chain).distribution, other.evaluate(obs, chain).distribution
    expected = sum(kl_divergence(a, b) for a, b in zip(dimensions(policy, obs), dimensions(other, obs), strict=True))
    torch.testing.assert_close(policy.kl_divergence(p, q), expected, atol=1e-5, rtol=1e-4)
    assert (policy.kl_divergence(p, p) == 0).all()


def test_the_first_ratio_is_one_with_masks() -> None:
    policy, rows = masked(64)
    algorithm = PPO(policy, PPOConfig(learning_rate=0.0, epochs=1), seed=0, device=torch.device("cpu"))
    metrics = algorithm.update([fragments.rollout(policy, seed=0, version=0, rows=rows)], 0)
    assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_masks_hold_for_one_action() -> None:
    with pytest.raises(UserError, match=r"policy.horizon: got 2, allowed: 1, because the action masks of task masked"):
        CategoricalPolicy(MANY, CategoricalConfig(horizon=2))
