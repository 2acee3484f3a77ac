"""A mapping is confirmed in two poses, which show what one does not, for the arm and the robot that were seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import pi

import numpy as np
import pytest

from embodied.core.errors import UserError
from embodied.deployment.robots.base import gripper_names, joint_names, values
from embodied.deployment.robots.mapping import Entry, MappedRobot, RobotMapping
from embodied.deployment.robots.setup import TOLERANCE, check_confirmed, confirm, draw_poses, poses
from tests.deployment.test_mapping import arm_of_bundle, arms_of_bundle, confirmed, toy_mapping
from tests.deployment.toy_arm import ToyArm, ToyConfig

Change = Callable[[dict[str, Entry]], dict[str, Entry]]


def flipped(name: str) -> Change:
    return lambda joints: {name: replace(joints[name], sign=-joints[name].sign)}


def exchanged(joints: dict[str, Entry]) -> dict[str, Entry]:
    first, third = joints["joint1"], joints["joint3"]
    return {"joint1": replace(first, name=third.name), "joint3": replace(third, name=first.name)}


def in_radians(name: str) -> Change:
    return lambda joints: {name: replace(joints[name], unit="rad")}


def turned(joints: dict[str, Entry]) -> dict[str, Entry]:
    return {"joint7": replace(joints["joint7"], offset=joints["joint7"].offset + 1.0)}


MISTAKES = [flipped("joint1"), flipped("joint3"), flipped("joint7"), exchanged, in_radians("joint1"), turned]


def mistaken(change: Change) -> RobotMapping:
    mapping = toy_mapping()
    return replace(mapping, joints=mapping.joints | change(mapping.joints))


def robot_in(pose: str, mapping: RobotMapping) -> MappedRobot:
    """Return the toy arm, really in a pose, behind a mapping."""
    arm = ToyArm(ToyConfig(pose_deg=np.rad2deg(poses(arms_of_bundle())[pose]).tolist()))
    return MappedRobot(arm, mapping, arms_of_bundle())


def read(robot: MappedRobot) -> tuple[np.ndarray, np.ndarray]:
    observation = robot.get_observation()
    return values(observation, joint_names(robot.arms)), values(observation, gripper_names(robot.arms))


@pytest.mark.parametrize("change", MISTAKES)
def test_a_wrong_mapping_looks_wrong_in_one_of_the_poses_and_is_not_confirmed(change: Change) -> None:
    mapping, arms, different, refused = mistaken(change), arms_of_bundle(), [], []
    for name, pose in poses(arms).items():
        robot = robot_in(name, mapping)
        drawn = draw_poses(arms, {"now": read(robot)[0], "wanted": pose})
        different.append((drawn == (31, 119, 180)).all(-1).sum())  # blue that no red covers
        try:
            confirm(robot, "A. Person", *read(robot))
        except UserError as error:
            refused.append(str(error))
    assert max(different) > 20
    assert refused
    assert "belongs at" in refused[-1]


def test_the_right_mapping_agrees_with_both_pictures_and_is_confirmed() -> None:
    mapping, arms = toy_mapping(), arms_of_bundle()
    for name, pose in poses(arms).items():
        robot = robot_in(name, mapping)
        assert not (draw_poses(arms, {"now": read(robot)[0], "wanted": pose}) == (31, 119, 180)).all(-1).any()
        mapping = confirm(robot, "A. Person", *read(robot))
    check_confirmed(robot_in("default", mapping))


def test_one_pose_confirms_nothing() -> None:
    robot = robot_in("default", toy_mapping())
    for _ in range(2):
        robot.mapping = confirm(robot, "A. Person", *read(robot))
    with pytest.raises(UserError, match=r"in one pose, .* move the arm to its second pose"):
        check_confirmed(robot)


def test_the_second_pose_tells_all_joints_apart_and_keeps_away_from_their_limits() -> None:
    arm = arm_of_bundle()
    home, second = poses({"": arm}).values()
    assert (np.abs(second) > TOLERANCE).all()
    moves = second - home
    apart = np.abs(moves[:, None] - moves) + np.eye(len(moves))
    assert apart.min() > TOLERANCE
    assert all(joint.low < at < joint.high for joint, at in zip(arm.joints, second, strict=True))


def test_a_confirmation_holds_for_its_arm_and_its_robot() -> None:
    arm, mapping = arm_of_bundle(), confirmed(toy_mapping())
    check_confirmed(MappedRobot(ToyArm(ToyConfig()), mapping, {"": arm}))
    faster = replace(arm, joints=(*arm.joints[:6], replace(arm.joints[6], max_velocity=9.0)))
    wider = replace(arm, workspace_high_m=(2.0, 2.0, 2.0))
    further = replace(arm, joints=(replace(arm.joints[0], high=pi), *arm.joints[1:]))
    for other in (faster, wider, further):
        with pytest.raises(UserError, match=r"changed after A\. Person confirmed it"):
            check_confirmed(MappedRobot(ToyArm(ToyConfig()), mapping, {"": other}))
    renamed = ToyArm(ToyConfig())
    renamed._now["tail.pos"] = 0.0
    with pytest.raises(UserError, match=r"changed after A\. Person confirmed it"):
        check_confirmed(MappedRobot(renamed, mapping, {"": arm}))


def test_a_person_has_a_name() -> None:
    with pytest.raises(UserError, match="give your name"):
        confirm(robot_in("default", toy_mapping()), " ", np.zeros(7), np.array([0.04]))
