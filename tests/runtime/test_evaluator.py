"""Evaluation: one whole episode per env, from states that the seed alone decides."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeSampler, EpisodeStats
from embodied.core.execution import plan_noise
from embodied.core.policy import Policy
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import SUCCESS, Instruction
from embodied.core.statistics import wilson_interval
from embodied.core.types import Obs, Timestep
from embodied.envs.episodes.sampler import first_episodes
from embodied.runtime.config import EvalNoise, RuntimeConfig
from embodied.runtime.evaluator import Evaluator, evaluate, summary
from embodied.runtime.threads import ThreadGroup
from tests.runtime.builders import make_policy
from tests.runtime.point_env import PointEnv, point_sampler, point_spec


def plans(episodes: int, seed: int) -> EpisodePlans:
    return first_episodes(PointEnv(1).spec, episodes, first_env_seed(Purpose.EVALUATION, seed))


class WatchedEnv(PointEnv):
    """Counts steps, and keeps what it reported."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.steps: list[Timestep] = []
        self.first: Obs = {}

    def reset(self, sampler: EpisodeSampler) -> Obs:
        self.first = super().reset(sampler)
        return self.first

    def step(self, action: Tensor) -> Timestep:
        self.steps.append(super().step(action))
        return self.steps[-1]


class SixThings(VecEnv):
    """A user's environment with nothing optional: spec, num_envs, device, reset, step and close."""

    def __init__(self, num_envs: int) -> None:
        self.inner = PointEnv(num_envs)
        self.spec, self.num_envs, self.device = self.inner.spec, num_envs, self.inner.device

    def reset(self, sampler: EpisodeSampler) -> Obs:
        return self.inner.reset(sampler)

    def step(self, action: Tensor) -> Timestep:
        return self.inner.step(action)

    def close(self) -> None:
        self.inner.close()


def test_an_env_that_keeps_no_plans_is_evaluated_as_one_that_does() -> None:
    policy = make_policy(PointEnv(1).spec)
    results = [evaluate(policy, env, plans(9, 4), seed=4, noise="seeded") for env in (SixThings(3), PointEnv(3))]
    assert results[0] == results[1]
    assert SixThings(3).instruction_texts == [""] * 3


def test_each_env_counts_its_first_episode_only() -> None:
    env = WatchedEnv(9)
    policy = make_policy(env.spec)
    with torch.no_grad():  # some leave the square early and begin a second episode
        policy.actor[-1].bias.fill_(1.0)
    result = evaluate(policy, env, plans(9, 4), seed=4)
    first: dict[int, tuple[float, int, bool]] = {}
    for step in env.steps:
        stats = step.episodes
        for row, env_id in enumerate(stats.env_id_M.tolist()):
            row_of = float(stats.return_M[row]), int(stats.length_M[row]), bool(stats.success_at_end_M[row])
            first.setdefault(env_id, row_of)
    assert len({length for _, length, _ in first.values()}) > 1, "the test must see episodes of different length"
    assert result["episodes"] == len(first) == 9
    assert result["return_mean"] == pytest.approx(sum(row[0] for row in first.values()) / 9, rel=1e-5)
    assert result["episode_length_mean"] == pytest.approx(sum(row[1] for row in first.values()) / 9, rel=1e-5)
    assert result["success_at_end"] == sum(row[2] for row in first.values()) / 9
    assert result["task"] == "point"
    assert result["seed"] == 4


@pytest.mark.parametrize("noise", ["zero", "seeded"])
@pytest.mark.parametrize("num_envs", [1, 4, 9])
def test_any_number_of_envs_runs_the_same_episodes(num_envs: int, noise: EvalNoise) -> None:
    """Nine episodes, some short: each is run once and to its end, whichever env is free."""
    policy = make_policy(PointEnv(1).spec)
    with torch.no_grad():
        policy.actor[-1].bias.fill_(1.0)
    env = WatchedEnv(num_envs)
    shares: list[float] = []
    result = evaluate(policy, env, plans(9, 4), 4, noise, watch=shares.append)
    assert shares == sorted(shares), "progress never goes back"
    assert 0 < shares[0] < shares[-1] == 1
    reference = evaluate(policy, PointEnv(9), plans(9, 4), 4, noise)
    assert result["noise"] == noise
    for key in ("task", "noise", "success_at_end_ci95"):
        assert result.pop(key) == reference.pop(key)
    assert result == pytest.approx(reference, rel=1e-6)
    ran = [seed for step in env.steps for seed in step.episodes.counted().plans.seed_n.tolist()]
    assert sorted(ran) == plans(9, 4).seed_n.tolist()


def test_noise_is_a_function_of_plan_and_decision() -> None:
    run = plans(64, 3)
    run.number_n[32:] = 1
    run.seed_n[32:] = run.seed_n[:32]
    decision_n = np.full(64, 5)
    noise = plan_noise(run, decision_n, (4, 3))
    order = np.random.default_rng(0).permutation(64)
    assert torch.equal(plan_noise(run.rows(order), decision_n, (4, 3)), noise[torch.from_numpy(order)])
    rows = torch.cat([noise, plan_noise(run, decision_n + 1, (4, 3))]).flatten(1)
    assert len(rows.unique(dim=0)) == 128, "other episodes, episode numbers and decisions have other noise"
    assert abs(float(rows.mean())) < 4 / rows.numel() ** 0.5
    assert float(rows.std()) == pytest.approx(1.0, abs=0.05)


