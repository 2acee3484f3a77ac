"""What an environment must keep: ours do, and one that breaks a rule is told which."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from embodied.core.contract import check_timestep
from embodied.core.episodes import PlanList
from embodied.core.errors import UserError
from embodied.core.spec import SUCCESS, Term
from embodied.core.types import Timestep
from embodied.envs.base.actions import random_actions
from embodied.envs.base.episodic import Advance
from embodied.envs.checks.conformance import CHECKS, Result, check_env, run_checks
from embodied.envs.checks.trial import LEAKS_SHARE, Trial
from embodied.envs.episodes.sampler import first_episodes
from embodied.envs.mujoco.pool import MujocoPool
from tests.envs.helpers import TASK_NAMES, pool
from tests.runtime.point_env import PointEnv, point_spec


@pytest.mark.parametrize("task", TASK_NAMES)
def test_our_tasks_conform(task: str) -> None:
    def make(num_envs: int) -> MujocoPool:
        return pool(task, num_envs, max_episode_steps=5)

    check_env(make)


def test_a_simulator_of_tensors_conforms() -> None:
    check_env(lambda num_envs: PointEnv(num_envs, max_episode_steps=7))


def changed(**changes: Callable[[Timestep], Any]) -> type[PointEnv]:
    class Changed(PointEnv):
        def step(self, action: torch.Tensor) -> Timestep:
            step = super().step(action)
            return replace(step, **{name: change(step) for name, change in changes.items()})

    return Changed


RULES: dict[str, tuple[Callable[[Timestep], Any], str]] = {
    "reward_NE": (lambda step: step.reward_NE.double(), "reward_NE is float64 .*, must be float32"),
    "terminated_N": (lambda step: step.truncated_N | step.terminated_N, "terminated and truncated at once"),
    "num_steps_N": (lambda step: step.num_steps_N * 0, "num_steps_N must be 1 to 3"),
    "final_ids": (lambda step: step.final_ids.flip(0)[1:], "final_ids must be the rows"),
    "obs": (lambda step: {"pixels": step.obs["state"]}, r"step\(\).obs lacks 'state'"),
    "final_obs": (lambda step: step.obs, r"final_obs\['state'\] is float32 .*, must be float32"),
}


@pytest.mark.parametrize("field", RULES)
def test_a_broken_rule_is_named(field: str) -> None:
    change, message = RULES[field]
    broken = changed(**{field: change})
    with pytest.raises(UserError, match=f"environment 'point' breaks the contract of a VecEnv: .*{message}"):
        check_env(lambda num_envs: broken(num_envs, max_episode_steps=7))


def test_an_episode_must_follow_from_its_plan() -> None:
    class Random(PointEnv):
        def start(self, ids: Any, plans: Any) -> None:
            super().start(ids, plans)
            self.position_N2[ids] += 0.1 * torch.rand(len(ids), 2)

    with pytest.raises(UserError, match="must be a function of its plan and actions"):
        check_env(lambda num_envs: Random(num_envs, max_episode_steps=7))


def test_an_env_may_claim_that_first_episodes_alone_repeat() -> None:
    class OnceSeeded(PointEnv):
        """Later episodes begin where random numbers say."""

        claims: Literal["all", "first", "none"] = "first"
        first = True

        def __init__(self, num_envs: int, max_episode_steps: int = 7) -> None:
            super().__init__(num_envs, spec=replace(point_spec(max_episode_steps), repeats=self.claims))

        def start(self, ids: Any, plans: Any) -> None:
            super().start(ids, plans)
            if not (plans.number_n == 0).all() or not self.first:
                self.position_N2[ids] += 0.1 * torch.rand(len(ids), 2)

    class Random(OnceSeeded):
        first = False

    class Claimless(Random):
        claims = "none"

    assert results(OnceSeeded)["seeding"] == Result("seeding", True)
    fails(Random, "must be a function of its plan and actions")
    found = results(Claimless)
    assert found["seeding"] == Result("seeding", True, "not claimed: its simulator says that it is not deterministic")
    assert found["partial_reset"].passed


def test_a_state_must_be_whole() -> None:
    class Forgetful(PointEnv):
        def state_dict(self) -> dict[str, torch.Tensor]:
            state = super().state_dict()
            return state | {"position": torch.zeros_like(state["position"])}

    with pytest.raises(UserError, match="must go on exactly"):
        check_env(lambda num_envs: Forgetful(num_envs, max_episode_steps=7))


def test_rewards_after_the_end_are_named() -> None:
    env = pool("reach", 3, max_episode_steps=2)
    step = env.step(random_actions(env.spec.action, 3, 4, seed=0))
    step.reward_NE[1, 3] = 1.0
    with pytest.raises(UserError, match="rewards after the end of an episode must be 0"):
        check_timestep(env, step, 4)


def fails(env: type[PointEnv], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_env(lambda num_envs: env(num_envs, max_episode_steps=7))


def test_time_limits_of_plans_are_kept() -> None:
    class Deaf(PointEnv):
        def begin(self, ids: Any, plans: Any) -> None:
            super().begin(ids, plans)
            self.steps_left_N[ids] = self.spec.max_episode_steps

    fails(Deaf, "longer than its plan's time limit")


def test_the_sampler_decides_on_every_episode() -> None:
    class Stubborn(PointEnv):
        def begin(self, ids: Any, plans: Any) -> None:
            super().begin(ids, self.plans.rows(ids) if len(ids) < self.num_envs else plans)

    fails(Stubborn, "must have the plan that the sampler drew")


def test_observations_follow_from_the_plan_too() -> None:
    class Noisy(PointEnv):
        def observe(self, ids: Any = None) -> dict[str, torch.Tensor]:
            return {"state": super().observe(ids)["state"] + 0.01 * torch.rand(1)}

    fails(Noisy, r"must be a function of its plan and actions.*; after the reset obs\['state'\]\[\d\] is .* the first")


def test_a_simulator_may_step_all_envs_whatever_it_is_asked() -> None:
    """The last observation of an episode is that of its end, and what ended rows say later is not heard."""

    class Lockstep(PointEnv):
        def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
            made = super().advance(action_NA, None)
            if ids is None:
                return made
            reward_N = torch.full_like(made.reward_N, torch.nan)
            reward_N[ids] = made.reward_N[ids]
            broken_N = torch.from_numpy(~np.isin(np.arange(self.num_envs), ids))
            return replace(made, reward_N=reward_N, broken_N=broken_N)

    check_env(lambda num_envs: Lockstep(num_envs, max_episode_steps=7))


def test_plans_beyond_the_spec_are_refused() -> None:
    env = PointEnv(2)
    plans = first_episodes(env.spec, 2, 0)
    for name, value in {"stage_n": 7, "instruction_n": 99, "time_limit_n": 0}.items():
        bad = replace(plans, **{name: plans.seed_n * 0 + value})
        with pytest.raises(ValueError, match=f"sampler: drew {name}"):
            env.reset(PlanList(bad, 2))


def test_outcomes_that_the_spec_lacks_are_named() -> None:
    class Mute(PointEnv):
        def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
            return replace(super().advance(action_NA, ids), outcomes={"won": torch.zeros(self.num_envs).bool()})

    env = Mute(2)
    env.reset(PlanList(first_episodes(env.spec, 2, 0), 2))
    with pytest.raises(ValueError, match=r"advance: got outcomes \['won'\], the spec has \['success'\]"):
        env.step(torch.zeros(2, 1, 2))


# -- the named checks of ``run_checks`` --------------------------------------------------------------------------------
class Whole(PointEnv):
    """An env that claims everything: exact resume, success and pictures."""

    instruction_texts: Any = ("go",) * 3

    def film(self, width: int, height: int) -> Callable[[], Any]:
        return lambda: np.arange(3 * height * width * 3, dtype=np.uint8).reshape(3, height, width, 3)


class TwoNames(Whole):
    def __init__(self, num_envs: int, max_episode_steps: int = 7) -> None:
        terms = (Term("position", 2), Term("position", 1))
        super().__init__(num_envs, spec=replace(point_spec(max_episode_steps), state=terms))


class Overwriting(Whole):
    """Gives the same tensor at every step."""

    def observe(self, ids: Any = None) -> Any:
        if ids is not None:
            return super().observe(ids)
        self.kept = getattr(self, "kept", super().observe())
        self.kept["state"].copy_(super().observe()["state"])
        return self.kept


class Tolerant(Whole):
    def step(self, action: torch.Tensor) -> Timestep:
        return super().step(action.nan_to_num())


class FirstForLast(Whole):
    def step(self, action: torch.Tensor) -> Timestep:
        step = super().step(action)
        return replace(step, final_obs={key: value[step.final_ids] for key, value in step.obs.items()})


class Endless(Whole):
    def begin(self, ids: Any, plans: Any) -> None:
        super().begin(ids, plans)
        self.steps_left_N[ids] += 2


class Forgetting(Whole):
    def step(self, action: torch.Tensor) -> Timestep:
        step = super().step(action)
        nothing = {SUCCESS: torch.zeros(len(step.episodes)).bool()}
        return replace(step, episodes=replace(step.episodes, once=nothing))

    def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
        return replace(super().advance(action_NA, ids), outcomes={SUCCESS: torch.ones(self.num_envs).bool()})


class Unseeded(Whole):
    def start(self, ids: Any, plans: Any) -> None:
        super().start(ids, plans)
        self.position_N2[ids] += 0.1 * torch.rand(len(ids), 2)


class ByChunk(Whole):
    """Rewards depend on the place of an action in its chunk."""

    def step(self, action: torch.Tensor) -> Timestep:
        step = super().step(action)
        reward_NE = step.reward_NE.clone()
        reward_NE[:, 1:] *= 2
        return replace(step, reward_NE=reward_NE)


class Amnesic(Whole):
    def state_dict(self) -> dict[str, torch.Tensor]:
        return super().state_dict() | {"position": torch.zeros(self.num_envs, 2)}


class Blank(Whole):
    def film(self, width: int, height: int) -> Callable[[], Any]:
        return lambda: np.zeros((3, height, width, 3), np.uint8)


class StillOpen(Whole):
    threads: ClassVar[list[threading.Event]] = []

    def __init__(self, num_envs: int, max_episode_steps: int = 7) -> None:
        super().__init__(num_envs, max_episode_steps)
        for _ in range(3):
            self.threads.append(threading.Event())
            threading.Thread(target=self.threads[-1].wait).start()


class Leaking(Whole):
    kept: ClassVar[list[Any]] = []

    def start(self, ids: Any, plans: Any) -> None:
        super().start(ids, plans)
        self.kept.append(np.ones(250_000 * len(ids)))


BROKEN: dict[str, tuple[type[PointEnv], str]] = {
    "spaces": (TwoNames, "two terms of the state have the same name"),
    "dtypes": (Overwriting, "a later step has overwritten"),
    "bad_actions": (Tolerant, "must raise a ValueError for an action with a NaN"),
    "autoreset": (FirstForLast, "final_obs must be the last observation"),
    "truncation": (Endless, "longer than its plan's time limit"),
    "success": (Forgetting, "episodes.once must be true of an episode in which it held"),
    "seeding": (Unseeded, "a function of its plan"),
    "partial_reset": (ByChunk, "the rewards and ends that its actions give one by one"),
    "exact_resume": (Amnesic, "must go on exactly"),
    "rendering": (Blank, "every picture is of one colour"),
    "closing": (StillOpen, "threads before it was built"),
    "leaks": (Leaking, "memory has grown by"),
}


def results(env: type[PointEnv], resets: int = 120) -> dict[str, Result]:
    made = run_checks(lambda num_envs: env(num_envs, max_episode_steps=7), 3, resets=resets)
    return {result.name: result for result in made}


def test_an_env_that_claims_everything_passes_all_checks() -> None:
    found = results(Whole)
    assert [*found] == [*CHECKS] == [*BROKEN]
    assert all(result == Result(name, True) for name, result in found.items())


@pytest.mark.parametrize("name", BROKEN)
def test_each_check_fails_for_an_env_that_is_broken_so(name: str) -> None:
    env, message = BROKEN[name]
    try:
        found = results(env)
    finally:
        for event in StillOpen.threads:
            event.set()
        Leaking.kept.clear()
    assert not found[name].passed
    assert message in found[name].why
    assert "\n" not in found[name].why


def test_an_exception_of_the_env_is_a_failure() -> None:
    class Raising(PointEnv):
        def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
            raise RuntimeError("out of order")

    found = results(Raising)
    assert re.fullmatch(r"raised RuntimeError in test_conformance.py, line \d+: out of order", found["spaces"].why)
    assert not found["spaces"].passed
    others = [name for name in CHECKS if name != "spaces"]
    assert [found[name] for name in others] == [Result(name, None, "not reached: see spaces") for name in others]


# -- threads and time --------------------------------------------------------------------------------------------------
def test_an_env_is_stepped_and_rendered_in_another_thread_than_the_one_that_builds_it() -> None:
    class Bound(Whole):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.built_in = threading.get_ident()
            super().__init__(*arguments, **options)

        def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
            if threading.get_ident() == self.built_in:
                raise RuntimeError("stepped in the thread that has built it")
            return super().advance(action_NA, ids)

        def film(self, width: int, height: int) -> Callable[[], Any]:
            def render() -> Any:
                assert threading.get_ident() != self.built_in
                return super(Bound, self).film(width, height)()

            return render

    assert all(result.passed for result in results(Bound, resets=20).values())


def test_an_env_that_hangs_ends_the_checks_in_time() -> None:
    released = threading.Event()

    class Hangs(PointEnv):
        def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
            released.wait()
            return super().advance(action_NA, ids)

    found = list(run_checks(lambda num_envs: Hangs(num_envs, max_episode_steps=7), 2, resets=5, seconds=0.6))
    released.set()
    assert [result.passed for result in found] == [False, *[None] * (len(CHECKS) - 1)]
    assert found[0].why == "not finished: 0.01 minutes (max_minutes=) are over, within which all checks end"
    assert {result.why for result in found[1:]} == {"not reached: see spaces"}


def test_episodes_of_an_env_with_slow_steps_are_cut_and_the_user_is_told() -> None:
    class Slow(PointEnv):
        def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
            time.sleep(0.1)
            return super().advance(action_NA, ids)

    notes: list[str] = []
    with ExitStack() as opened:
        trial = Trial(lambda n: Slow(n, max_episode_steps=50), opened, 2, 0, 50, 100, seconds=60.0, note=notes.append)
        trial._shorten()
    assert trial.limit is not None
    assert 2 <= trial.limit < 50
    assert f" s: episodes are cut to {trial.limit} control steps instead of 50, so that the checks end" in notes[0]


def test_resets_stop_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "left_s", lambda trial, share: 0.0 if share == LEAKS_SHARE else 60.0)
    assert results(Whole)["leaks"] == Result("leaks", True, "0 resets instead of 120, for lack of time (max_minutes=)")
