"""The pool's contract: chunks, ends inside a chunk, SAME_STEP, staggering, exact continuation, bad input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.errors import UserError
from embodied.core.spec import Term
from embodied.core.types import Timestep
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.tasks.base import Quantity
from embodied.envs.tasks.lift import Lift, LiftConfig
from tests.envs.helpers import actions, assert_continues, assert_same, cut_after_three, pool, restart

FRICTION = {"field": "geom_friction", "names": ["left_pad", "right_pad"], "range": [0.5, 1.5], "column": 0}
MASS = {"field": "body_mass", "names": ["cube"], "range": [0.5, 2.0], "mode": "startup"}
GAIN = {"field": "actuator_gainprm", "names": ["joint1"], "range": [0.8, 1.2], "column": 0}
RANDOMIZATION = {"randomization": {"friction": FRICTION, "mass": MASS, "gain": GAIN}}


def singles(env: MujocoPool, chunk: Tensor) -> list[Timestep]:
    """Execute a chunk [N, E, A] one action at a time."""
    return [env.step(chunk[:, e]) for e in range(chunk.shape[1])]


def test_is_a_vec_env() -> None:
    env = pool("reach", 3)
    assert isinstance(env, VecEnv)
    obs = restart(env, 0)
    assert obs["state"].shape == (3, env.spec.state_dim)
    assert obs["privileged"].shape == (3, env.spec.privileged_dim)
    assert {value.dtype for value in obs.values()} == {torch.float32}
    step = env.step(torch.zeros(3, 2, env.spec.action_dim))
    assert step.reward_NE.shape == (3, 2)
    assert step.reward_NE.dtype == torch.float32
    assert step.num_steps_N.tolist() == [2, 2, 2]
    assert set(step.info) == {"success"}
    env.close()


@pytest.mark.parametrize("task", ["lift", "stack"])
def test_a_chunk_equals_single_steps(task: str) -> None:
    chunked, single = pool(task, 5, 8), pool(task, 5, 8)
    plan = actions(list(range(5)), 8, 4).view(5, 2, 4, 4)
    for k in range(2):
        a, parts = chunked.step(plan[:, k]), singles(single, plan[:, k])
        torch.testing.assert_close(a.obs["state"], parts[-1].obs["state"], rtol=0, atol=0)
        torch.testing.assert_close(a.obs["privileged"], parts[-1].obs["privileged"], rtol=0, atol=0)
        torch.testing.assert_close(a.reward_NE, torch.cat([part.reward_NE for part in parts], 1), rtol=0, atol=0)
    torch.testing.assert_close(a.episodes.return_M, parts[-1].episodes.return_M, rtol=0, atol=0)
    assert a.episodes.length_M.tolist() == [8] * 5


def test_an_env_that_ends_inside_a_chunk_stops_there() -> None:
    ending, endless, following = pool("lift", 3, 6), pool("lift", 3, 100), pool("lift", 3, 100)
    plan = actions([0, 1, 2], 8, 4)
    ending.step(plan[:, :4])
    step = ending.step(plan[:, 4:])
    parts = singles(endless, plan[:, :6])

    assert step.num_steps_N.tolist() == [2, 2, 2]
    torch.testing.assert_close(step.reward_NE[:, :2], torch.cat([p.reward_NE for p in parts[4:]], 1), rtol=0, atol=0)
    assert (step.reward_NE[:, 2:] == 0).all()
    assert step.truncated_N.all()
    assert not step.terminated_N.any()
    assert step.final_ids.tolist() == [0, 1, 2]
    torch.testing.assert_close(step.final_obs, parts[-1].obs, rtol=0, atol=0)  # SAME_STEP: before the reset
    torch.testing.assert_close(step.obs, restart(following), rtol=0, atol=0)  # and after it
    assert (ending.batch.bind("time") == 0).all()
    total = torch.cat([part.reward_NE for part in parts], 1).sum(-1)
    torch.testing.assert_close(step.episodes.return_M, total)
    assert step.episodes.length_M.tolist() == [6, 6, 6]
    assert step.episodes.env_id_M.tolist() == [0, 1, 2]


def test_envs_that_end_at_different_actions_do_not_disturb_each_other() -> None:
    n, limit = 6, 7
    together = pool("lift", n, limit, seed=50, stagger=True)
    alone = [pool("lift", 1, limit, seed=50 + i, stagger=True) for i in range(n)]
    plan = actions(list(range(50, 50 + n)), 12, 4).view(n, 3, 4, 4)
    seen = set()
    for k in range(3):
        step = together.step(plan[:, k])
        seen |= set(step.num_steps_N.tolist())
        for i, env in enumerate(alone):
            other = env.step(plan[i : i + 1, k])
            assert_same(step, other, rows_a=torch.tensor([i]))
            if len(other.final_ids):
                row = (step.final_ids == i).nonzero().squeeze(-1)
                torch.testing.assert_close(step.final_obs["state"][row], other.final_obs["state"], rtol=0, atol=0)
    assert len(seen) > 2, "the plan should have ends at several places inside the chunks"


def test_stagger_spreads_the_first_ends_and_only_those() -> None:
    n, limit = 64, 16
    env = pool("reach", n, limit, stagger=True)
    lengths: list[list[int]] = [[] for _ in range(n)]
    ends = []
    for t in range(3 * limit):
        step = env.step(torch.zeros(n, 4))
        ends.append(len(step.final_ids))
        for i, length in zip(step.episodes.env_id_M.tolist(), step.episodes.length_M.tolist(), strict=True):
            lengths[i].append(length)
        assert len(step.final_ids) < n / 2, f"half of the envs ended at once, at step {t}"
    first = [steps[0] for steps in lengths]
    assert min(first) <= 3
    assert max(first) >= limit - 2
    assert len(set(first)) > limit // 2
    assert {length for steps in lengths for length in steps[1:]} == {limit}
    assert sum(ends[:limit]) == n
    assert not pool("reach", n, limit).step(torch.zeros(n, limit - 1, 4)).truncated_N.any()


def test_episode_statistics_tell_once_from_at_the_end() -> None:
    env = pool("reach", 4, 12)
    goal = torch.from_numpy(env.batch.bind("mocap_pos"))
    tcp = env.view.tcp_pos.clone()
    goal[:, 0] = tcp + torch.tensor([0.5, 0.0, 0.0])
    goal[:2, 0] = tcp[:2]
    env.step(torch.zeros(4, 3, 4))
    goal[1, 0, 2] = 2.0  # env 1 loses what it had, env 0 keeps it
    goal[2, 0] = env.view.tcp_pos[2]
    step = env.step(torch.zeros(4, 9, 4))
    assert step.episodes.once["success"].tolist() == [True, True, True, False]
    assert step.episodes.success_at_end_M.tolist() == [True, False, True, False]
    assert step.info["success"].tolist() == [True, False, True, False]


def test_an_episode_is_cut_after_steps_of_success_in_a_row_and_resumes_so() -> None:
    env, other = pool("reach", 8, seed=3), pool("reach", 8)
    env.cut_after_success = other.cut_after_success = 3
    in_a_row_N = torch.zeros(8, dtype=torch.int64)
    cut = cut_after_three(env, 13, in_a_row_N)
    assert in_a_row_N.any()
    sampler = make_sampler(other, 0)
    assert env.sampler is not None
    sampler.load_state_dict(env.sampler.state_dict())
    other.load_state_dict(env.state_dict(), sampler)
    assert cut + cut_after_three(env, 26, in_a_row_N, other) > 8


def test_a_returned_observation_stays_what_it_was() -> None:
    env = pool("lift", 2, 3)
    first = restart(env, 0)
    kept = {key: value.clone() for key, value in first.items()}
    for _ in range(4):
        env.step(torch.ones(2, 4))
    torch.testing.assert_close(first, kept, rtol=0, atol=0)


@pytest.mark.parametrize("sim", [{}, RANDOMIZATION], ids=["plain", "randomised"])
def test_continues_exactly_from_its_state(sim: dict) -> None:
    assert_continues("lift", sim, stagger=True)


def test_an_episode_begins_with_fields_that_a_task_varies_and_with_sensors_of_accelerations_at_0() -> None:
    env = pool("pick_place", 2, 1)
    env.batch.expand("body_pos")[1, env.model.body("tray").id, 2] += 0.05
    before = env.task.tray[:, 2].clone()
    env.step(torch.zeros(2, 1, 4))
    torch.testing.assert_close(env.task.tray[:, 2] - before, torch.tensor([0.0, 0.05], dtype=torch.float64))

    class Felt(Lift):
        def build_scene(self, spec: mujoco.MjSpec) -> None:
            super().build_scene(spec)
            site = mujoco.mjtObj.mjOBJ_SITE
            spec.add_sensor(name="felt", type=mujoco.mjtSensor.mjSENS_ACCELEROMETER, objtype=site, objname="tcp")

    felt = MujocoPool(Felt(LiftConfig()), num_envs=1)
    restart(felt, 0)
    felt.step(torch.ones(1, 8, 4))
    assert felt.view.sensor("felt").abs().max() > 0
    restart(felt)
    assert felt.view.sensor("felt").abs().max() == 0


def test_a_foreign_state_is_refused_whole() -> None:
    env, larger = pool("lift", 2), pool("lift", 3)
    plain, randomised = env.state_dict(), pool("lift", 2, sim=RANDOMIZATION)
    before = {key: value.clone() for key, value in randomised.state_dict().items()}
    with pytest.raises(ValueError, match=r"'physics': got shape \(2, .*needed shape \(3, "):
        larger.load_state_dict(plain, make_sampler(larger))
    with pytest.raises(ValueError, match=r"'model/.*': got nothing"):
        randomised.load_state_dict(plain, make_sampler(randomised))
    torch.testing.assert_close(randomised.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(2, 4), r"got shape \(2, 4\), needed \[3, E, 4\]"),
        (torch.zeros(3, 5), r"got shape \(3, 5\)"),
        (torch.zeros(3, 2, 7), r"got shape \(3, 2, 7\)"),
        (torch.zeros(3, 0, 4), r"got shape \(3, 0, 4\)"),
        (torch.zeros(4), r"got shape \(4,\)"),
        (torch.tensor([0.0, np.nan, 0.0, 0.0]).repeat(3, 1), r"NaN or infinite in env \[0, 1, 2\]"),
        (torch.diag(torch.tensor([0.0, 0.0, np.inf]))[:, [0, 1, 2, 2]], r"NaN or infinite in env \[2\]"),
    ],
)
def test_a_bad_action_raises_and_changes_nothing(action: Tensor, message: str) -> None:
    env = pool("lift", 3)
    env.step(torch.ones(3, 4))
    before = {key: value.clone() for key, value in env.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        env.step(action)
    torch.testing.assert_close(env.state_dict(), before, rtol=0, atol=0)


def test_actions_beyond_one_are_clipped() -> None:
    a, b = pool("reach", 2), pool("reach", 2)
    assert_same(a.step(torch.full((2, 4), 7.0)), b.step(torch.ones(2, 4)))


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"num_envs: got 0, allowed: 1 or more"):
        pool("reach", 0)
    with pytest.raises(UserError, match=r"unknown task 'pickplace'. Did you mean 'pick_place'"):
        make_pool("pickplace", {}, num_envs=1)
    with pytest.raises(UserError, match=r"Did you mean 'task.reach.max_episode_steps'"):
        make_pool("reach", {"max_episode_step": 5}, num_envs=1)
    with pytest.raises(UserError, match=r"control.mode: got 'ee_deltas', allowed: 'ee_delta' or 'joint_delta'\. Did"):
        pool("reach", 1, config={"control": {"mode": "ee_deltas"}})
    with pytest.raises(ValueError, match=r"control_dt_s: got 0.004, allowed: multiples of the physics step"):
        pool("reach", 1, config={"control_dt_s": 0.004})
    with pytest.raises(ValueError, match="max_episode_steps: got 0"):
        pool("reach", 1, 0)


def test_every_control_step_can_be_watched() -> None:
    env = pool("reach", 2, 6)
    times = []
    env.on_control_step = lambda watched: times.append(float(watched.batch.bind("time")[0]))
    env.step(torch.zeros(2, 4, 4))
    env.step(torch.zeros(2, 4, 4))
    np.testing.assert_allclose(times, 0.05 * np.arange(1, 7))  # the last two actions were not executed


def test_neighbours_of_a_group_have_the_same_episodes() -> None:
    env = pool("lift", 6, 2, group_size=3)
    first = restart(env, 4, group_size=3)
    for obs in (first, env.step(torch.zeros(6, 2, 4)).obs):
        assert torch.equal(obs["state"][:1].expand(3, -1), obs["state"][:3])
        assert torch.equal(obs["state"][3:4].expand(3, -1), obs["state"][3:])
        assert not torch.equal(obs["state"][0], obs["state"][3])
    with pytest.raises(ValueError, match="group_size: got 4, allowed: divisors of the number of envs, 6"):
        pool("lift", 6, group_size=4)


@pytest.mark.parametrize(("breaks_at", "early"), [(1, True), (3, False)])
def test_a_group_meets_again_after_one_of_it_diverged(
    breaks_at: int, early: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Episodes of 4 steps in chunks of 2; env 1 diverges in a control step of the first episode."""
    sim = {"dump_dir": str(tmp_path)}
    env = pool("lift", 4, 4, group_size=2, sim=sim)
    check, steps = env.guard.check, iter(range(100))
    monkeypatch.setattr(
        env.guard, "check", lambda raised: torch.arange(4) == 1 if next(steps) == breaks_at - 1 else check(raised)
    )
    ends = [env.step(torch.zeros(4, 2, 4)).truncated_N.tolist() for _ in range(4)]
    assert ends == [[False, early, False, False], [True] * 4, [False] * 4, [True] * 4]
    obs = env.observe()["state"]
    assert torch.equal(obs[0], obs[1])
    assert torch.equal(obs[2], obs[3])
    assert not torch.equal(obs[0], obs[2])


