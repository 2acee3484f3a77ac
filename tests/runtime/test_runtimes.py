"""Whole runs: sync and local agree, staleness is bounded, a resumed run is the run that never paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.algorithm import Metrics
from embodied.core.clock import running_s
from embodied.core.episodes import EpisodePlans, EpisodeSampler, EpisodeStats, PlanList
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.seeds import SEEDS
from embodied.core.spec import EnvSpec, Instruction
from embodied.core.types import Fragment, Obs
from embodied.policies.config import GaussianConfig
from embodied.policies.gaussian import GaussianPolicy
from embodied.runtime import checkpoint
from embodied.runtime.config import RuntimeConfig
from embodied.runtime.evaluator import rollout_metrics
from tests.runtime.builders import DECISIONS, NUM_ENVS, build, iterate, make_policy, runtime_threads
from tests.runtime.point_env import PointEnv, point_spec

LAYOUTS = [{"num_env_workers": 1, "groups_per_worker": 2}, {"num_env_workers": 2, "groups_per_worker": 2}]


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Nested states are equal bit by bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    """What does not depend on time, and what all runtimes have."""
    own = ("perf/", "time/", "queue/", "bytes/", "async/restarts", "async/env_workers", "async/lost")
    return {key: value for key, value in metrics.items() if not key.startswith(own)}


class RecordingPPO(PPO):
    """PPO that remembers how old the decisions of each batch were, and takes its time."""

    learn_s = 0.0

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        self.staleness = [*getattr(self, "staleness", []), *(version - fragment.version_TN for fragment in fragments)]
        time.sleep(self.learn_s)
        return super().update(fragments, version)


class SlowEnv(PointEnv):
    """One group far slower than the others."""

    step_s = 0.0

    def step(self, action: torch.Tensor) -> Any:
        time.sleep(self.step_s)
        return super().step(action)


class ToldEnv(PointEnv):
    """Has two goals."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        texts = Instruction("go", "go"), Instruction("put it there", "red cube -> left tray")
        self.spec = replace(self.spec, instructions=texts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_without_staleness_is_bit_identical_to_sync(layout: dict[str, int]) -> None:
    states, metrics = [], []
    for name in ("sync", "local"):
        with build(name=name, eval_every=2, **layout) as runtime:
            metrics.append([iteration.metrics for iteration in iterate(runtime, 6)])
            states.append(runtime.state_dict())
            assert states[-1]["runtime"].pop("evaluated_at") in range(2, 7)  # local evaluates when it is free
    assert_same(states[0], states[1])
    sync, local = ([timeless(row) for row in rows] for rows in metrics)
    assert sync == local


@pytest.mark.parametrize("name", ["sync", "local"])
def test_a_good_evaluation_is_confirmed_on_episodes_that_no_other_evaluation_has(name: str) -> None:
    drawn: list[frozenset[int]] = []

    class Watched(PointEnv):
        def reset(self, sampler: EpisodeSampler) -> Obs:
            assert isinstance(sampler, PlanList)
            drawn.append(frozenset(sampler.plans.seed_n.tolist()))
            return super().reset(sampler)

    with build(name=name, eval_every=2, make_eval_env=lambda n, _: Watched(n), confirm_at=0.0) as runtime:
        results = [i.evaluation for i in iterate(runtime, 30) if i.evaluation]
    assert len(results) >= 2
    assert [r["confirmation"]["seed"] for r in results] == [SEEDS + r["iteration"] for r in results]
    assert all(r["confirmation"]["episodes"] == 2 * r["episodes"] for r in results)
    fixed, fresh = drawn[::2], drawn[1::2]
    assert set(fixed) == {fixed[0]}
    assert fixed[0].isdisjoint(frozenset.union(*fresh))
    with build(name=name, eval_every=2, confirm_at=1.0) as runtime:
        results = [i.evaluation for i in iterate(runtime, 30) if i.evaluation]
    assert results
    assert not any("confirmation" in result for result in results), "it has not reached 100%"


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("bound_by", ["simulation", "learning"])
def test_staleness_never_exceeds_the_bound(max_staleness: int, bound_by: str) -> None:
    envs: list[SlowEnv] = []

    def make_env(num_envs: int, num_threads: int) -> SlowEnv:
        envs.append(SlowEnv(num_envs))
        if bound_by == "simulation":
            envs[-1].step_s = 0.01 if len(envs) == 1 else 0.0005
        return envs[-1]

    def make_algorithm(policy: Policy) -> RecordingPPO:
        algorithm = RecordingPPO(policy, PPOConfig(epochs=1), seed=0, device=torch.device("cpu"))
        algorithm.learn_s = 0.03 if bound_by == "learning" else 0.0
        return algorithm

    options = {"name": "local", "num_env_workers": 2, "groups_per_worker": 2, "max_staleness": max_staleness}
    with build(make_env, make_algorithm, **options) as runtime:
        iterations = iterate(runtime, 15)
        staleness = torch.cat([part.flatten() for part in runtime.learner.algorithm.staleness])  # type: ignore[attr-defined]
    assert staleness.min() >= 0
    assert staleness.max() <= max_staleness
    if bound_by == "learning":
        assert staleness.max() >= 1, "workers must run ahead of a slow learner"
    assert max(iteration.metrics["async/staleness_max"] for iteration in iterations) <= max_staleness


@pytest.mark.parametrize(("name", "max_staleness"), [("sync", 0), ("local", 0), ("local", 1)])
def test_iterations_count_and_end_where_they_should(name: str, max_staleness: int) -> None:
    with build(name=name, max_staleness=max_staleness) as runtime:
        done = list(runtime.iterations(max_env_steps=500))
        assert [iteration.index for iteration in done] == list(range(1, len(done) + 1))
        assert done[-2].env_steps < 500 <= done[-1].env_steps == runtime.env_steps
        assert runtime.iteration == done[-1].index
        assert list(runtime.iterations(max_env_steps=500)) == []
        assert list(runtime.iterations(deadline_s=running_s())) == []
        more = iterate(runtime, 2)
        assert more[-1].index == done[-1].index + 2
        for key in ("perf/env_steps_per_s", "perf/sim_s", "perf/infer_s", "perf/learn_s", "perf/wait_s",
                    "rollout/return_mean", "rollout/success_once", "rollout/success_at_end",
                    "rollout/episode_length_mean", "train/policy_loss", "async/staleness_mean"):  # fmt: skip
            assert torch.isfinite(torch.tensor(more[-1].metrics[key])), key
    assert runtime_threads() == []


def test_success_of_a_goal_is_that_of_its_last_episodes() -> None:
    goals = {"rollout/goals/go/success_at_end": 0, "rollout/goals/red_cube_left_tray/success_at_end": 1}
    expected: dict[str, float] = {}
    with build(lambda num_envs, _: ToldEnv(num_envs), num_envs=3) as runtime:
        done = iterate(runtime, 12)
    for iteration in done:
        episodes = iteration.episodes
        for key, told in goals.items():
            own = (episodes.plans.stage_n == 0) & (episodes.plans.time_limit_n == runtime.spec.max_episode_steps)
            ran = torch.from_numpy(own & (episodes.plans.instruction_n == told))
            solved = episodes.success_at_end_M[ran] if len(episodes) else ran
            if len(solved):
                expected[key] = float(solved.float().mean())
        assert {key: value for key, value in iteration.metrics.items() if "goals" in key} == pytest.approx(expected)
    assert set(expected) == set(goals)
    assert any(len(iteration.episodes.env_id_M) == 0 for iteration in done), "the test must see values that are kept"
    assert not [key for key in rollout_metrics(done[-1].episodes, PointEnv(1).spec) if "goals" in key]


def test_rollout_metrics_are_of_the_tasks_own_starts() -> None:
    """Episodes that began in the hand, or with less time, succeed at another rate. They are reported apart."""
    plans = EpisodePlans.empty(5)
    plans.time_limit_n[:] = [20, 20, 20, 20, 7]
    plans.stage_n[:] = [0, 1, 0, 1, 0]
    solved = torch.tensor([False, True, True, True, False])
    returns = torch.tensor([1.0, 10.0, 3.0, 20.0, 30.0])
    episodes = EpisodeStats(torch.arange(5), returns, torch.tensor([20, 20, 20, 20, 7]), plans, {"success": solved},
                            {"success": solved})  # fmt: skip
    metrics = rollout_metrics(episodes, point_spec())
    assert metrics["rollout/success_at_end"] == 0.5
    assert metrics["rollout/return_mean"] == 2.0
    assert metrics["rollout/other_starts/success_at_end"] == pytest.approx(2 / 3)
    assert metrics["rollout/other_starts/return_mean"] == 20.0
    assert metrics["rollout/other_starts/episode_length_mean"] == pytest.approx(47 / 3)
    others = rollout_metrics(episodes.rows(torch.tensor([1, 3])), point_spec())
    assert {key.rpartition("/")[0] for key in others} == {"rollout/other_starts"}
    assert rollout_metrics(episodes.rows(torch.zeros(5, dtype=torch.bool)), point_spec()) == {}


def test_env_steps_are_the_control_steps_really_executed() -> None:
    with build(name="sync") as runtime:
        done = iterate(runtime, 5)
        executed = sum(int(iteration.episodes.length_M.sum()) for iteration in done)
        assert 0 < runtime.env_steps <= 5 * NUM_ENVS * DECISIONS * 2
        assert executed > 0


class Dropping(GaussianPolicy):
    """A policy with dropout, which takes its numbers from torch's global generator."""

    def mean(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().mean(torch.dropout(inputs, 0.3, self.training))


def make_dropping(spec: EnvSpec) -> Dropping:
    return Dropping(spec, GaussianConfig(horizon=3, execute=2, actor_hidden=(16,), critic_hidden=(16,)))


@pytest.mark.parametrize("make_policy", [make_policy, make_dropping])
@pytest.mark.parametrize("name", ["sync", "local"])
def test_resume_continues_bit_by_bit(name: str, make_policy: Callable[[EnvSpec], Policy], tmp_path: Path) -> None:
    with build(name=name, make_policy=make_policy) as runtime:
        iterate(runtime, 3)
        checkpoint.save(tmp_path, runtime.env_steps, runtime.state_dict())
        straight = iterate(runtime, 3)
        expected = runtime.state_dict()
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    with build(name=name, make_policy=make_policy) as runtime:
        runtime.load_state_dict(found.state)
        resumed = iterate(runtime, 3)
        assert_same(runtime.state_dict(), expected)
    del found.state["runtime"]["generator"]
    with build(name=name, make_policy=make_policy) as runtime:
        runtime.load_state_dict(found.state)  # of an earlier version
        assert runtime.iteration == 3
    assert [i.index for i in resumed] == [i.index for i in straight] == [4, 5, 6]
    assert [i.env_steps for i in resumed] == [i.env_steps for i in straight]


def test_a_state_of_sync_goes_on_in_local_and_back() -> None:
    with build(name="sync") as runtime:
        iterate(runtime, 4)
        expected = runtime.state_dict()
    state = None
    for name in ("sync", "local", "sync", "local"):
        with build(name=name) as runtime:
            if state is not None:
                runtime.load_state_dict(state)
            iterate(runtime, 1)
            state = runtime.state_dict()
    assert_same(state, expected)


@pytest.mark.parametrize("order", ["ticket", "arrival"])
def test_asynchronous_state_is_taken_while_the_run_goes_on(order: str) -> None:
    options = {"name": "local", "max_staleness": 2, "num_env_workers": 2, "order": order}
    with build(**options) as runtime:
        iterate(runtime, 3)
        state = runtime.state_dict()
        assert iterate(runtime, 3)[-1].index == 6
    with build(**options) as runtime:
        runtime.load_state_dict(state)
        assert runtime.env_steps == state["runtime"]["counters"]["env_steps"]
        assert [iteration.index for iteration in iterate(runtime, 4)] == [4, 5, 6, 7]


def test_stop_event_from_another_thread_ends_the_run_without_leftovers() -> None:
    stop = threading.Event()
    with build(name="local", max_staleness=1, num_env_workers=2, eval_every=1) as runtime:
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        done = list(runtime.iterations(stop_event=stop))
        assert done
        assert runtime.state_dict()["runtime"]["counters"]["iteration"] == runtime.iteration
        assert runtime_threads() != []
    assert runtime_threads() == []
    assert all(rollout.env.closed for worker in runtime.workers for rollout in worker.rollouts)  # type: ignore[attr-defined]


def test_close_without_a_single_iteration_and_twice() -> None:
    for name in ("sync", "local"):
        runtime = build(name=name)
        runtime.close()
        runtime.close()
        assert runtime_threads() == []


@pytest.mark.parametrize(("name", "max_staleness"), [("sync", 0), ("local", 1)])
def test_evaluation_goes_on_during_training(name: str, max_staleness: int) -> None:
    with build(name=name, max_staleness=max_staleness, eval_every=2) as runtime:
        results = []
        deadline_s = running_s() + 20
        for iteration in runtime.iterations(deadline_s=deadline_s):
            if iteration.evaluation is not None:
                results.append(iteration.evaluation)
            if len(results) == 2:
                break
    first, second = results
    assert first["iteration"] >= 2
    assert second["iteration"] >= first["iteration"] + 2
    assert first["episodes"] == 5
    assert first["env_steps"] < second["env_steps"]
    assert 0 <= first["success_at_end_ci95"][0] <= first["success_at_end"] <= first["success_at_end_ci95"][1] <= 1


def test_uneven_groups_and_fewer_envs_than_groups() -> None:
    for num_envs in (1, 3, 7):
        with build(name="local", max_staleness=1, num_env_workers=2, groups_per_worker=2, num_envs=num_envs) as runtime:
            assert iterate(runtime, 2)[-1].index == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decisions": 0}, "decisions"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        RuntimeConfig(**options)


def test_bad_input_to_a_run_is_named() -> None:
    with pytest.raises(UserError, match="num_envs"):
        build(num_envs=0)
    with pytest.raises(UserError, match="max_staleness=1 needs runtime=local, runtime=ray; runtime=sync allows only 0"):
        build(name="sync", max_staleness=1)
    with pytest.raises(UserError, match="order=arrival needs max_staleness of at least 1, got 0"):
        build(name="local", order="arrival")
    with pytest.raises(UserError, match="order"):
        RuntimeConfig(order="arival")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device=cuda"):
            build(device="cuda")
    with build(name="sync") as runtime:
        iterate(runtime, 1)
        state = runtime.state_dict()
    with build(name="sync", num_envs=NUM_ENVS * 2) as runtime, pytest.raises(UserError, match="num_envs"):
        runtime.load_state_dict(state)
    with build(name="sync", num_env_workers=2) as runtime, pytest.raises(UserError, match="groups"):
        runtime.load_state_dict(state)
