"""The Panda's model against the manufacturer's figures, and its looks."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from embodied.envs.mujoco.scene import RED, add_cube, on_table
from embodied.envs.rendering.appearance import COLLISION_GROUP, add_visuals
from tests.envs.helpers import PANDA

HOME = np.array([0.0, 0.0, 0.0, -np.pi / 2, 0.0, np.pi / 2, np.pi / 4])
BENT = np.array([0.4, -0.7, 1.1, -2.3, -0.9, 2.0, 0.6])
# Franka Control Interface documentation: "Denavit-Hartenberg parameters" (Craig's convention) a, d, alpha; "Constants".
DH = [
    (0.0, 0.333, 0.0),
    (0.0, 0.0, -np.pi / 2),
    (0.0, 0.316, np.pi / 2),
    (0.0825, 0.0, np.pi / 2),
    (-0.0825, 0.384, -np.pi / 2),
    (0.0, 0.0, np.pi / 2),
    (0.088, 0.0, np.pi / 2),
]
FLANGE_M, TCP_M = 0.107, 0.1034
LOW = [-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973]
HIGH = [2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973]
TORQUE_NM = [87, 87, 87, 87, 12, 12, 12]


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return on_table(PANDA).compile()


@pytest.fixture(scope="module")
def dressed() -> mujoco.MjModel:
    return add_visuals(on_table(PANDA), PANDA.visual)


def forward_kinematics(q: np.ndarray) -> np.ndarray:
    """Pose [4, 4] of the tool centre point, from the DH table alone."""
    pose = np.eye(4)
    for (a, d, alpha), theta in zip(DH, q, strict=True):
        ct, st, ca, sa = np.cos(theta), np.sin(theta), np.cos(alpha), np.sin(alpha)
        pose = pose @ np.array(
            [[ct, -st, 0, a], [st * ca, ct * ca, -sa, -d * sa], [st * sa, ct * sa, ca, d * ca], [0, 0, 0, 1]]
        )
    hand = np.eye(4)
    hand[:2, :2] = np.array([[1, 1], [-1, 1]]) / np.sqrt(2)  # the hand is mounted at -45 degrees
    hand[2, 3] = FLANGE_M + TCP_M
    return pose @ hand


@pytest.mark.parametrize("q", [HOME, BENT])
def test_tool_pose_follows_the_dh_parameters(model: mujoco.MjModel, q: np.ndarray) -> None:
    data = mujoco.MjData(model)
    data.qpos[:7] = q
    mujoco.mj_kinematics(model, data)
    expected = forward_kinematics(q)
    np.testing.assert_allclose(data.site("tcp").xpos, expected[:3, 3], atol=1e-6)
    np.testing.assert_allclose(data.site("tcp").xmat.reshape(3, 3), expected[:3, :3], atol=1e-6)


def test_home_pose_by_hand(model: mujoco.MjModel) -> None:
    data = mujoco.MjData(model)
    data.qpos[:7] = HOME
    mujoco.mj_kinematics(model, data)
    reach, height = 0.0825 + 0.384 + 0.088, 0.333 + 0.316 + 0.0825 - FLANGE_M - TCP_M
    np.testing.assert_allclose(data.site("tcp").xpos, [reach, 0.0, height], atol=1e-6)


def test_limits_are_the_datasheet_s(model: mujoco.MjModel) -> None:
    for i in range(7):
        joint, motor = model.joint(f"joint{i + 1}"), model.actuator(f"joint{i + 1}")
        assert joint.limited
        np.testing.assert_array_equal(joint.range, [LOW[i], HIGH[i]])
        np.testing.assert_array_equal(motor.ctrlrange, [LOW[i], HIGH[i]])
        np.testing.assert_array_equal(motor.forcerange, [-TORQUE_NM[i], TORQUE_NM[i]])
    for finger in ("finger_joint1", "finger_joint2"):
        np.testing.assert_array_equal(model.joint(finger).range, [0.0, 0.04])


def test_mass_is_that_of_the_robot(model: mujoco.MjModel) -> None:
    """The datasheet says about 18 kg for the arm; identified links 1 to 7 weigh 16.06 kg, the hand 0.73 kg."""
    arm = sum(model.body(f"link{i}").mass[0] for i in range(1, 8))
    assert arm == pytest.approx(16.062128)
    assert model.body("hand").mass[0] == 0.73
    assert 16 < model.body_mass.sum() < 19


def test_the_arm_holds_its_pose(model: mujoco.MjModel) -> None:
    data = mujoco.MjData(model)
    data.qpos[:9] = data.ctrl[:9] = [*HOME, 0.04, 0.04]
    mujoco.mj_step(model, data, 100)
    np.testing.assert_allclose(data.qpos[:7], HOME, atol=2e-3)


def test_looks_are_not_physics(model: mujoco.MjModel, dressed: mujoco.MjModel) -> None:
    """Same state, mass and movement; what is added touches nothing."""
    added = [g for g in range(dressed.ngeom) if dressed.geom_group[g] == 2]
    assert dressed.ngeom == model.ngeom + len(added)
    assert len(added) > 30
    assert not dressed.geom_contype[added].any()
    assert not dressed.geom_conaffinity[added].any()
    np.testing.assert_array_equal(dressed.body_mass, model.body_mass)
    np.testing.assert_array_equal(dressed.body_inertia, model.body_inertia)
    assert Batch(dressed, 1, 1).nstate == Batch(model, 1, 1).nstate
    states = []
    for physics in (model, dressed):
        data = mujoco.MjData(physics)
        data.qpos[:7] = BENT
        mujoco.mj_step(physics, data, 20)
        states.append(data.qpos.copy())
    np.testing.assert_array_equal(*states)


def test_the_stepped_model_carries_no_shells(model: mujoco.MjModel) -> None:
    assert not (model.geom_group == 2).any()


def test_shells_enclose_what_collides(dressed: mujoco.MjModel) -> None:
    """Each moving collision geom of the robot is on a body that also has something to see."""
    for geom in range(dressed.ngeom):
        body = dressed.geom_bodyid[geom]
        if dressed.geom_group[geom] == COLLISION_GROUP and body > 0:
            assert (dressed.geom_group[dressed.geom_bodyid == body] == 2).any()


def test_adding_visuals_leaves_the_spec_alone() -> None:
    spec = on_table(PANDA)
    add_cube(spec, "cube", 0.02, 0.05, RED)
    before = spec.compile().ngeom
    add_visuals(spec, PANDA.visual)
    assert spec.compile().ngeom == before
