"""The settings that a policy, a task and a start from another run bring along, as they are composed."""

from __future__ import annotations

from typing import Any

import pytest

from embodied.policies import POLICIES
from embodied.session.config import RunConfig, compose_run


def composed(algo: str, **options: Any) -> RunConfig:
    return compose_run({"task": "tabletop", "policy": "vla", "policy.pretrained": "pi0", "algo": algo} | options)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_reinforcement_learning_of_a_published_vla_is_careful(algo: str) -> None:
    """Rates of π_RL for the actor, also as bounds of the schedule; few epochs; the critic learns first."""
    found = composed(algo).algo.options
    assert found.schedule == "adaptive"
    assert found.min_learning_rate <= 1e-6 < found.learning_rate <= found.max_learning_rate <= 1e-5
    assert found.epochs <= 2
    assert found.ema_decay == 0.99
    if algo == "ppo":
        assert found.critic_learning_rate == 1e-4
        assert found.critic_warmup == 8


@pytest.mark.parametrize("algo", ["sft", "grounding"])
def test_supervised_learning_of_a_published_vla_is_careful(algo: str) -> None:
    assert composed(algo).algo.options.learning_rate == 1e-5


@pytest.mark.parametrize("policy", sorted(POLICIES.names()))
def test_grpo_from_another_runs_policy_begins_at_the_lower_bound_of_the_learning_rate(policy: str) -> None:
    """It has no critic to warm up, after which PPO begins there."""
    found = compose_run(
        {"task": "tabletop", "policy": policy, "algo": "grpo", "init": "a run of imitation"}
    ).algo.options
    assert (found.schedule, found.learning_rate) == ("adaptive", found.min_learning_rate)


@pytest.mark.parametrize("policy", ["flow", "vla", "vla_tiny", "dsrl"])
@pytest.mark.parametrize("init", [{}, {"init": "a run of imitation"}], ids=["fresh", "init"])
def test_no_recipe_explores_in_one_random_step_whose_kl_does_not_bound_that_of_the_action(
    policy: str, init: dict[str, str]
) -> None:
    config = compose_run({"task": "tabletop", "policy": policy} | init)
    assert config.policy.options.stochastic_steps != "one"


def test_the_command_line_wins() -> None:
    found = composed("ppo", **{"algo.learning_rate": 1e-6, "num_envs": 16})
    assert found.algo.options.learning_rate == 1e-6
    assert found.algo.options.epochs == 2
    assert found.num_envs == 16


def test_a_policy_that_starts_from_nothing_keeps_the_usual_rates() -> None:
    found = compose_run({"task": "reach", "policy": "gaussian"}).algo.options
    assert (found.learning_rate, found.min_learning_rate, found.max_learning_rate) == (7e-4, 1e-5, 1e-2)
    flow = compose_run({"task": "reach"}).algo.options
    assert (flow.min_learning_rate, flow.max_learning_rate, flow.desired_kl) == (1e-5, 1.5e-4, 0.04)
