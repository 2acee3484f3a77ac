"""GRPO: advantages by hand, groups that say nothing, options that contradict it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied.algos import ALGORITHMS
from embodied.algos.grpo import GRPO, GRPOConfig
from embodied.algos.returns import group_relative
from embodied.core.algorithm import Algorithm, Metrics
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment
from embodied.envs import SamplerSetup, UniformConfig
from embodied.envs.episodes.sampler import UniformSampler
from embodied.runtime.learner import mask_before
from tests.numerics.tiny_policy import TinyPolicy, make_fragment
from tests.runtime.builders import build, iterate, make_policy

CPU = torch.device("cpu")


def episodes(policy: TinyPolicy, *, T: int = 3, N: int = 6, **options: Any) -> Fragment:
    """A fragment of whole episodes: all envs end, by truncation, at its last decision."""
    fragment = make_fragment(policy, seed=1, T=T, N=N, **options)
    ended = torch.zeros(T, N, dtype=torch.bool)
    ended[-1] = True
    return replace(fragment, terminated_TN=torch.zeros_like(ended), truncated_TN=ended)


def with_returns(fragment: Fragment, returns: list[float]) -> Fragment:
    """The episodes' returns, spread over decisions and control steps."""
    T, N, E = fragment.reward_TNE.shape
    return replace(fragment, reward_TNE=(torch.tensor(returns) / (T * E)).expand(T, E, N).transpose(1, 2).clone())


def with_versions(fragment: Fragment, version_T: list[int]) -> Fragment:
    return replace(fragment, version_TN=torch.tensor(version_T)[:, None].expand_as(fragment.version_TN).clone())


def test_the_advantage_is_the_return_standardised_in_its_group() -> None:
    fragment = with_returns(episodes(TinyPolicy()), [1.0, 3.0, 0.0, 0.0, 10.0, 10.0])
    advantage, valid = group_relative(fragment, 2)
    torch.testing.assert_close(advantage, torch.tensor([-1.0, 1.0, 0, 0, 0, 0]), atol=1e-5, rtol=0)
    assert valid.tolist() == [[True, True, False, False, False, False]] * 3
    advantage, valid = group_relative(fragment, 3)
    torch.testing.assert_close(advantage[:3], torch.tensor([-1 / 3, 5 / 3, -4 / 3]) / (14 / 9) ** 0.5)
    assert valid.all()


def test_a_decision_that_is_too_old_leaves_its_group_as_it_is() -> None:
    fragment = with_returns(episodes(TinyPolicy()), [1.0, 3.0, 0.0, 0.3, 10.0, 10.0])
    expected, _ = group_relative(fragment, 2)
    masked, valid = group_relative(mask_before(with_versions(fragment, [0, 1, 1]), 1), 2)
    torch.testing.assert_close(masked, expected)
    assert valid[:, :4].all()


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_unit_of_the_reward_changes_no_advantage(unit: float) -> None:
    fragment = with_returns(episodes(TinyPolicy()), [1.0, 3.0, 0.0, 0.3, 10.0, 10.0])
    expected = group_relative(fragment, 2)
    found = group_relative(replace(fragment, reward_TNE=fragment.reward_TNE * unit), 2)
    torch.testing.assert_close(found, expected)


def test_a_group_with_an_episode_that_is_not_the_fragment_does_not_count() -> None:
    fragment = with_returns(episodes(TinyPolicy()), [1.0, 3.0, 2.0, 4.0, 5.0, 7.0])
    ended_early, goes_on = fragment.truncated_TN.clone(), fragment.truncated_TN.clone()
    ended_early[0, 2] = True
    goes_on[-1, 5] = False
    shorter = fragment.num_steps_TN.clone()
    shorter[-1, 0] = 1

    def compared(**changes: torch.Tensor) -> list[bool]:
        valid_TN = group_relative(replace(fragment, **changes), 2)[1]
        assert (valid_TN.any(0) == valid_TN[0]).all()
        return valid_TN[0].tolist()

    assert compared(truncated_TN=ended_early) == [True] * 2 + [False] * 2 + [True] * 2
    assert compared(truncated_TN=goes_on) == [True] * 4 + [False] * 2
    assert compared(num_steps_TN=shorter) == [False] * 2 + [True] * 4


