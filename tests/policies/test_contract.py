"""What every policy, with every way to explore, promises to the runtime and the algorithms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodied.core.policy import Policy
from tests.policies.builders import SMALL, SPEC, assert_gradient, build, entry, generator, observe

NUM = 64
pytestmark = pytest.mark.parametrize("name", list(SMALL))


def drawn(policy, obs, seed=0):
    return policy.act(obs, torch.randn(obs["state"].shape[0], *policy.noise_shape, generator=generator(seed)))


def test_shapes_and_dtypes(name):
    policy, obs = build(name), observe(NUM)
    noise = torch.randn(NUM, *policy.noise_shape, generator=generator())
    one_step = name.endswith(" step")
    steps = 0 if name in ("gaussian", "dsrl") else 2 if one_step else 4
    assert isinstance(policy, Policy)
    assert noise.shape == (NUM, steps + 1, 3, 2)
    sample = policy.act(obs, noise)
    assert sample.action_NHA.shape == (NUM, 3, 2)
    assert sample.chain.shape == (NUM, steps + 1, 3, 2)
    assert sample.log_prob_N.shape == sample.value_N.shape == (NUM,)
    assert sample.chain.dtype == sample.log_prob_N.dtype == sample.value_N.dtype == torch.float32
    assert sample.version_N is None
    assert one_step or name == "dsrl" or torch.equal(sample.chain[:, -1], sample.action_NHA)
    assert not any(t.requires_grad for t in (sample.action_NHA, sample.log_prob_N, sample.value_N, sample.chain))
    evaluation = policy.evaluate(obs, sample.chain)
    assert evaluation.log_prob_B.shape == evaluation.entropy_B.shape == evaluation.value_B.shape == (NUM,)
    assert torch.allclose(policy.value(obs), evaluation.value_B)


def test_a_plan_needs_neither_critic_nor_what_is_privileged(name):
    policy, obs = build(name), observe(NUM)
    noise = torch.randn(NUM, *policy.plan_noise_shape, generator=generator())
    plans = policy.plan(obs), policy.plan(obs, noise)
    assert plans[0].shape == plans[1].shape == (NUM, 3, 2)
    assert not torch.allclose(*plans)
    del policy.critic
    again = policy.plan({"state": obs["state"]}), policy.plan({"state": obs["state"]}, noise)
    assert torch.equal(plans[0], again[0])
    assert torch.equal(plans[1], again[1])


def test_evaluate_repeats_the_sampler(name):
    policy, obs = build(name), observe(NUM)
    policy.update_normalizer(obs)
    sample = drawn(policy, obs)
    evaluation = policy.evaluate(obs, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.value_B, sample.value_N, atol=1e-5, rtol=1e-5)


def test_likelihood_of_a_chain_does_not_depend_on_the_batch_around_it(name):
    policy, obs = build(name), observe(NUM)
    sample = drawn(policy, obs)
    rows = torch.randperm(NUM, generator=generator())[:7]
    few = policy.evaluate({key: value[rows] for key, value in obs.items()}, sample.chain[rows])
    torch.testing.assert_close(few.log_prob_B, sample.log_prob_N[rows], atol=1e-5, rtol=1e-5)


def test_weights_carry_everything_to_another_instance(name):
    policy, other, obs = build(name, seed=0), build(name, seed=5), observe(NUM)
    policy.update_normalizer(obs)
    sample = drawn(policy, obs)
    assert not torch.allclose(other.evaluate(obs, sample.chain).log_prob_B, sample.log_prob_N, atol=1e-2)
    other.load_state_dict(policy.state_dict())
    evaluation = other.evaluate(obs, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.value_B, sample.value_N, atol=1e-5, rtol=1e-5)


def test_an_optimizer_step_changes_the_likelihood_and_reloading_restores_it(name):
    policy, obs = build(name), observe(NUM)
    policy.update_normalizer(obs)
    sample = drawn(policy, obs)
    weights = {key: value.clone() for key, value in policy.state_dict().items()}
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    evaluation = policy.evaluate(obs, sample.chain)
    (evaluation.log_prob_B.mean() + evaluation.value_B.mean()).backward()
    optimizer.step()
    assert not torch.allclose(policy.evaluate(obs, sample.chain).log_prob_B, sample.log_prob_N, atol=1e-2)
    policy.load_state_dict(weights)
    torch.testing.assert_close(policy.evaluate(obs, sample.chain).log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)


def test_every_parameter_gets_a_gradient(name):
    policy, obs = build(name), observe(NUM)
    evaluation = policy.evaluate(obs, drawn(policy, obs).chain)
    (evaluation.log_prob_B + evaluation.value_B).sum().backward()
    trained = {key: p for key, p in policy.named_parameters() if p.requires_grad}
    without = [key for key, p in trained.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_gradient_of_the_likelihood_matches_finite_differences(name):
    policy, obs = build(name).double(), {key: value.double() for key, value in observe(5).items()}
    policy.update_normalizer(obs)
    chain = drawn(policy, obs).chain
    assert chain.dtype == torch.float64
    assert_gradient(policy, obs, chain, seeds=5)


def test_the_critic_sees_the_privileged_state_and_the_actor_does_not(name):
    policy, obs = build(name), observe(NUM)
    other = obs | {"privileged": obs["privileged"] + 1.0}
    noise = torch.randn(NUM, *policy.noise_shape, generator=generator())
    before, after = policy.act(obs, noise), policy.act(other, noise)
    assert torch.equal(before.chain, after.chain)
    assert torch.equal(before.log_prob_N, after.log_prob_N)
    assert ((before.value_N - after.value_N).abs() > 1e-4).all()
    chain = before.chain
    assert torch.equal(policy.evaluate(obs, chain).log_prob_B, policy.evaluate(other, chain).log_prob_B)


def test_a_critic_without_its_privileged_state_says_so(name):
    with pytest.raises(ValueError, match="privileged"):
        build(name).value({"state": torch.zeros(1, SPEC.state_dim)})


def test_same_generator_same_decision(name):
    policy, obs = build(name), observe(NUM)
    assert torch.equal(drawn(policy, obs, 3).chain, drawn(policy, obs, 3).chain)
    assert not torch.equal(drawn(policy, obs, 3).chain, drawn(policy, obs, 4).chain)


def test_deterministic_action_is_repeatable_and_the_state_matters(name):
    policy, obs = build(name), observe(NUM)
    policy.update_normalizer(obs)
    action = policy.plan(obs)
    assert torch.equal(action, policy.plan(obs))
    assert action.std(0).min() > 0.01


def test_only_the_executed_part_counts(name):
    policy, obs = build(name, execute=1), observe(NUM)
    sample = drawn(policy, obs)
    evaluation = policy.evaluate(obs, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)

    planned, executed = sample.chain.clone(), sample.chain.clone()
    last = 1 if name.endswith(" step") else -1  # the state that nothing in the chain follows from
    planned[:, last, 1:] += 1.0  # of what is never executed
    executed[:, last, :1] += 1.0
    if name == "dsrl":  # all of the noise enters the network that decides on what is executed
        assert ((policy.evaluate(obs, planned).log_prob_B - evaluation.log_prob_B).abs() > 1e-3).all()
        return
    torch.testing.assert_close(policy.evaluate(obs, planned).log_prob_B, evaluation.log_prob_B)
    assert ((policy.evaluate(obs, executed).log_prob_B - evaluation.log_prob_B).abs() > 1e-3).all()

    whole = build(name, execute=3)
    whole.load_state_dict(policy.state_dict())
    assert (whole.evaluate(obs, sample.chain).entropy_B - evaluation.entropy_B).abs().min() > 1e-3


def test_normalizer_statistics_travel_in_the_weights(name):
    policy, obs = build(name), observe(NUM)
    before = policy.value(obs)
    policy.update_normalizer(obs)
    assert not torch.allclose(policy.value(obs), before)
    keys = set(policy.state_dict())
    assert {"state_normalizer.mean", "state_normalizer.var", "state_normalizer.count"} <= keys
    assert {"critic.normalizer.mean", "critic.normalizer.var"} <= keys


def test_a_spec_without_privileged_state(name):
    spec = replace(SPEC, privileged=())
    policy = entry(name).build(spec, entry(name).config(**SMALL[name]))
    obs = {"state": torch.randn(4, 6)}
    policy.update_normalizer(obs)
    assert policy.act(obs, torch.randn(4, *policy.noise_shape, generator=generator())).value_N.shape == (4,)


def test_untrained_policy_acts_near_zero_and_explores(name):
    policy, obs = build(name, spread=0.0), observe(2048)
    policy.update_normalizer(obs)
    if name == "dsrl":  # whose frozen part brings its statistics along
        policy.base.update_normalizer(obs)
    assert policy.plan(obs).abs().max() < 0.2
    std = drawn(policy, obs).action_NHA.std()
    assert std > 0.05
    if name in ("gaussian", "flow"):
        assert std == pytest.approx(0.25, rel=0.05)


def test_policy_gradient_learns_a_one_step_task(name):
    """Reward is minus the squared distance to an action that depends on the state."""
    policy = build(name, spread=0.0, horizon=1, execute=1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    noise_generator = generator()

    def reward(obs, action):
        return -(action[:, 0] - 0.5 * torch.tanh(obs["state"][:, :2])).square().sum(-1)

    def batch(seed):
        return {"state": torch.randn(512, 6, generator=generator(seed)), "privileged": torch.zeros(512, 3)}

    before = reward(batch(1000), policy.plan(batch(1000))).mean()
    for seed in range(150):
        obs = batch(seed)
        sample = policy.act(obs, torch.randn(512, *policy.noise_shape, generator=noise_generator))
        got = reward(obs, sample.action_NHA)
        advantage = (got - got.mean()) / got.std()
        loss = -(advantage * policy.evaluate(obs, sample.chain).log_prob_B).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = reward(batch(1000), policy.plan(batch(1000))).mean()
    assert after > 0.25 * before  # rewards are negative
