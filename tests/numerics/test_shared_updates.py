"""An update that several learner processes make together is that of one process with all fragments.

The processes are threads here, whose sums are those of torch.distributed over gloo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algos.grpo import GRPO, GRPOConfig
from embodied.algos.ppo import PPO
from embodied.algos.ppo_config import PPOConfig
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.protocols import Metrics
from embodied.core.types import Fragment
from embodied.policies import POLICIES
from embodied.runtime.learner import Learner
from embodied.runtime.ray.collective import Collective, PeerLost, open_store
from embodied.runtime.weight_store import WeightStore
from tests.algos.fragments import SIZES, SPEC, rollout

CPU = torch.device("cpu")
UPDATES = 3
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def build(name: str) -> Policy:
    torch.manual_seed(0)
    entry = POLICIES[name]
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
            fragment = rollout(policy, seed=10 * update + group, version=max(0, update - group % 2), N=num)
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
    "V-trace, masked": ("gaussian", 2, {"correction": "vtrace", "max_staleness": 0, "value_clip": 0.2}),
    "minibatches of which a process has nothing": ("gaussian", 2, {"num_minibatches": 60, "epochs": 1}),
}
"""Policy, processes, options of PPO."""


@pytest.mark.parametrize("case", CASES)
def test_several_processes_take_the_steps_of_one(case: str) -> None:
    name, size, options = CASES[case]
    policy = build(name)
    data = batches(policy)

    def algorithm() -> PPO:
        return PPO(copy.deepcopy(policy), PPOConfig(**options), seed=0, device=CPU)

    expected, one_by_one, _ = train(algorithm(), data)

    def share(learners: Collective) -> Any:
        shared = algorithm()
        shared.learners = learners
        return train(shared, [fragments[learners.rank :: size] for fragments in data])

    found = together(size, share)
    state, metrics, kept = found[0]
    for other_state, other_metrics, other_kept in found[1:]:
        assert all(torch.equal(state[key], other_state[key]) for key in state), "bit for bit"
        assert other_metrics == metrics
        torch.testing.assert_close(other_kept, kept, rtol=0, atol=0)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    for found_row, row in zip(metrics, one_by_one, strict=True):
        assert found_row == pytest.approx(row, rel=1e-3, abs=1e-5)
        assert found_row["train/epochs"] == row["train/epochs"]
        assert found_row["train/learning_rate"] == row["train/learning_rate"]


def test_groups_that_are_compared_may_be_in_different_processes() -> None:
    policy = build("gaussian")
    fragments = [replace(rollout(policy, seed=group, version=0, N=2), group=group) for group in range(4)]

    def algorithm() -> GRPO:
        return GRPO(copy.deepcopy(policy), GRPOConfig(group_size=4), seed=0, device=CPU)

    def share(learners: Collective) -> Any:
        shared = algorithm()
        shared.learners = learners
        return train(shared, [fragments[learners.rank :: 2]])

    expected, _, _ = train(algorithm(), [fragments])
    for state, metrics, _ in together(2, share):
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
        assert metrics[0]["train/policy_loss"] != 0


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


def test_fragments_that_do_not_fit_together_are_refused_in_every_process() -> None:
    policy = build("gaussian")

    def learn(learners: Collective) -> None:
        algorithm = PPO(copy.deepcopy(policy), PPOConfig(), seed=0, device=CPU)
        algorithm.learners = learners
        with pytest.raises(ValueError, match=r"agree in T, got \[3, 4\]"):
            algorithm.update([rollout(policy, seed=0, version=0, T=3 + learners.rank)], 0)

    together(2, learn)


def test_a_process_that_takes_no_part_is_noticed() -> None:
    def work(learners: Collective) -> None:
        assert learners.sum(torch.tensor([learners.rank, 7])).tolist() == [1, 14]
        if learners.rank == 0:
            with pytest.raises(PeerLost, match="process 0 of 2"):
                learners.sum(torch.ones(1))

    together(2, work)


def test_an_algorithm_that_cannot_share_an_update_is_refused() -> None:
    class Single:
        """An algorithm of one process."""

        policy = deployed = build("gaussian")

    class Two:
        rank, size = 0, 2

        def sum(self, tensor: Tensor) -> Tensor:
            return tensor

    with pytest.raises(UserError, match=r"num_learners=2: Single .* allowed: 1"):
        Learner(Single(), WeightStore(), learners=Two())  # type: ignore[arg-type]
