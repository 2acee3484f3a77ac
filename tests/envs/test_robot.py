"""The arm as an action space: inverse kinematics, the directions of actions, limits, the gripper."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from embodied.core.arm import damped_least_squares, solve_spd
from embodied.envs.mujoco.config import ControlConfig
from embodied.envs.mujoco.robots.panda import Panda
from embodied.envs.mujoco.scene import on_table

SUBSTEPS = 5  # 20 Hz
FINGER_OPEN_M, HOME_QPOS, NUM_ARM = Panda.finger_open_m, Panda.home_qpos, len(Panda.home_qpos)
N = 32


class Rig:
    """Some arms over a table, without a task."""

    def __init__(self, num: int = N, spread_rad: float = 0.05, seed: int = 0, **control: Any) -> None:
        self.rng = np.random.default_rng(seed)
        robot = Panda(ControlConfig(**control))
        self.batch = Batch(on_table(robot).compile(), num, 1, persistent=True)
        self.arm = robot.attach(self.batch)
        noise = self.rng.uniform(-spread_rad, spread_rad, (num, NUM_ARM))
        self.arm.reset(np.arange(num), HOME_QPOS + noise)
        self.batch.forward(stage=int(mujoco.mjtStage.mjSTAGE_VEL))
        self.action_names = robot.action.names
        self.num, self.size = num, robot.action.size

    @property
    def tcp(self) -> np.ndarray:
        return self.batch.bind("site_xpos")[:, self.arm.tcp_site].copy()

    @property
    def frame(self) -> np.ndarray:
        return self.batch.bind("site_xmat")[:, self.arm.tcp_site].reshape(-1, 3, 3).copy()

    @property
    def yaw(self) -> np.ndarray:
        return np.arctan2(self.frame[:, 1, 0], self.frame[:, 0, 0])

    def drive(self, action: np.ndarray, steps: int = 1) -> None:
        action = np.broadcast_to(action, (self.num, self.size))
        for _ in range(steps):
            self.arm.apply(action, None)
            self.batch.step(nstep=SUBSTEPS, stage=int(mujoco.mjtStage.mjSTAGE_VEL))

    def action(self, **parts: float) -> np.ndarray:
        """One action by the names of its entries; the gripper stays open."""
        action = np.zeros(self.size)
        action[-1] = 1.0
        for name, value in parts.items():
            action[self.action_names.index(name)] = value
        return action

    def scatter(self) -> None:
        """Drive to random places, then to rest with the gripper vertical."""
        for _ in range(5):
            action = self.rng.uniform(-1, 1, (self.num, self.size)) * [1, 1, 0.5, *[0] * (self.size - 4), 1]
            self.drive(action, 3)
        self.drive(self.action(), 10)


def test_solver_equals_numpy() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(50, 6, 6))
    matrix, rhs = root @ root.transpose(0, 2, 1) + 0.1 * np.eye(6), rng.normal(size=(50, 6))
    expected = np.linalg.solve(matrix, rhs[..., None])[..., 0]
    solved = solve_spd(np.ascontiguousarray(np.triu(matrix).transpose(1, 2, 0)), rhs.T.copy()).T
    np.testing.assert_allclose(solved, expected, rtol=1e-9, atol=1e-10)


def test_damped_least_squares_equals_its_formula() -> None:
    rng = np.random.default_rng(1)
    jac, twist, prior = rng.normal(size=(20, 6, 7)), rng.normal(size=(20, 6)), rng.normal(size=(20, 7))
    expected = np.empty((20, 7))
    for i, j in enumerate(jac):
        gram = j @ j.T + 0.1**2 * np.eye(6)
        expected[i] = prior[i] + j.T @ np.linalg.solve(gram, twist[i] - j @ prior[i])
    batch_last = (jac.transpose(1, 2, 0), twist.T, prior.T)
    np.testing.assert_allclose(damped_least_squares(*batch_last, 0.1).T, expected, rtol=1e-9)
    exact = damped_least_squares(*batch_last, 1e-6).T
    np.testing.assert_allclose(np.einsum("nij,nj->ni", jac, exact), twist, atol=1e-6)  # the prior is in the null space


def test_jacobian_is_that_of_the_engine() -> None:
    rig = Rig(8, spread_rad=0.8)
    rig.drive(rig.action(dx=1.0), 2)
    ours = rig.arm.jacobian().transpose(2, 0, 1)
    model, data = rig.batch.model, mujoco.MjData(rig.batch.model)
    for i in range(rig.num):
        data.qpos[:] = rig.batch.bind("qpos")[i]
        mujoco.mj_forward(model, data)
        jacp, jacr = np.zeros((2, 3, model.nv))
        mujoco.mj_jacSite(model, data, jacp, jacr, rig.arm.tcp_site)
        np.testing.assert_allclose(ours[i], np.vstack([jacp, jacr])[:, :NUM_ARM], atol=1e-10)
    body = int(model.site_bodyid[rig.arm.tcp_site])
    jacp, jacr = rig.batch.jac(body, rig.tcp)
    np.testing.assert_allclose(ours, np.concatenate([jacp, jacr], 1)[:, :, :NUM_ARM], atol=1e-10)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_cartesian_actions_move_the_tool_their_way(axis: int, sign: int) -> None:
    rig = Rig()
    rig.scatter()
    before = rig.tcp
    config = rig.arm.config
    rig.drive(rig.action(**{"d" + "xyz"[axis]: float(sign)}), 4)
    moved = rig.tcp - before
    along, off = sign * moved[:, axis], np.delete(moved, axis, axis=1)
    target = before[:, axis] + sign * 0.15
    inside = (target > config.workspace_low_m[axis]) & (target < config.workspace_high_m[axis])
    assert inside.sum() > 6
    assert (along[inside] > 0.03).all(), along[inside].min()
    assert (along[inside] < 4 * config.delta_m).all()
    assert (np.linalg.norm(off[inside], axis=1) < 0.35 * along[inside]).all()
    assert (rig.frame[:, 2, 2] < -0.98).all(), "the gripper should stay vertical"


def test_zero_action_holds_the_pose() -> None:
    rig = Rig()
    rig.drive(rig.action(), 10)  # the gripper comes upright
    before = rig.tcp
    rig.drive(rig.action(), 20)
    assert np.linalg.norm(rig.tcp - before, axis=1).max() < 1e-3
    assert (rig.frame[:, 2, 2] < -0.999).all()
    assert np.abs(rig.yaw).max() < 0.02


def test_zero_action_nearly_holds_any_pose() -> None:
    """Damping lets a little of the pull towards the home posture through to the tool, most of it far from home."""
    rig = Rig()
    rig.scatter()
    before = rig.tcp
    rig.drive(rig.action(), 20)
    drift = np.linalg.norm(rig.tcp - before, axis=1)
    assert drift.max() < 0.01
    assert np.median(drift) < 0.004


@pytest.mark.parametrize("name", ["dx", "dy", "dz"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_workspace_is_not_left(name: str, sign: float) -> None:
    rig = Rig(8)
    low, high = np.array(rig.arm.config.workspace_low_m), np.array(rig.arm.config.workspace_high_m)
    for _ in range(12):
        rig.drive(rig.action(**{name: sign}), 4)
        assert (rig.tcp > low - 0.012).all()
        assert (rig.tcp < high + 0.012).all()
    axis = "xyz".index(name[1])
    bound = high[axis] if sign > 0 else low[axis]
    np.testing.assert_allclose(rig.tcp[:, axis], bound, atol=0.012)


def test_rotation_turns_about_the_vertical_and_nothing_else() -> None:
    rig = Rig(16, spread_rad=0.05, rotation=True)
    assert rig.action_names == ("dx", "dy", "dz", "dyaw", "gripper")
    rig.drive(rig.action(), 10)
    for sign in (1.0, -1.0):
        before, yaw = rig.tcp, rig.yaw
        rig.drive(rig.action(dyaw=sign), 8)
        turned = np.angle(np.exp(1j * (rig.yaw - yaw)))
        assert (sign * turned > 0.2).all(), turned
        assert (sign * turned < 8 * rig.arm.config.delta_rad).all()
        assert np.linalg.norm(rig.tcp - before, axis=1).max() < 0.015
        assert (rig.frame[:, 2, 2] < -0.99).all()
    plain = Rig(4, spread_rad=0.1)
    plain.drive(plain.action(), 20)
    assert np.abs(plain.yaw).max() < 0.02, "without the option the gripper turns to zero"


@pytest.mark.parametrize("joint", range(NUM_ARM))
def test_joint_actions_move_their_joint(joint: int) -> None:
    rig = Rig(4, spread_rad=0.05, mode="joint_delta")
    assert rig.action_names == (*(f"djoint{i + 1}" for i in range(NUM_ARM)), "gripper")
    qpos = rig.batch.bind("qpos")
    before = qpos[:, :NUM_ARM].copy()
    rig.drive(rig.action(**{f"djoint{joint + 1}": 1.0}), 5)
    moved = qpos[:, :NUM_ARM] - before
    assert (moved[:, joint] > 0.1).all()
    assert (moved[:, joint] < 5 * rig.arm.config.delta_rad).all()
    assert (np.abs(np.delete(moved, joint, 1)) < 0.25 * moved[:, [joint]]).all()


def test_joint_targets_stay_within_the_joints_ranges() -> None:
    rig = Rig(4, mode="joint_delta")
    for sign in (1.0, -1.0):
        rig.drive(np.array([sign] * 8), 20)
        ctrl = rig.batch.bind("ctrl")[:, :NUM_ARM]
        assert (ctrl >= rig.batch.model.jnt_range[:NUM_ARM, 0]).all()
        assert (ctrl <= rig.batch.model.jnt_range[:NUM_ARM, 1]).all()


def test_the_gripper_opens_and_closes() -> None:
    rig = Rig(4, spread_rad=0.0)
    fingers = rig.batch.bind("qpos")[:, NUM_ARM:]
    np.testing.assert_allclose(fingers, FINGER_OPEN_M, atol=1e-3)
    rig.drive(rig.action(gripper=-1.0), 15)
    np.testing.assert_allclose(fingers, 0.0, atol=2e-3)
    rig.drive(rig.action(gripper=1.0), 25)
    np.testing.assert_allclose(fingers, FINGER_OPEN_M, atol=2e-3)


def test_only_the_given_rows_are_commanded() -> None:
    rig = Rig(5)
    before = rig.batch.bind("ctrl").copy()
    action = np.stack([rig.action(dx=1.0, gripper=-1.0)] * 5)
    rig.arm.apply(action, np.array([0, 3]))
    after = rig.batch.bind("ctrl").copy()
    assert (after != before).any(1).tolist() == [True, False, False, True, False]
    rig.batch.bind("ctrl")[:] = before
    rig.arm.apply(action, None)
    np.testing.assert_array_equal(after[[0, 3]], rig.batch.bind("ctrl")[[0, 3]])
