"""Mappings: by name, in the right units and signs, confirmed by a person; and robots behind them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from math import pi
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from embodied import deploy as deploy_command
from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.core.spec import Arms
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.control.inference import Clock
from embodied.deployment.control.safety import Safety
from embodied.deployment.control.site import move_home
from embodied.deployment.robots.base import Robot, load_robot
from embodied.deployment.robots.mapping import Entry, MappedRobot, RobotMapping, read_mapping, write_mapping
from embodied.deployment.robots.setup import check_confirmed, confirm, draw_poses, encode_png, poses, propose
from tests.commands.helpers import run
from tests.deployment.exports import small_config, write_small
from tests.deployment.toy_arm import HOME_DEG, NAMES, OFFSETS_DEG, SIGNS, ToyArm, ToyConfig

TOY = "robot=tests.deployment.toy_arm:ToyArm"


@cache
def reach_bundle() -> Path:
    """Return the bundle of a small Gaussian policy for reach, whose external term is the goal. Read-only."""
    path = Path(mkdtemp(prefix="bundle-"))
    write_small(path, small_config("reach", "gaussian"))
    return path


@cache
def arm_of_bundle():
    return read_bundle(reach_bundle()).arm


def arms_of_bundle() -> Arms:
    return read_bundle(reach_bundle()).arms


def toy_mapping() -> RobotMapping:
    """Return the right mapping of the toy arm."""
    joints = {f"joint{i + 1}": Entry(f"{NAMES[i]}.pos", "deg", SIGNS[i], OFFSETS_DEG[i] * pi / 180) for i in range(7)}
    return RobotMapping("toy_arm", joints, Entry("gripper.pos", "percent", low=0.0, high=0.04))


def confirmed(mapping: RobotMapping, arms: Arms | None = None) -> RobotMapping:
    """Return a mapping of the toy arm that a person has confirmed in both poses, whatever it reads there."""
    arms = arms or arms_of_bundle()
    for pose in poses(arms).values():
        mapping = confirm(MappedRobot(ToyArm(ToyConfig()), mapping, arms), "A. Person", pose, np.array([0.04]))
    return mapping


def speedy(name: str, velocity: str) -> Entry:
    """Return the entry of a joint whose velocity has a name too."""
    return Entry(name, "deg", velocity=velocity)


@pytest.mark.parametrize(
    ("entry", "theirs", "ours"),
    [
        (Entry("a", "rad"), 0.5, 0.5),
        (Entry("a", "deg", -1, 0.25), 90.0, 0.25 - pi / 2),
        (Entry("a", "mm", 1, 0.001), 20.0, 0.021),
        (Entry("a", "percent", low=0.0, high=0.04), 50.0, 0.02),
        (Entry("a", "percent", low=0.04, high=0.0), 25.0, 0.03),
    ],
)
def test_numbers_go_both_ways(entry: Entry, theirs: float, ours: float) -> None:
    entry.check("a")
    assert entry.from_robot(theirs) == pytest.approx(ours)
    assert entry.to_robot(entry.from_robot(theirs)) == pytest.approx(theirs)


def test_a_mapped_robot_speaks_our_names_whatever_the_order() -> None:
    robot = MappedRobot(ToyArm(ToyConfig()), toy_mapping(), arms_of_bundle())
    assert isinstance(robot, Robot)
    robot.robot.connect()
    observation = robot.get_observation()
    home = np.deg2rad(HOME_DEG)
    np.testing.assert_allclose([observation[f"joint{i}.pos"] for i in range(1, 8)], home, atol=1e-9)
    assert observation["gripper.pos"] == pytest.approx(0.04)
    assert observation["joint3.vel"] == 0.0
    assert observation["goal[1]"] == 0.1
    wanted = {f"joint{i + 1}.pos": value for i, value in enumerate(home + 0.1)} | {"gripper.pos": 0.01}
    assert robot.send_action(wanted) == pytest.approx(wanted)
    assert isinstance(robot.robot, ToyArm)
    sent = robot.robot.sent[-1]
    assert sent["gripper.pos"] == pytest.approx(25.0)
    assert sent["shoulder.pos"] == pytest.approx((22.5 + np.rad2deg(0.1) - 10.0) / -1)
    time.sleep(0.05)
    assert robot.get_observation()["joint1.vel"] > 0


def test_a_mapping_needs_a_person(tmp_path: Path) -> None:
    path, arms = tmp_path / "mapping.json", arms_of_bundle()
    with pytest.raises(UserError, match="nobody has confirmed"):
        check_confirmed(MappedRobot(ToyArm(ToyConfig()), toy_mapping(), arms))
    write_mapping(path, confirmed(toy_mapping()))
    check_confirmed(MappedRobot(ToyArm(ToyConfig()), read_mapping(path), arms))
    content = json.loads(path.read_text())
    content["joints"]["joint2"]["sign"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"changed after A. Person confirmed it"):
        check_confirmed(MappedRobot(ToyArm(ToyConfig()), read_mapping(path), arms))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.joints.pop("joint3"), "lacks joint3"),
        (lambda m: m.joints.update(joint8=Entry("x", "rad")), "unknown joint in the mapping 'joint8'"),
        (lambda m: m.joints.update(joint2=Entry("base.pos", "deg")), "base.pos stands for two quantities"),
        (lambda m: m.joints.update(joint2=Entry("gripper.pos", "deg")), "gripper.pos stands for two quantities"),
        (lambda m: m.joints.update(joint2=speedy("shoulder.pos", "base.pos")), "base.pos stands for two quantities"),
        (
            lambda m: m.joints.update(joint1=speedy("base.pos", "cube_x"), joint2=speedy("shoulder.pos", "cube_x")),
            "cube_x stands for two quantities",
        ),
        (lambda m: m.external.update({"goal[0]": "base.pos"}), "base.pos stands for two quantities"),
        (lambda m: m.external.update({"goal[0]": "cube_x", "goal[1]": "cube_x"}), "cube_x stands for two quantities"),
        (lambda m: m.external.update({"joint1.pos": "cube_x"}), "joint1.pos stands for two quantities"),
        (lambda m: m.external.update({"joint1.vel": "cube_x"}), "joint1.vel stands for two quantities"),
        (lambda m: m.joints.update(joint2=Entry("sholder.pos", "deg")), "Did you mean 'shoulder.pos'"),
        (lambda m: m.joints.update(joint2=Entry("shoulder.pos", "deg", 2)), "sign: got 2, allowed: 1, -1"),
        (lambda m: m.joints.update(joint2=Entry("shoulder.pos", "percent")), "percent needs low and high"),
        (lambda m: m.joints.update(joint2=Entry("shoulder.pos", "deg", low=0.0)), "low and high are for percent only"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(change: object, message: str) -> None:
    mapping = toy_mapping()
    change(mapping)  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        MappedRobot(ToyArm(ToyConfig()), mapping, arms_of_bundle())


def test_a_draft_takes_joints_by_the_end_of_their_names_or_else_in_order() -> None:
    bundle, robot = read_bundle(reach_bundle()), ToyArm(ToyConfig())
    mapping = propose(bundle, robot)
    mapping.check(bundle.arms)
    assert [entry.name for entry in mapping.joints.values()] == [f"{name}.pos" for name in NAMES]
    assert {entry.unit for entry in mapping.joints.values()} == {"deg"}  # as -112.5 can be no radians
    robot._now = {f"fr3_joint{i}.pos": 0.5 * i for i in (3, 1, 2, 7, 6, 5, 4)} | {"gripper.pos": 0.0}
    robot._target = dict(robot._now)
    named = propose(bundle, robot)
    assert [entry.name for entry in named.joints.values()] == [f"fr3_joint{i}.pos" for i in range(1, 8)]
    assert {entry.unit for entry in named.joints.values()} == {"rad"}


def test_a_class_that_is_no_robot_is_refused() -> None:
    with pytest.raises(UserError, match="is no robot: it lacks"):
        load_robot("collections:OrderedDict", {})
    with pytest.raises(UserError, match="No module named"):
        load_robot("lerobott.robots:X", {})
    with pytest.raises(UserError, match=r"robot_options .* unexpected keyword argument 'port'"):
        load_robot("tests.deployment.toy_arm:ToyArm", {"port": 1})


# -- pictures ----------------------------------------------------------------------------------------------------------
def test_the_skeleton_ends_at_the_tool() -> None:
    home = np.array([joint.home for joint in arm_of_bundle().joints])
    points = Chain(arm_of_bundle()).points(home)
    assert points.shape == (9, 3)
    np.testing.assert_allclose(points[-1], Chain(arm_of_bundle()).tool(home)[0])
    np.testing.assert_allclose(points[1], [0, 0, 0.333], atol=1e-9)


def test_pictures_are_png_and_show_both_poses() -> None:
    home = np.array([joint.home for joint in arm_of_bundle().joints])
    image = draw_poses(arms_of_bundle(), {"now": home, "default": home + 0.3})
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(image)))), image)
    for colour in ((31, 119, 180), (214, 39, 40)):
        assert (image == colour).all(-1).sum() > 500


# -- the command -------------------------------------------------------------------------------------------------------
def test_the_way_of_a_new_robot(tmp_path: Path) -> None:
    """Draft, refusal with a picture, confirmation in two poses, episodes."""
    mapping = tmp_path / "toy.json"
    words = [f"bundle={reach_bundle()}", TOY, f"mapping={mapping}"]
    missing = run(deploy_command.main, words)
    assert (missing.code, "propose_mapping=true" in missing.stderr) == (2, True)
    draft = run(deploy_command.main, [*words, "propose_mapping=true"])
    assert draft.code == 0, draft.stderr
    assert mapping.with_suffix(".png").is_file()
    write_mapping(mapping, toy_mapping())
    refused = run(deploy_command.main, words)
    assert refused.code == 2
    assert "nobody has confirmed this mapping" in refused.stderr
    assert "shoulder.pos" in refused.stderr
    first = run(deploy_command.main, [*words, "confirm_mapping=A. Person"])
    assert (first.code, first.result["confirmed_poses"], first.result["confirmed"]) == (0, ["default"], False)
    assert "move the arm by hand into its second pose" in first.stderr
    half = run(deploy_command.main, words)
    assert (half.code, "confirmed this mapping in one pose" in half.stderr) == (2, True)
    options = json.dumps({"pose_deg": np.rad2deg(poses(arms_of_bundle())["second"]).tolist()})
    second = run(deploy_command.main, [*words, "confirm_mapping=A. Person", f"robot_options={options}"])
    assert (second.code, second.result["confirmed"]) == (0, True), second.stderr
    done = run(deploy_command.main, [*words, "home=false"])
    assert done.code == 0, done.stderr
    assert done.result["robot"] == "toy_arm"
    assert done.result["success_at_end"] is None
    assert done.result["ended"] == {"time limit": 1}


def test_a_gripper_in_metres_is_drafted_so_and_as_percent_it_is_not_confirmed(tmp_path: Path) -> None:
    mapping = tmp_path / "toy.json"
    words = [f"bundle={reach_bundle()}", TOY, f"mapping={mapping}", 'robot_options={"gripper": 0.04}']
    draft = run(deploy_command.main, [*words, "propose_mapping=true"])
    assert read_mapping(mapping).gripper == Entry("gripper.pos", "m")
    row = next(line for line in draft.stderr.splitlines() if line.startswith("gripper"))
    assert row.split()[-3:] == ["+0.0400"] * 3
    write_mapping(mapping, toy_mapping())
    refused = run(deploy_command.main, [*words, "confirm_mapping=A. Person"])
    assert (refused.code, read_mapping(mapping).confirmed) == (2, None)
    assert "reads the gripper at 1.6e-05 m: open is 0.04, closed is 0 m" in refused.stderr.splitlines()[-1]
    in_metres = replace(toy_mapping(), gripper=Entry("gripper.pos", "m"))
    write_mapping(mapping, in_metres)
    assert run(deploy_command.main, [*words, "confirm_mapping=A. Person"]).code == 0
    assert run(deploy_command.main, [*words[:3], "confirm_mapping=A. Person"]).code == 2  # 100 m


def test_units_that_were_mixed_up_move_nothing(tmp_path: Path) -> None:
    """A mapping that says rad for an arm in degrees: refused before the first command."""
    mapping = toy_mapping()
    wrong = replace(mapping, joints={name: replace(entry, unit="rad") for name, entry in mapping.joints.items()})
    write_mapping(tmp_path / "toy.json", confirmed(wrong))
    words = [f"bundle={reach_bundle()}", TOY, f"mapping={tmp_path / 'toy.json'}"]
    outcome = run(deploy_command.main, words)
    assert outcome.code == 2
    assert "outside of its limits" in outcome.stderr
    assert "are these degrees" in outcome.stderr


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("unplugged", 2, "the toy arm was unplugged"),
        ("io", 2, "the port of the toy arm failed"),
        ("bug", 1, "'joint9'"),
    ],
)
def test_a_robot_that_fails_ends_the_deployment_with_its_reason_and_a_report(
    tmp_path: Path, fault: str, code: int, reason: str
) -> None:
    write_mapping(tmp_path / "toy.json", confirmed(toy_mapping()))
    options = json.dumps({"fails_after": 9, "fault": fault})
    words = [f"bundle={reach_bundle()}", TOY, f"mapping={tmp_path / 'toy.json'}", f"robot_options={options}"]
    outcome = run(deploy_command.main, [*words, f"report={tmp_path / 'report'}"])
    assert outcome.code == code
    assert outcome.stderr.splitlines()[-1].endswith(reason)
    assert ("Traceback" in outcome.stderr) == (fault == "bug")
    result = json.loads((tmp_path / "report" / "result.json").read_text())
    assert result["ended"] == {reason: 1}


def test_no_arm_is_moved_home_by_old_numbers() -> None:
    bundle = read_bundle(reach_bundle())
    arm = ToyArm(ToyConfig(fails_after=2, fault="stale"))
    robot, safety = MappedRobot(arm, toy_mapping(), bundle.arms), Safety(bundle.arms)
    arm.connect()
    safety.start(np.deg2rad(HOME_DEG), np.array([0.04]), time.monotonic())
    arm._now["base.pos"] += 40.0
    with pytest.raises(UserError, match=r"the observation is 3\.0.* s old, for 1 s"):
        move_home(robot, bundle.arms, safety, Clock())
    assert safety.counts["stale"] == 1
    assert len({sent["base.pos"] for sent in arm.sent[2:]}) == 1


@pytest.mark.slow(reason="LeRobot's imports")
def test_a_robot_on_lerobots_own_base_class_is_driven(root: Path, tmp_path: Path) -> None:
    environment = Path(sys.prefix) / "lerobot"
    if not (environment / ".installed").exists():
        pytest.skip(
            f"LeRobot 0.4.4 is not installed in {environment}: make VENV={sys.prefix} {environment / '.installed'}"
        )
    write_mapping(tmp_path / "toy.json", confirmed(toy_mapping()))
    script = [environment / "bin" / "python", Path(__file__).with_name("lerobot_arm.py"), reach_bundle()]
    variables = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*script, tmp_path / "toy.json"], cwd=root, capture_output=True, text=True, check=False, env=variables
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == 20
    assert result["sent"] >= 20
    assert result["names"] == sorted([*(f"{name}.pos" for name in NAMES), "gripper.pos"])


class ToyArmOfTwoNames(ToyArm):
    """It reports numbers of our own names too, which are something else."""

    raw: ClassVar = {"joint1.vel": 77.0, "cube_pos[0]": 88.0}

    @property
    def observation_features(self) -> dict[str, Any]:
        return super().observation_features | dict.fromkeys(self.raw, float)

    def get_observation(self) -> dict[str, Any]:
        return self.raw | super().get_observation() | self.raw


def test_what_the_mapping_names_counts_and_no_number_of_the_same_name() -> None:
    arm, mapping = ToyArmOfTwoNames(ToyConfig()), replace(toy_mapping(), external={"cube_pos[0]": "cube_x"})
    robot = MappedRobot(arm, mapping, arms_of_bundle())
    arm.connect()
    found = robot.get_observation()
    assert (found["joint1.vel"], found["cube_pos[0]"], found["goal[0]"]) == (0.0, 1.0, 0.5)
    with pytest.raises(UserError, match="Did you mean 'cube_x'"):
        MappedRobot(arm, replace(mapping, external={"cube_pos[0]": "cube_y"}), arms_of_bundle())


@pytest.mark.parametrize("stamp_s", [None, 0.0, 0.15, -5.0])
def test_speeds_are_of_the_times_at_which_positions_change(stamp_s: float | None) -> None:
    """A driver that measures at 10 Hz is asked at 100 Hz; its time stamp may be of another number, or wrong."""
    arm = ToyArm(ToyConfig())
    robot, speeds = MappedRobot(arm, toy_mapping(), arms_of_bundle()), list[float]()
    began_s = time.monotonic()

    def observe() -> dict[str, Any]:
        passed_s = min(0.6, (time.monotonic() - began_s) // 0.1 * 0.1)
        stamp = {} if stamp_s is None else {"timestamp": began_s + passed_s - stamp_s}
        return dict(arm._now) | {"base.pos": 30.0 * passed_s} | stamp

    arm.get_observation = observe  # type: ignore[method-assign]
    while time.monotonic() < began_s + 1.0:
        speeds.append(robot.get_observation()["joint1.vel"])
        time.sleep(0.01)
    assert np.median(speeds[25:50]) == pytest.approx(np.deg2rad(30.0), rel=0.25)
    assert speeds[-1] == 0


def test_an_encoder_s_last_digit_is_no_speed() -> None:
    """At 1 kHz an arm that stands still reads one digit more or less; a moving one has its speed."""
    arm = ToyArm(ToyConfig())
    robot, speeds = MappedRobot(arm, toy_mapping(), arms_of_bundle()), []
    arm.get_observation = lambda: dict(arm._now) | {"base.pos": 0.05 * (arm.observations % 2)}  # type: ignore[method-assign]
    for arm.observations in range(150):
        speeds.append(robot.get_observation()["joint1.vel"])
        time.sleep(0.001)
    assert np.abs(speeds).max() <= np.deg2rad(0.05) / 0.04
    began_s = time.monotonic()
    arm.get_observation = lambda: dict(arm._now) | {"base.pos": 30.0 * (time.monotonic() - began_s)}  # type: ignore[method-assign]
    for _ in range(60):
        robot.get_observation()
        time.sleep(0.002)
    assert robot.get_observation()["joint1.vel"] == pytest.approx(np.deg2rad(30.0), rel=0.5)
