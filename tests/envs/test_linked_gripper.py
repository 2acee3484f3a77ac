"""A gripper with an MJCF of its own: one command moves linked fingers, and its opening has a unit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from embodied.core.errors import UserError
from embodied.envs import make_pool, make_sampler
from embodied.envs.checks.robot import check_robot
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.robots.described import build_robot
from embodied.envs.mujoco.robots.gripper_arm import AttachedArm

ARM = """
<mujoco>
  <compiler angle="radian" autolimits="true"/>
  <default>
    <geom mass="0"/><joint damping="1"/><default class="slide"><joint type="slide" range="-1 1"/></default>
  </default>
  <worldbody><body name="hand" quat="0 1 0 0" pos="0 0 0.1">
    <inertial mass="3" pos="0 0 0" diaginertia="0.01 0.01 0.01"/>
    <joint name="x" class="slide" axis="1 0 0"/><joint name="y" class="slide" axis="0 -1 0"/>
    <joint name="z" class="slide" axis="0 0 -1"/><joint name="yaw" axis="0 0 -1" range="-1.6 1.6"/>
    <geom type="box" size="0.03 0.1 0.02" pos="0 0 0.02"/><site name="flange" pos="0 0 0.04"/>
  </body></worldbody>
</mujoco>"""
# Fingers on cranks: their pads stay parallel, because a joint in each finger turns back as far as the crank turns.
# 255 opens, 0 closes. The range of angles is in the unit of the arm's file.
FINGER = """
  <body name="{side}_crank" pos="0 {y} 0"><inertial mass="0.02" pos="0 0 0.03" diaginertia="1e-5 1e-5 1e-5"/>
    <joint name="{side}" axis="{axis} 0 0" range="-0.2 0.7"/>
    <body name="{side}_pad" pos="0 0 0.06"><inertial mass="0.02" pos="0 0 0" diaginertia="1e-5 1e-5 1e-5"/>
      <joint name="{side}_back" axis="{axis} 0 0" range="-0.8 0.8"/>
      <geom type="box" size="0.01 0.003 0.015" mass="0"/></body></body>"""
GRIPPER = f"""
<mujoco>
  <default><joint armature="0.001" damping="0.02"/></default>
  <worldbody><body name="palm">
    {FINGER.format(side="left", y=0.01, axis=-1)}{FINGER.format(side="right", y=-0.01, axis=1)}
    <site name="between" pos="0 0 0.065"/>
  </body></worldbody>
  <equality>
    <joint joint1="right" joint2="left"/>
    <joint joint1="left_back" joint2="left" polycoef="0 -1 0 0 0"/>
    <joint joint1="right_back" joint2="left" polycoef="0 -1 0 0 0"/>
  </equality>
  <actuator><general name="grip" joint="left" biastype="affine" ctrlrange="0 255" forcerange="-2 2"
    gainprm="0.0266667" biasprm="-1.6 -10 -0.5"/></actuator>
