"""Every policy and exploration, every correction and reduction, in float32: what the actor says is what the learner
finds, also after the weights have travelled and after a checkpoint."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algos.config import CORRECTIONS, REDUCTIONS, PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.policy import Policy
from embodied.policies import POLICIES
from embodied.runtime.channel import WeightStore
from tests.algos.fragments import SIZES, SPEC, rollout

CPU = torch.device("cpu")
TWO = ("gaussian", "flow, SDE, one step, delays")
DEFAULT = PPOConfig.correction, PPOConfig.reduction
PAIRS = [
    (correction, reduction)
    for correction, reduction in itertools.product(CORRECTIONS, REDUCTIONS)
    if reduction == "sum" or correction in ("decoupled", "vtrace")  # the others are refused, see tests/algos
]
COMBINATIONS = sorted({(name, *DEFAULT) for name in SIZES} | {(name, *pair) for name in TWO for pair in PAIRS})


def build(name: str, seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    entry = POLICIES[name.split(",")[0]]
    return entry.build(SPEC, entry.config(**SIZES[name]))


def algorithm_of(policy: Policy, **options: Any) -> PPO:
    return PPO(policy, PPOConfig(**options), seed=0, device=CPU)


@pytest.mark.parametrize(("name", "correction", "reduction"), COMBINATIONS)
def test_ratio_one_and_kl_zero_after_a_broadcast_and_after_a_checkpoint(
    name: str, correction: str, reduction: str, tmp_path: Path
) -> None:
    learner = algorithm_of(build(name), correction=correction, reduction=reduction, learning_rate=2e-3, epochs=2)
    actor, store = build(name, seed=1), WeightStore()
    for version in range(2):  # two updates, so that weights, normaliser and noise have moved
        store.publish(version, learner.policy.state_dict())
        actor.load_state_dict(store.latest().tensors)
        learner.update([rollout(actor, seed=version, version=version)], version)
    store.publish(2, learner.policy.state_dict())
    actor.load_state_dict(store.latest().tensors)
    torch.save({"policy": learner.policy.state_dict(), "algorithm": learner.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = algorithm_of(build(name, seed=2), correction=correction, reduction=reduction, epochs=1, num_minibatches=1)
    resumed.policy.load_state_dict(state["policy"])
    resumed.load_state_dict(state["algorithm"])
    fragment = rollout(actor, seed=7, version=2)
    rows = {key: value.flatten(0, 1) for key, value in fragment.obs.items()}
    evaluated = resumed.policy.evaluate(rows, fragment.chain.flatten(0, 1))
    torch.testing.assert_close(evaluated.log_prob_B, fragment.log_prob_TN.flatten(), atol=1e-4, rtol=1e-5)
    assert evaluated.log_prob_BE is not None
    torch.testing.assert_close(evaluated.log_prob_BE.sum(-1), evaluated.log_prob_B)
    metrics = resumed.update([fragment], 2)
    assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["train/clip_fraction"] == 0.0
    assert metrics["async/ess"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("name", "correction", "reduction"), COMBINATIONS)
def test_with_learning_rate_zero_ratio_and_kl_never_move(name: str, correction: str, reduction: str) -> None:
    learner = algorithm_of(
        build(name), correction=correction, reduction=reduction, learning_rate=0.0, schedule="fixed", epochs=2
    )
    for version in range(3):
        metrics = learner.update([rollout(learner.policy, seed=version, version=version)], version)
        assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("reduction", sorted({*REDUCTIONS} - {"sum"}))
@pytest.mark.parametrize("name", TWO)
def test_at_ratio_one_every_reduction_has_the_gradient_of_the_sum(name: str, reduction: str) -> None:
    policy = build(name)
    fragment = rollout(policy, seed=3, version=0)
    gradients = {}
    for kind in ("sum", reduction):
        learner = algorithm_of(copy.deepcopy(policy), reduction=kind, value_coef=0.0, normalize_advantage=False)
        valid = torch.ones_like(fragment.terminated_TN)
        batch = learner.prepare(fragment, torch.zeros_like(fragment.version_TN), valid)
        learner.loss(batch).total.backward()
        grads = [p.grad for p in learner.policy.parameters() if p.grad is not None]
        gradients[kind] = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(gradients[reduction], gradients["sum"], atol=1e-4, rtol=1e-3)
