"""Decisions that take effect after a delay: what is executed, what is observed, and what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.core.episodes import PlanList
from embodied.core.execution import clip_chunk
from embodied.core.spec import Discrete
from embodied.core.types import Obs, Timestep
from embodied.envs.base.actions import random_actions
from embodied.envs.base.delayed import DelayedEnv
from embodied.envs.base.episodic import Advance
from embodied.envs.checks.conformance import check_env
from embodied.envs.episodes.sampler import first_episodes
from embodied.envs.episodes.seeding import EpisodeRng
from tests.envs.helpers import pool
from tests.runtime.point_env import PointEnv, point_sampler, point_spec

N, E, D, H = 6, 3, 2, 6


class Recording(PointEnv):
    """Keeps the actions that were executed."""

    def __init__(self, num_envs: int, max_episode_steps: int = 200) -> None:
        super().__init__(num_envs, max_episode_steps)
        self.executed: list[Tensor] = []

    def advance(self, action_NA: Tensor, ids: Any) -> Advance:
        self.executed.append(action_NA.clone())
        return super().advance(0.01 * action_NA, ids)


def build(delay: int | None = None, steps: int = 200, max_delay: int = D) -> tuple[DelayedEnv, Recording]:
    inner = Recording(N, steps)
    return DelayedEnv(inner, E, max_delay, delay), inner


def run(env: DelayedEnv, decisions: int, rows: int = H) -> tuple[list[Obs], list[Tensor], list[Timestep]]:
    """Observations of decisions, and random chunks that do not repeat the prefix."""
    seen = [env.reset(PlanList(first_episodes(env.spec, N, 5), N))]
    chunks = [1.4 * random_actions(env.spec.action, N, rows, seed) for seed in range(decisions)]
    steps = []
    for chunk in chunks:
        steps.append(env.step(chunk))
        seen.append(steps[-1].obs)
    return seen, chunks, steps


@pytest.mark.parametrize("delay", [None, 0, 1, 2])
def test_the_prefix_is_executed_and_then_the_chunk_from_row_d(delay: int | None) -> None:
    env, inner = build(delay)
    seen, chunks, steps = run(env, 12)
    executed = torch.stack(inner.executed, 1).view(N, 12, E, 2)
    for k, (obs, chunk, step) in enumerate(zip(seen, chunks, steps, strict=False)):
        assert step.reward_NE.shape == (N, E)
        assert (step.num_steps_N == E).all()
        for n in range(N):
            d = int(obs["delay"][n])
            assert torch.equal(executed[n, k, :d], obs["prefix"][n, :d])
            assert torch.equal(executed[n, k, d:], chunk[n, d:E].clamp(-1, 1))
            assert not obs["prefix"][n, d:].any()
            if k:  # what was left of the chunk before
                assert torch.equal(obs["prefix"][n, :d], chunks[k - 1][n, E : E + d].clamp(-1, 1))
    delays = torch.stack([obs["delay"] for obs in seen], 1)
    assert not delays[:, 0].any(), "at first the robot waits"
    assert set(delays[:, 1:].unique().tolist()) == ({0, 1, 2} if delay is None else {delay})


def test_a_later_decision_never_changes_what_was_executed() -> None:
    """Two runs with the same chunks up to decision 5: the same up to there, and the prefix of decision 5 as well."""
    (first, inner), (second, other) = build(), build()
    seen, chunks, _ = run(first, 8)
    again = [second.reset(PlanList(first_episodes(second.spec, N, 5), N))]
    for k, chunk in enumerate(chunks):
        again.append(second.step(chunk if k < 5 else -chunk).obs)
    ours, theirs = (torch.stack(env.executed, 1).view(N, 8, E, 2) for env in (inner, other))
    assert torch.equal(ours[:, :5], theirs[:, :5])
    d = seen[5]["delay"]
    assert d.any()
    given = torch.arange(E) < d[:, None]
    assert torch.equal(ours[:, 5][given], theirs[:, 5][given])
    assert not (ours[:, 5] == theirs[:, 5])[~given].any()
    assert all(torch.equal(a["delay"], b["delay"]) for a, b in zip(seen, again, strict=True)), "delays are the plan's"


def test_a_chunk_without_later_rows_repeats_its_last_action() -> None:
    env, inner = build(delay=2, max_delay=2)
    seen, chunks, _ = run(env, 6, rows=E)
    executed = torch.stack(inner.executed, 1).view(N, 6, E, 2)
    for k in range(1, 6):
        last = chunks[k - 1][:, -1:].clamp(-1, 1)
        assert torch.equal(seen[k]["prefix"], last.expand(-1, 2, -1))
        assert torch.equal(executed[:, k, :2], last.expand(-1, 2, -1))
        assert torch.equal(executed[:, k, 2:], chunks[k][:, 2:].clamp(-1, 1))


@pytest.mark.parametrize("rows", [1, E])
def test_a_delay_as_long_as_the_chunk_executes_the_chunk_before(rows: int) -> None:
    env, inner = build(delay=E, max_delay=E)
    seen, chunks, _ = run(env, 6, rows=rows)
    executed = torch.stack(inner.executed, 1).view(N, 6, E, 2)
    for k in range(1, 6):
        last = chunks[k - 1][:, -1:].clamp(-1, 1).expand(-1, E, -1)
        assert torch.equal(seen[k]["prefix"], last)
        assert torch.equal(executed[:, k], last)


def test_delays_are_uniform_and_numbers_of_their_episode() -> None:
    rng = EpisodeRng(np.arange(50), np.arange(50) * 3)
    index = np.arange(50) % 7
    np.testing.assert_array_equal(rng.numbers("delay", index), rng.unit("delay", 7)[np.arange(50), index])
    env = DelayedEnv(PointEnv(3000), 4, 4)
    plans = first_episodes(env.spec, 3000, 0)
    counts = np.bincount(env._drawn(plans, np.full(3000, 9)).numpy(), minlength=5)
    assert (abs(counts - 600) < 5 * np.sqrt(3000 * 0.2 * 0.8)).all()


def test_the_last_observation_of_an_episode_has_the_prefix_that_would_have_been_next() -> None:
    env, _ = build(steps=7)  # ends after one step of the third decision
    _, chunks, steps = run(env, 3)
    last = steps[2]
    assert last.truncated_N.all()
    assert (last.num_steps_N == 1).all()
    assert not last.obs["delay"].any()
    assert not last.obs["prefix"].any()
    assert last.final_obs.keys() == last.obs.keys()
    expected = env._drawn(last.episodes.plans, np.full(N, 3))
    assert torch.equal(last.final_obs["delay"], expected)
    assert expected.any()
    executed = torch.where(
        (torch.arange(D) < steps[1].obs["delay"][:, None])[..., None], steps[1].obs["prefix"], chunks[2][:, :D]
    )
    committed = torch.cat([executed, chunks[2][:, D:]], 1).clamp(-1, 1)
    for n, d in enumerate(expected.tolist()):
        assert torch.equal(last.final_obs["prefix"][n, :d], committed[n, 1 : 1 + d])
        assert not last.final_obs["prefix"][n, d:].any()


@pytest.mark.parametrize(("limits", "delay"), [((2, 1), None), ((2, 2), None), ((3, 3), None), ((4, 4), 3)])
def test_it_conforms(limits: tuple[int, int], delay: int | None) -> None:
    check_env(lambda num_envs: DelayedEnv(PointEnv(num_envs, max_episode_steps=7), *limits, delay))


def test_our_pool_conforms_with_delays() -> None:
    check_env(lambda num_envs: DelayedEnv(pool("lift", num_envs, max_episode_steps=5), 2, 2))


def test_it_can_what_the_wrapped_env_can() -> None:
    class Plain(PointEnv):
        resumes_exactly = False

    inner = pool("reach", 2)
    able, plain = DelayedEnv(inner, E, D), DelayedEnv(Plain(2), E, D)
    assert able.resumes_exactly
    assert (plain.resumes_exactly, plain.film, plain.film_quickly, plain.expert) == (False, None, None, None)
    calls: list[Any] = []
    able.on_control_step = calls.append
    able.reset(point_sampler(able.spec, 2, 0))
    able.step(torch.zeros(2, H, able.spec.action_dim))
    assert calls == [inner] * E
    assert able.instruction_texts == inner.instruction_texts
    assert torch.equal(able.expert(), inner.expert())
    assert able.film(16, 12)().shape == (2, 12, 16, 3)


def test_choices_keep_their_type() -> None:
    class Choosing(PointEnv):
        def advance(self, action_NA: Tensor, ids: Any) -> Advance:
            assert action_NA.dtype == torch.int64
            return super().advance(action_NA.float().expand(-1, 2) * 0.1, ids)

    inner = Choosing(N)
    inner.spec = PointEnv(1, spec=point_spec()).spec
    object.__setattr__(inner.spec, "action", Discrete(("a", "b", "c")))
    env = DelayedEnv(inner, E, D, delay=1)
    env.reset(PlanList(first_episodes(env.spec, N, 5), N))
    for seed in range(3):
        step = env.step(random_actions(env.spec.action, N, E, seed))
    assert step.obs["prefix"].dtype == torch.int64
    with pytest.raises(ValueError, match="needed integers"):
        env.step(torch.zeros(N, E, 1))


def test_chunks_are_handed_over_whole_and_executed_in_part() -> None:
    env, inner = build(delay=1)
    env.reset(PlanList(first_episodes(env.spec, N, 5), N))
    chunk = 2 * random_actions(env.spec.action, N, H, 0)
    action = clip_chunk(env, chunk, E)
    step = env.step(action)
    assert torch.equal(action[:, :E], chunk[:, :E].clamp(-1, 1))
    assert torch.equal(step.obs["prefix"][:, 0], chunk[:, E].clamp(-1, 1))
    inner.step(clip_chunk(inner, chunk, E))
    assert len(inner.executed) == 2 * E


@pytest.mark.parametrize("fault", ["shape", "nan", "reset"])
def test_bad_chunks_are_refused_whole(fault: str) -> None:
    env, inner = build()
    if fault != "reset":
        env.reset(PlanList(first_episodes(env.spec, N, 5), N))
    chunk = torch.zeros(N, H, 2)
    if fault == "nan":
        chunk[0, -1, 0] = torch.nan  # only executed in the next decision
    with pytest.raises(ValueError, match={"shape": "got shape", "nan": "NaN", "reset": "first reset"}[fault]):
        env.step(chunk[1:] if fault == "shape" else chunk)
    assert inner.executed == []
