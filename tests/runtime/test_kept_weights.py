"""Which weights a run evaluates, keeps and goes on with: those that are trained, their average, or confirmed ones."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.policy import Policy
from embodied.policies.config import DSRLConfig
from embodied.policies.dsrl import DSRLPolicy
from embodied.runtime.local import LocalRuntime
from embodied.runtime.sync import OneProcess, SyncRuntime
from tests.runtime.builders import build, iterate
from tests.runtime.test_runtimes import assert_same


def averaged(decay: float, policy: Policy) -> PPO:
    """PPO that keeps an average of its weights; with decay 0 the weights themselves."""
    return PPO(policy, PPOConfig(epochs=2, ema_decay=decay), seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["sync", "local"])
@pytest.mark.parametrize("average", [0.0, 0.9])
def test_weights_that_an_evaluation_confirmed_can_be_kept_in_place_of_the_newest(name: str, average: float) -> None:
    averaging = partial(averaged, average)
    with build(make_algorithm=averaging, name=name, eval_every=3) as runtime:
        evaluated = None
        for iteration in runtime.iterations():
            if iteration.evaluation is not None and evaluated is None:
                evaluated = copy.deepcopy(runtime.evaluator.weights)
            elif evaluated is not None:  # one more iteration made other weights
                break
        newest = copy.deepcopy(runtime.policy.state_dict())
        assert evaluated is not None
        assert any(not torch.equal(newest[key], evaluated[key]) for key in newest)
        runtime.keep_evaluated()
        state = runtime.state_dict()
        assert_same(state["policy"], evaluated)
        assert_same(dict(runtime.policy.state_dict()), evaluated)
    assert_same(dict(runtime.policy.state_dict()), evaluated)
    with build(make_algorithm=averaging, name=name) as resumed:
        resumed.load_state_dict(state)
        assert_same(dict(resumed.policy.state_dict()), evaluated)
        iterate(resumed, 1)


@pytest.mark.parametrize("name", ["sync", "local"])
def test_the_average_is_evaluated_and_saved_and_the_weights_go_on(name: str) -> None:
    """The runtime keeps ``deployed``; a resumed run has both it and the weights that were being trained."""

    averaging = partial(averaged, 0.9)
    with build(make_algorithm=averaging, name=name, eval_every=1) as runtime:
        assert isinstance(runtime, SyncRuntime | LocalRuntime)
        iterate(runtime, 3)
        state = runtime.state_dict()
        algorithm = runtime.learner.algorithm
        assert runtime.policy is algorithm.deployed
        trained = copy.deepcopy(algorithm.policy.state_dict())
        kept = copy.deepcopy(runtime.policy.state_dict())
    assert any(not torch.equal(kept[key], trained[key]) for key in kept)
    with build(make_algorithm=averaging, name=name, seed=9) as resumed:
        assert isinstance(resumed, SyncRuntime | LocalRuntime)
        resumed.load_state_dict(state)
        for key, value in resumed.learner.algorithm.policy.state_dict().items():
            assert torch.equal(value, trained[key])
        for key, value in resumed.policy.state_dict().items():
            assert torch.equal(value, kept[key])


@pytest.mark.parametrize("name", ["sync", "local"])
def test_weights_that_are_not_trained_exist_once(name: str) -> None:
    """The wrapped policy of DSRL stands in for a frozen VLA, whose weights take gigabytes."""
    config = DSRLConfig(
        horizon=3, execute=2, actor_hidden=(8,), head_hidden=(8,), critic_hidden=(8,), noise_hidden=(8,)
    )
    options = PPOConfig(epochs=1, num_minibatches=2, ema_decay=0.9, reference_kl_coef=0.1)
    with build(
        make_policy=lambda spec: DSRLPolicy(spec, config),
        make_algorithm=lambda policy: PPO(policy, options, seed=3, device=torch.device("cpu")),
        name=name, eval_every=1,
    ) as runtime:  # fmt: skip
        [*_, last] = iterate(runtime, 3)
        assert isinstance(runtime, OneProcess)
        assert last.metrics
        algorithm = runtime.learner.algorithm
        assert isinstance(algorithm, PPO)
        assert algorithm.reference is not None
        copies = [algorithm.reference, algorithm.deployed, runtime.actor.policy, runtime.evaluator.policy]
        published = runtime.actor.store.latest().tensors
        for key, weight in algorithm.policy.named_parameters():
            found = [weight, published[key], *(dict(copy.named_parameters())[key] for copy in copies)]
            assert len({tensor.data_ptr() for tensor in found}) == (6 if weight.requires_grad else 1), key
        assert any(not weight.requires_grad for weight in algorithm.policy.parameters())