def test_an_episode_that_fails_early_is_compared_up_to_its_end() -> None:
    """Env 1 fails at decision 1; what it does afterwards, in an episode that fills the fragment, does not count."""
    fragment = with_returns(episodes(TinyPolicy()), [3.0, 3.0, 1.0, 2.0, 1.0, 2.0])
    failed = torch.zeros_like(fragment.terminated_TN)
    failed[1, 1] = True
    advantage, valid = group_relative(replace(fragment, terminated_TN=failed), 2)
    torch.testing.assert_close(advantage[:2], torch.tensor([1.0, -1.0]))  # returns 3 and 2
    assert valid[:, 0].tolist() == [True, True, True]
    assert valid[:, 1].tolist() == [True, True, False]
    assert valid[:, 2:].all()


def test_a_group_with_an_env_that_diverged_in_its_last_decision_does_not_count() -> None:
    """Its decision counts for nothing, whether it is as long as the others, or they failed and have no length."""
    fragment = with_returns(episodes(TinyPolicy()), [3.0, 2.0, 1.0, 2.0, 5.0, 7.0])
    failed, steps = torch.zeros_like(fragment.terminated_TN), fragment.num_steps_TN.clone()
    failed[1, 0] = True
    steps[-1, 1] = 0
    steps[-1, 2:4] = 0
    _, valid_TN = group_relative(replace(fragment, terminated_TN=failed, num_steps_TN=steps), 2)
    assert valid_TN.any(0).tolist() == [False] * 4 + [True] * 2


def test_groups_stay_in_step_where_envs_fail() -> None:
    """A run whose point masses leave the square: every fragment still begins and ends with its groups."""

    def make_sampler(spec: EnvSpec, num_envs: int, first_seed: int, incarnation: int) -> UniformSampler:
        setup = SamplerSetup(num_envs, first_seed, group_size=3, incarnation=incarnation)
        return UniformSampler(spec, UniformConfig(), setup)

    fragments: list[Fragment] = []

    class Keeping(GRPO):
        def update(self, batch: Sequence[Fragment], version: int) -> Metrics:
            fragments.extend(batch)
            return super().update(batch, version)

    def make_algorithm(policy: Policy) -> GRPO:
        return Keeping(policy, GRPOConfig(group_size=3, epochs=1), seed=0, device=CPU)

    def make_drifting(spec: EnvSpec) -> Policy:
        policy = make_policy(spec)
        with torch.no_grad():
            policy.actor[-1].bias.fill_(0.6)
        return policy

    options = {"make_algorithm": make_algorithm, "make_sampler": make_sampler, "make_policy": make_drifting}
    with build(**options, name="sync", decisions=10) as runtime:  # 10 chunks of 2 are an episode
        done = iterate(runtime, 3)
    counted = sum(len(iteration.episodes) for iteration in done)
    assert counted == 3 * 12, "one episode per env and batch; those that fill the time after a failure do not count"
    assert sum(int(fragment.terminated_TN.sum()) for fragment in fragments) > 10
    for fragment in fragments:
        assert (fragment.terminated_TN | fragment.truncated_TN)[-1].all()
        starts_G3 = fragment.obs["state"][0].view(-1, 3, 3)
        assert (starts_G3 == starts_G3[:, :1]).all()
        assert group_relative(fragment, 3)[1][0].any()


def test_groups_must_divide_the_envs() -> None:
    with pytest.raises(ValueError, match="6 envs cannot be split into groups of 4"):
        group_relative(episodes(TinyPolicy()), 4)


def test_a_batch_of_groups_that_say_nothing_changes_neither_parameters_nor_learning_rate() -> None:
    policy = TinyPolicy()
    algorithm = GRPO(policy, GRPOConfig(group_size=2), seed=0, device=CPU)
    rate = algorithm.update([episodes(policy)], 0)["train/learning_rate"]  # Adam has a momentum now
    before = {name: value.clone() for name, value in policy.named_parameters()}
    metrics = algorithm.update([with_returns(episodes(policy, version=1), [2.0] * 6)], 1)
    assert metrics["train/learning_rate"] == rate
    assert metrics["train/epochs"] == 0
    for name, value in policy.named_parameters():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0)