@pytest.mark.parametrize("sim", [{}, {"randomization": {"noise": {"field": "joint_noise", "range": [0.01, 0.01]}}}])
def test_last_observations_are_those_of_the_end_wherever_in_a_chunk_it_is(sim: dict[str, Any]) -> None:
    env, at_once, plan = pool("lift", 8, 9, sim=sim), pool("lift", 8, 9, sim=sim), actions(list(range(8)), 24, 4)
    for each in (env, at_once):
        restart(each, 0, stagger=True)
    assert env.ended_stay == (not sim)
    at_once.ended_stay = False
    ended = 0
    for t in range(0, 24, 4):
        ours, theirs = (each.step(plan[:, t : t + 4]) for each in (env, at_once))
        assert_same(ours, theirs)
        torch.testing.assert_close(ours.final_obs, theirs.final_obs, rtol=0, atol=0)
        ended += len(ours.final_ids)
    assert ended > 8


WRONG_SHAPES = {
    "success()": {"success": lambda task: Lift.success(task).all()},
    "rewards()['at_goal']": {"rewards": lambda task, success: Lift.rewards(task, success) | {"at_goal": success[:1]}},
    "failure()": {"failure": lambda task: False},
    "Quantity 'left'": {
        "observed": lambda task: (*Lift.observed(task), Quantity(Term("left", 1), lambda: task.cube[:, 0]))
    },
}


@pytest.mark.parametrize("what", WRONG_SHAPES)
def test_what_a_task_returns_in_a_wrong_shape_is_named(what: str) -> None:
    task = type("Mine", (Lift,), {"name": "mine", **WRONG_SHAPES[what]})(LiftConfig())
    env, needed = MujocoPool(task, num_envs=3, num_threads=1), "[N, 1]" if "left" in what else "[N]"
    with pytest.raises(
        UserError, match=rf"^task mine: {re.escape(what)}: got .*, needed: {re.escape(needed)} with N = 3$"
    ):
        restart(env, 0)