class TwoWays(Policy):
    """A flow to -1 or +1, as a policy learns it from demonstrations of both: the sign of the noise decides."""

    horizon = execute = 2
    plan_noise_shape = (2, 2)

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        chosen = torch.zeros(len(obs["state"]), 2, 2) if noise is None else noise
        return chosen.sign()


def test_with_noise_zero_a_policy_of_two_ways_takes_neither() -> None:
    drawn: dict[str, Tensor] = {}
    for noise in ("zero", "seeded"):
        actions: list[Tensor] = []

        class Recorded(PointEnv):
            def step(self, action: Tensor, seen: list[Tensor] = actions) -> Timestep:
                seen.append(action.clone())
                return super().step(action)

        evaluate(TwoWays(), Recorded(8), plans(8, 0), 0, noise)  # type: ignore[arg-type]
        drawn[noise] = torch.cat(actions)
    assert (drawn["zero"] == 0).all()
    assert set(drawn["seeded"].flatten().tolist()) == {-1.0, 1.0}
    assert abs(float(drawn["seeded"].mean())) < 0.2


def test_splits_and_goals_are_counted_apart() -> None:
    spec = replace(
        PointEnv(1).spec,
        instructions=(
            Instruction("a1", "a"), Instruction("a2", "a"), Instruction("b", "b"), Instruction("c", "c", "held_out"),
        ),
    )  # fmt: skip
    run, solved = plans(6, 0), torch.tensor([True, False, True, True, False, False])
    run.instruction_n[:] = [0, 1, 1, 2, 3, 3]
    once, at_end = {SUCCESS: torch.ones(6).bool()}, {SUCCESS: solved}
    stats = EpisodeStats(torch.arange(6), torch.ones(6), torch.full((6,), 5), run, once, at_end)
    result = summary(stats, spec, seed=0)
    assert (result["episodes"], result["success_at_end"], result["success_once"]) == (6, 0.5, 1.0)
    assert list(result["splits"]) == ["train", "held_out"]
    train, held_out = result["splits"].values()
    assert (train["episodes"], train["success_at_end"]) == (4, 0.75)
    assert (held_out["episodes"], held_out["success_at_end"], held_out["success_once"]) == (2, 0.0, 1.0)
    assert train["success_at_end_ci95"] == list(wilson_interval(3, 4))
    assert {goal: (row["episodes"], row["success_at_end"]) for goal, row in train["goals"].items()} == {
        "a": (3, 2 / 3), "b": (1, 1.0),
    }  # fmt: skip
    assert list(held_out["goals"]) == ["c"]
    assert "splits" not in summary(stats, PointEnv(1).spec, seed=0)


def test_depends_on_the_seed_alone() -> None:
    policy = make_policy(PointEnv(1).spec)
    used = PointEnv(6)
    used.reset(point_sampler(used.spec, 6, 77))
    used.step(torch.ones(6, 2, 2))
    cases = (PointEnv(6), 1), (used, 1), (PointEnv(6), 2)
    results = [evaluate(policy, env, plans(6, seed), seed) for env, seed in cases]
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_two_seeds_share_no_initial_state() -> None:
    def starts(seed: int) -> set[tuple[float, ...]]:
        env = WatchedEnv(6)
        evaluate(make_policy(env.spec), env, plans(6, seed), seed)
        return {tuple(row) for row in env.first["state"].tolist()}

    assert len(starts(1) | starts(2)) == 12


def test_actions_are_clipped_as_in_training() -> None:
    class Strict(PointEnv):
        def step(self, action: torch.Tensor) -> Timestep:
            assert bool((action.abs() <= 1).all())
            return super().step(action)

    policy = make_policy(PointEnv(1).spec)
    with torch.no_grad():
        policy.actor[-1].bias.fill_(3.0)
    assert evaluate(policy, Strict(4), plans(4, 0), seed=0)["episodes"] == 4


def test_an_evaluation_of_lost_weights_is_dropped_and_the_next_one_counts_from_the_last_that_stays() -> None:
    spec = point_spec()
    policy = make_policy(spec)
    group, config = ThreadGroup(0.0, lambda: None), RuntimeConfig(eval_every=2, eval_episodes=2)
    background = Evaluator(policy, lambda: PointEnv(2), partial(first_episodes, spec), config, group=group)

    def weights() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in policy.state_dict().items()}

    assert background.poll(weights, 9, 90, group.stopping) is None
    background.forget(4)
    while background.busy:
        time.sleep(0.01)
    assert background.poll(weights, 5, 50, group.stopping) is None, "it was of iteration 9"
    assert background.last_iteration == 4
    assert background.poll(weights, 6, 60, group.stopping) is None
    while background.busy:
        time.sleep(0.01)
    result = background.poll(weights, 7, 70, group.stopping)
    assert result is not None
    assert (result["iteration"], result["env_steps"]) == (6, 60)
    assert background.poll(weights, 8, 80, group.stopping) is None
    assert background.evaluated_at == 6, "a run that ends now makes the evaluation of iteration 8 when it is resumed"
    group.join()
    background.close()