</mujoco>"""
DATA = {
    "mjcf": "arm.xml", "tool": {"site": "gripper/between"}, "home": {"x": 0.55, "y": 0.0, "z": 0.2, "yaw": 0.0},
    "gripper": {
        "mjcf": "gripper.xml", "mount": {"site": "flange"}, "actuators": ["gripper/grip"], "open": 255, "closed": 0,
        "opening_m": 0.074, "bodies": ["gripper/left_pad", "gripper/right_pad"],
    },
    "servos": {name: {"force": 200, "armature": 0.1} for name in ("x", "y", "z", "yaw")}, "weightless": True,
    "control": {"rotation": True},
}  # fmt: skip


def written(folder: Path, **gripper: object) -> str:
    for name, text in (("arm", ARM), ("gripper", GRIPPER)):
        (folder / f"{name}.xml").write_text(text)
    data = {**DATA, "gripper": {**DATA["gripper"], **gripper}}  # type: ignore[dict-item]
    (folder / "mine.yaml").write_text(yaml.safe_dump(data))
    return str(folder / "mine.yaml")


def started(robot: str) -> tuple[MujocoPool, AttachedArm]:
    pool = make_pool("lift", {"robot": robot}, num_envs=32, num_threads=1)
    pool.reset(make_sampler(pool, seed=0))
    assert isinstance(pool.arm, AttachedArm)
    return pool, pool.arm


def test_one_command_moves_the_linked_fingers_which_grasp_and_lift(tmp_path: Path) -> None:
    pool, arm = started(written(tmp_path))
    fingers = arm.qpos[:, arm.parts.linked]
    assert arm.ctrl.shape == (32, 5)
    assert arm.finger_qpos.shape == (32, 1)
    np.testing.assert_allclose(fingers[:, 0], 0.52, atol=0.02)
    np.testing.assert_allclose(fingers, fingers[:, :1] * [1, -1, 1, -1], atol=0.01)
    for _ in range(pool.spec.max_episode_steps):
        step = pool.step(pool.task.expert())
    assert step.episodes.success_at_end_M.float().mean() >= 0.95


def test_the_opening_is_measured_in_metres_and_the_servos_have_the_stiffness_of_the_rule(tmp_path: Path) -> None:
    robot = build_robot(written(tmp_path), {})
    assert robot.gap_m[1] == pytest.approx(0.074, rel=0.05)
    assert robot.gap_m[0] < 0
    assert robot.config.gripper_m == 51
    assert robot.kinematics.joints[0].stiffness == pytest.approx(1000 * (3.08 + 0.1))
    assert robot.arm is None
    with pytest.raises(UserError, match=r"opening_m: got 0\.100, measured: 0\.07\d"):
        build_robot(written(tmp_path, opening_m=0.1), {})
    with pytest.raises(UserError, match=r"by default twice open, 510.*: write opening_m: 0\.07\d"):
        build_robot(written(tmp_path, opening_m=None), {})


def test_a_held_object_starts_between_linked_fingers(tmp_path: Path) -> None:
    pool, _ = started(written(tmp_path))
    pool.task.put_in_hand(torch.arange(32))
    still = torch.zeros(32, 5)
    still[:, -1] = -1
    for _ in range(20):
        pool.step(still)
    assert pool.view.grasped("cube").all()


def test_joints_that_the_file_does_not_link_can_be_linked_by_the_yaml(tmp_path: Path) -> None:
    links = {"gripper/right": ["gripper/left", 1], "gripper/left_back": ["gripper/left", -1]}
    path = written(tmp_path, links=links | {"gripper/right_back": ["gripper/left", -1]})
    text = GRIPPER.split("<equality>")[0] + GRIPPER.split("</equality>")[1]
    (tmp_path / "gripper.xml").write_text(text)
    assert build_robot(path, {}).gap_m[1] == pytest.approx(0.074, rel=0.05)


def test_what_an_export_needs_is_named_and_a_velocity_servo_is_refused(tmp_path: Path) -> None:
    path, notes = written(tmp_path), list[str]()
    next(check_robot(make_pool("lift", {"robot": path}, num_envs=4, num_threads=1), notes.append))
    assert "it lacks max_velocity and position servos on the joints of its gripper" in notes[0]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**DATA, "max_velocity": dict.fromkeys(DATA["home"], 1.0)}))
    assert build_robot(path, {}).lacks == "position servos on the joints of its gripper"
    (tmp_path / "gripper.xml").write_text(
        GRIPPER.replace('"0.0266667" biasprm="-1.6 -10 -0.5"', '"1" biasprm="0 0 -1"')
    )
    with pytest.raises(UserError, match="joint 'gripper/left': its actuator is no position servo"):
        build_robot(path, {})


def test_an_actuator_of_the_arm_that_is_no_position_servo_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    motors = "<actuator><motor joint='x'/><motor joint='y'/><motor joint='z'/><motor joint='yaw'/></actuator></mujoco>"
    (tmp_path / "arm.xml").write_text(ARM.replace("</mujoco>", motors))
    assert build_robot(path, {}).num_joints == 4
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**DATA, "servos": {}}))
    with pytest.raises(UserError, match="joint 'x': its actuator is no position servo"):
        build_robot(path, {})
