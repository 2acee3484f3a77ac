"""Batches in the order of arrival: a slow env group holds up nothing, and what is too old is masked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from embodied.algos import returns
from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.algorithm import Metrics
from embodied.core.policy import Policy
from embodied.core.types import Fragment
from embodied.runtime.channel import Channel
from embodied.runtime.learner import mask_before
from embodied.runtime.ledger import Ticket
from tests.runtime.builders import build
from tests.runtime.point_env import PointEnv
from tests.runtime.test_env_worker import N, make_server, make_worker, sample
from tests.runtime.test_ledger import fragment_of

HELD = 4
"""Updates during which the slow group holds its first fragment."""


def test_a_batch_is_the_oldest_fragments_that_are_there() -> None:
    channel = Channel(2, max_staleness=1, order="arrival")
    for number, worker in ((3, 0), (1, 2), (2, 1)):
        assert channel.has(0) == (len(channel) >= 2)
        channel.put(fragment_of(Ticket(number, worker, 0, 0)))
    assert [fragment.sequence for fragment in channel.take(0)] == [2, 1], "sorted by worker, whatever came first"
    assert not channel.has(1)
    channel.put(fragment_of(Ticket(0, 0, 0, 0)))
    assert [fragment.sequence for fragment in channel.take(1)] == [0, 3]


@pytest.mark.parametrize(("versions", "kept"), [("2222333", 0), ("1122233", 2), ("1111111", 7), ("2122233", 2)])
def test_masking_leaves_the_rest_of_a_fragment_as_it_is(versions: str, kept: int) -> None:
    """kept: first decision that counts. Its advantage is the same, and no transition is of a decision before it."""
    server, _ = make_server()
    fragment = sample(make_worker(server), server, 0)
    fragment.version_TN[:] = torch.tensor([*map(int, versions)])[:, None]
    masked = mask_before(fragment, 2)
    assert torch.equal(masked.num_steps_TN[kept:], fragment.num_steps_TN[kept:])
    assert not masked.num_steps_TN[:kept].any()
    for whole, rest in zip(returns.gae(fragment, 0.9, 0.8), returns.gae(masked, 0.9, 0.8), strict=True):
        assert torch.equal(whole[kept:], rest[kept:])
    assert torch.equal(masked.transitions().obs["state"], fragment.transitions().obs["state"][kept * N :])


def test_an_env_with_older_weights_masks_no_other_one() -> None:
    """As where envs are not stepped together: one of them has made all its decisions by older weights."""
    server, _ = make_server()
    fragment = sample(make_worker(server), server, 0)
    fragment.version_TN[:] = 2
    fragment.version_TN[:, 0], fragment.version_TN[1, 1] = 1, 1
    masked = mask_before(fragment, 2)
    assert not masked.num_steps_TN[:, 0].any()
    assert not masked.num_steps_TN[:2, 1].any()
    assert torch.equal(masked.num_steps_TN[2:, 1:], fragment.num_steps_TN[2:, 1:])
    assert torch.equal(masked.num_steps_TN[:, 2:], fragment.num_steps_TN[:, 2:])


class Recording(PPO):
    """Remembers of each batch its workers, and the control steps and the greatest age of the decisions that count."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, PPOConfig(epochs=1), seed=0, device=torch.device("cpu"))
        self.workers: list[set[int]] = []
        self.ages: list[int] = []
        self.env_steps = 0
        self.updates = threading.Condition()

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        counting = [version - f.version_TN[f.num_steps_TN > 0] for f in fragments]
        self.ages.append(max((int(age.max()) for age in counting if len(age)), default=0))
        self.workers.append({f.worker for f in fragments})
        self.env_steps += sum(f.num_env_steps for f in fragments)
        metrics = super().update(fragments, version)
        with self.updates:
            self.updates.notify_all()
        return metrics


class TailedEnv(PointEnv):
    """Its steps take lognormal times. ``hold`` is called in the second one."""

    def __init__(self, num_envs: int, hold: Any, seed: int) -> None:
        super().__init__(num_envs)
        self.hold, self.steps, self.rng = hold, 0, np.random.default_rng(seed)

    def step(self, action: torch.Tensor) -> Any:
        self.steps += 1
        time.sleep(0.0005 * self.rng.lognormal(sigma=1.0))
        if self.steps == 2:
            self.hold()
        return super().step(action)


def test_a_slow_group_holds_up_no_batch_and_is_masked_where_it_is_too_old() -> None:
    """One group cannot go on before there were ``HELD`` batches without it, which order=ticket could never make."""
    algorithm: list[Recording] = []
    envs: list[TailedEnv] = []

    def make_algorithm(policy: Policy) -> Recording:
        algorithm.append(Recording(policy))
        return algorithm[0]

    def hold() -> None:
        with algorithm[0].updates:
            assert algorithm[0].updates.wait_for(lambda: len(algorithm[0].ages) >= HELD, timeout=60)

    def make_env(num_envs: int, num_threads: int) -> TailedEnv:
        envs.append(TailedEnv(num_envs, (lambda: None) if envs else hold, len(envs)))
        return envs[-1]

    options = {"name": "local", "groups_per_worker": 1, "num_env_workers": 4, "max_staleness": 1, "order": "arrival"}
    with build(make_env, make_algorithm, **options) as runtime:
        for iteration in runtime.iterations():
            assert iteration.metrics["async/staleness_max"] == algorithm[0].ages[-1] <= 1
            if 0 in algorithm[0].workers[-1]:
                break
        assert iteration.index > HELD
        assert iteration.metrics["async/dropped"] >= 2 * 3, "two decisions of three envs are older than that"
        assert runtime.env_steps == algorithm[0].env_steps, "control steps of masked decisions are not counted"
