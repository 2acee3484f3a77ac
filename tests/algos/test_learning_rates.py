"""Learning rates of PPO: the KL that they follow, their fall over a run, a critic's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from embodied.algos import adam
from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from tests.numerics.tiny_policy import TinyPolicy, make_fragment


def ppo(policy: TinyPolicy, **options: Any) -> PPO:
    return PPO(policy, PPOConfig(**options), seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize("options", [{}, {"epochs": 1, "num_minibatches": 1}], ids=str)
@pytest.mark.parametrize(("desired_kl", "direction"), [(1e-6, -1), (1e3, 1)])
def test_the_adaptive_schedule_moves_the_learning_rate_towards_the_desired_kl(
    desired_kl: float, direction: int, options: dict[str, int]
) -> None:
    """Also where one minibatch is the whole update, so that no other one shows how far its step went."""
    policy = TinyPolicy()
    algorithm = ppo(policy, learning_rate=1e-3, schedule="adaptive", desired_kl=desired_kl, **options)
    rate = algorithm.update([make_fragment(policy, seed=0)], 0)["train/learning_rate"]
    assert math.copysign(1, rate - 1e-3) == direction
    assert 1e-5 <= rate <= 1e-2


@pytest.mark.parametrize("options", [{"schedule": "fixed"}, {"desired_kl": 1e-9}, {"desired_kl": 1e3}], ids=str)
def test_learning_rates_and_their_bounds_fall_after_some_updates_also_across_a_resume(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an unreachable desired_kl the adaptive rate is at one of its bounds."""
    monkeypatch.setattr(adam, "HOLD", 5)
    bounds = {"min_learning_rate": 2e-4, "max_learning_rate": 4e-4}
    expected = {"fixed": 3e-4, 1e-9: 2e-4, 1e3: 4e-4}[next(iter(options.values()))]
    settings = {"learning_rate": 3e-4, "critic_learning_rate": 1e-3, "final_rate": 0.2, **bounds, **options}
    policy, shares = TinyPolicy(), []
    algorithm = ppo(policy, **settings)
    for version in range(12):
        resumed = ppo(copy.deepcopy(policy), **settings)
        resumed.load_state_dict(algorithm.state_dict())
        before, after = (each.state_dict()["optimizer"]["param_groups"] for each in (algorithm, resumed))
        assert before == after, "bit for bit"
        if version == 7:
            algorithm, policy = resumed, resumed.policy
        algorithm.total_updates = 10
        algorithm.update([make_fragment(policy, seed=version, version=version)], version)
        shares.append([float(group["lr"]) for group in algorithm.optimizer.param_groups])
    for version, (actor, critic) in enumerate(shares):
        share = min(1.0, max(0.2, 1 - 0.8 * (version - 5) / 5))
        assert critic == pytest.approx(1e-3 * share)
        assert actor == pytest.approx(expected * share), version


def test_a_run_that_is_made_longer_has_its_learning_rate_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "HOLD", 0)
    policy = TinyPolicy()
    algorithm = ppo(policy, learning_rate=1e-3, schedule="fixed", final_rate=0.1)
    for version, total in ((0, 1), (1, 1), (2, 4)):
        algorithm.total_updates = total
        rate = algorithm.update([make_fragment(policy, seed=version, version=version)], version)["train/learning_rate"]
        assert rate == pytest.approx(1e-3 * {0: 1, 1: 0.1, 2: 0.55}[version])


def test_one_minibatch_per_update_leaves_the_lower_bound_after_the_warm_up() -> None:
    policy = TinyPolicy()
    algorithm = ppo(policy, schedule="adaptive", critic_warmup=1, epochs=1, num_minibatches=1)
    rates = [
        algorithm.update([make_fragment(policy, seed=version, version=version)], version)["train/learning_rate"]
        for version in range(4)
    ]
    assert rates[1] > algorithm.config.min_learning_rate
    assert rates[1:] == sorted(set(rates[1:]))


def test_the_critic_may_have_its_own_learning_rate() -> None:
    policy = TinyPolicy()
    actor, critic = (copy.deepcopy(net.state_dict()) for net in (policy.actor, policy.critic))
    ppo(policy, learning_rate=0.0, critic_learning_rate=1e-3).update([make_fragment(policy, seed=0)], 0)
    assert all(torch.equal(value, actor[name]) for name, value in policy.actor.state_dict().items())
    assert not any(torch.equal(value, critic[name]) for name, value in policy.critic.state_dict().items())
