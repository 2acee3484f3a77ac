"""The categorical policy: exact likelihoods of choices, and who may use it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import Categorical

from algos.ppo import PPO
from algos.ppo_config import PPOConfig
from embodied.core.errors import UserError
from embodied.core.spec import Discrete, EnvSpec
from embodied.core.types import Obs
from policies import POLICIES, CategoricalConfig, CategoricalPolicy
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