def test_the_kl_that_steers_the_learning_rate_is_of_what_counts() -> None:
    policy = TinyPolicy()
    fragment = with_returns(episodes(policy, N=64), [float(i % 2) if i < 2 else 1.0 for i in range(64)])
    few = GRPO(copy.deepcopy(policy), GRPOConfig(group_size=2, num_minibatches=1, schedule="fixed"), seed=0, device=CPU)
    alone = GRPO(
        copy.deepcopy(policy), GRPOConfig(group_size=2, num_minibatches=1, schedule="fixed"), seed=0, device=CPU
    )
    first = replace(
        fragment, obs={"state": fragment.obs["state"][:, :2]}, bootstrap_value_N=fragment.bootstrap_value_N[:2],
        **{name: getattr(fragment, name)[:, :2] for name in (
            "chain", "log_prob_TN", "value_TN", "reward_TNE", "num_steps_TN", "terminated_TN", "truncated_TN",
            "final_value_TN", "version_TN",
        )},
    )  # fmt: skip
    kls = [algorithm.update([part], 0)["train/approx_kl"] for algorithm, part in ((few, fragment), (alone, first))]
    assert kls[0] == pytest.approx(kls[1], rel=0.5)  # 1/32 of it if the masked ones were counted


def test_the_critic_does_not_learn_and_the_actor_does() -> None:
    policy = TinyPolicy()
    before = {name: value.clone() for name, value in policy.named_parameters()}
    entry = ALGORITHMS["grpo"]
    algorithm = entry.build(policy, entry.config(group_size=3), seed=0, device=CPU)  # type: ignore[call-arg]
    assert isinstance(algorithm, Algorithm)
    metrics = algorithm.update([episodes(policy)], 0)
    assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    changed = {name for name, value in policy.named_parameters() if not torch.equal(value, before[name])}
    assert any(name.startswith("actor") for name in changed)
    assert not any(name.startswith("critic") for name in changed)


def test_it_learns_to_prefer_what_others_of_the_group_did_better() -> None:
    policy = TinyPolicy()
    algorithm = GRPO(policy, GRPOConfig(group_size=8, learning_rate=3e-3), seed=0, device=CPU)
    rewards = []
    for version in range(30):
        fragment = make_fragment(policy, seed=version, version=version, T=1, N=64)
        state = fragment.obs["state"][:, ::8].repeat_interleave(8, dim=1)  # the same start for a group
        sample = policy.act(
            {"state": state[0]}, torch.randn(64, *policy.noise_shape, generator=torch.Generator().manual_seed(version))
        )
        reward = -(sample.action_NHA - 0.5).square().sum(-1)[None]
        rewards.append(float(reward.mean()))
        ended = torch.ones(1, 64, dtype=torch.bool)
        algorithm.update([
            replace(
                fragment, obs={"state": state}, chain=sample.chain[None], log_prob_TN=sample.log_prob_N[None],
                reward_TNE=reward, truncated_TN=ended, terminated_TN=~ended,
            )
        ], version)  # fmt: skip
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size: got 1, allowed: at least 2"),
        ({"value_coef": 0.5}, "value_coef: got 0.5, allowed: 0, as GRPO has no critic"),
        ({"critic_warmup": 3}, "critic_warmup: got 3, allowed: 0"),
        ({"correction": "vtrace"}, "correction=vtrace needs a critic"),
        ({"reduction": "token"}, "reduction: got 'token', allowed: 'sum', 'mean' or 'action'"),
        ({"reduction": "action", "correction": "none"}, "reduction=action needs proximal=recompute"),
        ({"reduction": "mean", "proximal": "interpolate"}, "reduction=mean needs proximal=recompute"),
    ],
)
def test_options_that_contradict_it_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPOConfig(**options)
