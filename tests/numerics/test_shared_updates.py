"""An update that several learner processes make together: equal weights in all, and the decisions of all count alike.

The processes are threads here, whose sums are those of torch.distributed over gloo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algos.config import PPOConfig
from embodied.algos.grpo import GRPO, GRPOConfig
from embodied.algos.ppo import PPO
from embodied.core.algorithm import Algorithm, Metrics
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.types import Fragment
from embodied.policies import POLICIES
from embodied.runtime.channel import WeightStore
from embodied.runtime.learner import Learner
from embodied.runtime.ray.learner_host import Collective, open_store
from embodied.runtime.ray.wire import PeerLost
from tests.algos.fragments import SIZES, SPEC, rollout

CPU = torch.device("cpu")
UPDATES = 3
TIMEOUT_S = 60.0


def build(name: str) -> Policy:
    torch.manual_seed(0)
    entry = POLICIES[name.split(",")[0]]
    return entry.build(SPEC, entry.config(**SIZES[name]))


def together(size: int, work: Callable[[Collective], Any]) -> list[Any]:
    """Results of ``work`` in every process of a group."""
    store, rendezvous = open_store("127.0.0.1", TIMEOUT_S)

    def join(rank: int) -> Any:
        where = {"address": "127.0.0.1", "device": CPU, "timeout_s": TIMEOUT_S}
        return work(Collective(rendezvous, rank, size, **where))  # type: ignore[arg-type]

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(join, range(size)))
    del store
    return results


def batches(policy: Policy) -> list[list[Fragment]]:
    """Fragments of several sizes for every update, some decisions of older weights, some that count for nothing."""
    made = []
    for update in range(UPDATES):
        fragments = []
        for group, num in enumerate((3, 9, 4, 6)):
            fragment = rollout(policy, seed=10 * update + group, version=update, N=num)
            fragment.version_TN[:, ::2] = max(0, update - 1)
            num_steps_TN = fragment.num_steps_TN.clone()
            num_steps_TN[0, :: 2 + group] = 0
            fragments.append(replace(fragment, group=group, num_steps_TN=num_steps_TN))
        made.append(fragments)
    return made


def train(algorithm: PPO, shares: Sequence[Sequence[Fragment]]) -> tuple[dict[str, Tensor], list[Metrics], Any]:
    metrics = [algorithm.update(share, version) for version, share in enumerate(shares)]
    deployed = algorithm.deployed
    state = {f"{kind}/{name}": value.clone() for kind, policy in (("now", algorithm.policy), ("kept", deployed))
             for name, value in policy.state_dict().items()}  # fmt: skip
    return state, metrics, algorithm.state_dict()


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "default": ("flow", 2, {"epochs": 2}),
    "stops at a KL, three processes": ("gaussian", 3, {"target_kl": 1e-4, "epochs": 4}),
    "each action, average": ("flow", 2, {"reduction": "action", "ema_decay": 0.9, "entropy_coef": 0.01, "epochs": 1}),
    "first the critic": ("gaussian", 2, {"critic_learning_rate": 1e-3, "critic_warmup": 1, "reference_kl_coef": 0.1}),
    "values in a unit": ("gaussian, scaled values", 2, {"epochs": 1}),
    "V-trace, masked": ("gaussian", 2, {"correction": "vtrace", "max_staleness": 0, "value_clip": 0.2}),
}
"""Policy, processes, options of PPO."""


def learn_together(name: str, size: int, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """States, metrics and optimisers of one process with all fragments, and of each of ``size`` processes."""
    policy = build(name)
    data = batches(policy)

    def algorithm() -> PPO:
        return PPO(copy.deepcopy(policy), PPOConfig(**options), seed=0, device=CPU)

    def share(learners: Collective) -> Any:
        shared = algorithm()
        shared.learners = learners
        return train(shared, [fragments[learners.rank :: size] for fragments in data])

    return train(algorithm(), data), together(size, share)


def assert_replicas(found: list[Any]) -> None:
    state, metrics, kept = found[0]
    for other_state, other_metrics, other_kept in found[1:]:
        assert all(torch.equal(state[key], other_state[key]) for key in state), "bit for bit"
        assert other_metrics == metrics
        torch.testing.assert_close(other_kept["optimizer"], kept["optimizer"], rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_processes_with_fragments_of_other_sizes_have_the_same_bits(case: str) -> None:
    _, found = learn_together(*CASES[case])
    assert_replicas(found)
    assert found[0][1][-1]["train/grad_norm"] > 0


def test_more_minibatches_than_a_process_has_decisions_are_as_many_as_it_has() -> None:
    _, found = learn_together("gaussian", 2, {"num_minibatches": 60, "epochs": 1})
    assert_replicas(found)


@pytest.mark.parametrize("case", CASES)
def test_with_one_minibatch_several_processes_take_the_steps_of_one(case: str) -> None:
    """The minibatch is then the whole batch: gradients, KL, advantages, masks and normaliser must be those of all."""
    name, size, options = CASES[case]
    (expected, one_by_one, _), found = learn_together(name, size, {**options, "num_minibatches": 1})
    torch.testing.assert_close(found[0][0], expected, rtol=1e-5, atol=1e-6)
    averaged = ("async/ess", "train/explained_variance", "train/ratio_first")  # of each process's own decisions
    for found_row, row in zip(found[0][1], one_by_one, strict=True):
        assert {key: found_row[key] for key in row if key not in averaged} == pytest.approx(
            {key: row[key] for key in row if key not in averaged}, rel=1e-3, abs=1e-5
        )
        assert found_row["train/epochs"] == row["train/epochs"]
        assert set(found_row) == set(row)


def test_groups_that_are_compared_stay_in_one_process() -> None:
    policy = build("gaussian")
    fragments = [replace(rollout(policy, seed=group, version=0, N=4), group=group) for group in range(4)]

    def algorithm() -> GRPO:
        return GRPO(copy.deepcopy(policy), GRPOConfig(group_size=4, num_minibatches=1), seed=0, device=CPU)

    def share(learners: Collective) -> Any:
        shared = algorithm()
        shared.learners = learners
        return train(shared, [fragments[learners.rank :: 2]])

    expected, _, _ = train(algorithm(), [fragments])
    for state, metrics, _ in together(2, share):
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
        assert metrics[0]["train/policy_loss"] != 0


@pytest.mark.parametrize("masked", [1, 2])
def test_a_process_without_a_decision_that_counts_makes_the_same_sums(masked: int) -> None:
    """If no process has one, no weight changes."""
    policy = build("gaussian")
    fragments = [replace(rollout(policy, seed=group, version=0), group=group) for group in range(2)]
    for fragment in fragments[:masked]:
        fragment.num_steps_TN.zero_()

    def share(learners: Collective) -> Any:
        shared = PPO(copy.deepcopy(policy), PPOConfig(), seed=0, device=CPU)
        shared.learners = learners
        return train(shared, [fragments[learners.rank :: 2]])

    found = together(2, share)
    assert_replicas(found)
    trained = [name for name, _ in policy.named_parameters()]  # type: ignore[attr-defined]
    changed = any(not torch.equal(found[0][0][f"now/{name}"], policy.state_dict()[name]) for name in trained)
    assert changed == (masked == 1)


def test_learners_count_together_and_notice_other_weights() -> None:
    policy = build("gaussian")
    fragments = [replace(rollout(policy, seed=group, version=0), group=group) for group in range(3)]

    def learn(learners: Collective) -> int:
        own = copy.deepcopy(policy)
        algorithm = PPO(own, PPOConfig(epochs=1), seed=0, device=CPU)
        learner = Learner(algorithm, WeightStore(), learners=learners)
        learner.learn(fragments[learners.rank :: 2])
        env_steps = learner.env_steps
        algorithm.optimizer.param_groups[0]["lr"] *= 1 + learners.rank  # whatever makes them differ
        with pytest.raises(RuntimeError, match="different weights after update 1"):
            learner.learn(fragments[learners.rank :: 2])
        return env_steps

    found = together(2, learn)
    assert found == 2 * [sum(fragment.num_env_steps for fragment in fragments)]


def test_a_process_that_takes_no_part_is_noticed() -> None:
    def work(learners: Collective) -> None:
        assert learners.sum(torch.tensor([learners.rank, 7])).tolist() == [1, 14]
        if learners.rank == 0:
            with pytest.raises(PeerLost, match="process 0 of 2"):
                learners.sum(torch.ones(1))

    together(2, work)


def test_an_algorithm_that_cannot_share_an_update_is_refused() -> None:
    class Single(Algorithm):
        """An algorithm of one process."""

        policy = deployed = build("gaussian")

        def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
            return {}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            pass

    class Two:
        rank, size = 0, 2

        def sum(self, tensor: Tensor) -> Tensor:
            return tensor

    with pytest.raises(UserError, match=r"num_learners=2: Single .* allowed: 1"):
        Learner(Single(), WeightStore(), learners=Two())
