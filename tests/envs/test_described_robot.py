"""A robot from a YAML file: the Panda as one is the Panda; what is missing or wrong is named with the nearest name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
import yaml

from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.randomization.non_model import PRESLIDING
from embodied.envs.mujoco.robots.described import build_robot
from embodied.envs.mujoco.robots.panda import Panda
from tests.envs.helpers import PANDA

HOME = {f"joint{i + 1}": float(value) for i, value in enumerate(Panda.home_qpos)}
FINGERS = ["left_finger", "right_finger"]
DATA = {
    "mjcf": str(Panda.mjcf), "tool": {"site": "tcp"}, "home": HOME,
    "gripper": {"actuators": FINGERS, "open": 0.04, "closed": -0.01, "bodies": FINGERS},
    "max_velocity": {f"joint{i + 1}": float(value) for i, value in enumerate(Panda.max_velocity)},
}  # fmt: skip


def written(folder: Path, **changes: object) -> str:
    path = folder / "my_arm.yaml"
    path.write_text(yaml.safe_dump({**DATA, **changes}))
    return str(path)


def test_the_panda_as_a_file_is_the_panda_bit_for_bit(tmp_path: Path) -> None:
    pools = [make_pool("lift", {"robot": name}, num_envs=4, num_threads=1) for name in ("panda", written(tmp_path))]
    assert pools[0].spec.arm == pools[1].spec.arm
    assert pools[0].spec.state == pools[1].spec.state
    for pool in pools:
        pool.reset(make_sampler(pool, seed=0))
    for _ in range(25):
        one, other = (pool.step(pool.task.expert()) for pool in pools)
        assert torch.equal(one.obs["state"], other.obs["state"])
        assert torch.equal(one.reward_NE, other.reward_NE)


def test_a_scene_is_cut_down_to_the_robot_and_gets_servos_tool_and_base(tmp_path: Path) -> None:
    text = Panda.mjcf.read_text()
    scene = text.replace("<worldbody>", '<worldbody><light/><geom type="plane" size="1 1 1"/><body name="block"/>')
    key = " ".join(map(str, [*Panda.home_qpos, 0.04, 0.04]))
    scene = scene.replace("</mujoco>", f'<keyframe><key name="rest" qpos="{key}"/></keyframe></mujoco>')
    scene = scene.replace('<site name="tcp" pos="0 0 0.1034" size="0.005" group="4"/>', "")
    (tmp_path / "scene.xml").write_text(scene)
    servo = {"kp": 500.0, "kd": 50.0, "force": 40.0, "armature": 0.2}
    robot = build_robot(
        written(
            tmp_path, mjcf="scene.xml", root="link0", home={}, keyframe="rest", servos={"joint3": servo},
            base_m=[0, 0, 0.1], tool={"body": "hand", "pos_m": [0, 0, 0.1034]}, control={"delta_m": 0.02},
        ),
        {"rotation": True},
    )  # fmt: skip
    names = [body.name for body in robot.spec().bodies]
    assert "block" not in names
    assert robot.config.delta_m == 0.02
    assert robot.config.rotation
    arm = robot.kinematics
    assert arm.joints[2].stiffness == 500
    assert arm.joints[2].max_effort == 40
    assert arm.joints[2].low == -2.8973
    assert arm.joints[0].pos_m[2] == pytest.approx(0.433)
    np.testing.assert_allclose(arm.tool_pos_m, PANDA.kinematics.tool_pos_m, atol=1e-12)
    np.testing.assert_allclose(robot.home_qpos, Panda.home_qpos)


def in_degrees(text: str) -> str:
    """Return the Panda's MJCF with ranges of hinges in degrees, as MJCF has them unless it says otherwise."""

    def converted(found: re.Match[str]) -> str:
        limits = " ".join(str(float(np.degrees(float(limit)))) for limit in found[2].split())
        return found[1] + limits + found[3]

    lines = [
        re.sub(r'( range=")([^"]*)(")', converted, line) if "<joint" in line and "slide" not in line else line
        for line in text.replace('angle="radian"', 'angle="degree"').splitlines()
    ]
    return "\n".join(lines)


def test_an_arm_in_degrees_has_the_limits_and_the_friction_of_one_in_radians(tmp_path: Path) -> None:
    others = '<default><motor ctrlrange="-1 1"/>'  # of actuators that the servos replace
    (tmp_path / "arm.xml").write_text(in_degrees(Panda.mjcf.read_text()).replace("<default>", others, 1))
    servos = {joint: {"kp": 500.0, "kd": 50.0, "force": 40.0} for joint in ("joint3", "joint4")}
    robot = build_robot(written(tmp_path, mjcf="arm.xml", servos=servos), {})
    for found, expected in zip(robot.kinematics.joints, PANDA.kinematics.joints, strict=True):
        np.testing.assert_allclose((found.low, found.high), (expected.low, expected.high), atol=1e-9)
    friction = {"randomization": {"friction": {"field": "joint_friction", "range": [0.1, 0.5]}}}
    env = make_pool("reach", {"robot": str(tmp_path / "my_arm.yaml")}, num_envs=2, num_threads=1, sim=friction)
    joints = [env.model.joint(f"joint{i}").id for i in range(1, 8)]
    np.testing.assert_allclose(env.model.jnt_springyield[joints], PRESLIDING)


def test_a_place_at_a_site_has_its_orientation_and_what_is_added_to_it(tmp_path: Path) -> None:
    site = '<site name="tcp" pos="0 0 0.1034" size="0.005" group="4"/>'
    turned = '<frame pos="0 0 0.1" euler="0 0 0.03"><site name="tool" pos="0.02 0 0" euler="0 0 0.04"/></frame>'
    (tmp_path / "arm.xml").write_text(Panda.mjcf.read_text().replace(site, turned))
    quat = [float(np.cos(0.01)), 0.0, 0.0, float(np.sin(0.01))]
    tool = {"site": "tool", "pos_m": [0.01, 0, 0.0034], "quat": quat}
    found = build_robot(written(tmp_path, mjcf="arm.xml", tool=tool), {}).kinematics
    flat = PANDA.kinematics  # 0.1034 m along the hand's z axis, about which all of it turns
    turn, away_m = 0.03 + 0.04 + 0.02, 0.02 * np.exp(0.03j) + 0.01 * np.exp(0.07j)
    hand = np.zeros(9), np.zeros(9)
    for matrix, of in zip(hand, (found, flat), strict=True):
        mujoco.mju_quat2Mat(matrix, np.array(of.tool_quat))
    moved, plain = (matrix.reshape(3, 3) for matrix in hand)
    added = plain.T @ (np.array(found.tool_pos_m) - flat.tool_pos_m)
    np.testing.assert_allclose(added, [away_m.real, away_m.imag, 0.0], atol=1e-9)
    np.testing.assert_allclose((plain.T @ moved)[:2, 0], [np.cos(turn), np.sin(turn)], atol=1e-9)
    with pytest.raises(UserError, match="tool: site tcp is the tool as it is"):
        build_robot(written(tmp_path, tool={"site": "tcp", "quat": quat}), {}).spec()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mjcf": "pnda.xml"}, "mjcf of robot my_arm.yaml 'pnda.xml'"),
        ({"mjcf": "no_such_package:a.xml"}, "package 'no_such_package' is not installed"),
        ({"home": HOME | {"joint9": 0.0}}, "joint in home of robot my_arm 'joint9'. Did you mean 'joint7'|'joint1'"),
        ({"home": {"joint1": 0.0}}, "home: lacks joint2, joint3"),
        ({"home": HOME | {"joint1": 7.85}}, r"home joint1: got 7.85, allowed: -2.9 to 2.9 \(degrees\?\)"),
        ({"home": {}, "keyframe": "rest"}, "keyframe in robot my_arm 'rest'"),
        ({"tool": {"site": "tpc"}}, "site in robot my_arm 'tpc'. Did you mean 'tcp'"),
        ({"tool": {}}, "needed: one of them"),
        ({"gripper": DATA["gripper"] | {"bodies": ["left_fingr", "hand"]}}, "Did you mean 'left_finger'"),  # type: ignore[operator]
        ({"gripper": DATA["gripper"] | {"actuators": FINGERS[:1]}}, "got right_finger too.* under gripper.actuators"),  # type: ignore[operator]
        ({"gripper": DATA["gripper"] | {"open": 0, "closed": 0.03}}, "0 m at open and 0.060 m at closed.*swap"),  # type: ignore[operator]
        ({"gripper": DATA["gripper"] | {"open": 0.0}}, "left_finger and right_finger touch at open.*pads"),  # type: ignore[operator]
        ({"home": HOME | {"joint6": 3.0}}, r"at home the tool is tilted by \d\d deg .*change home"),
        ({"servos": {"joint0": {"kp": 1, "kd": 1, "force": 1}}}, "joint in robot my_arm 'joint0'"),
        ({"camera": {"body": "hnd"}}, "body in robot my_arm 'hnd'. Did you mean 'hand'"),
        ({"grip": 1}, "^robot my_arm.yaml: unknown key 'grip'. Did you mean 'gripper'"),
        ({"tool": None}, "^robot my_arm.yaml: tool: got null"),
        (
            {"gripper": {"opened": 1, "closed": 0}},
            "^robot my_arm.yaml: unknown key 'gripper.opened'. Did you mean 'gripper.open'",
        ),
        ({"gripper": {"actuators": FINGERS, "closed": 0}}, "^robot my_arm.yaml: gripper.open is missing$"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_robot(written(tmp_path, **changes), {})


@pytest.mark.parametrize("turn", [1.6, -1.55, -3.1])
def test_a_tool_that_is_turned_at_home_gets_the_quat_that_turns_it_back(tmp_path: Path, turn: float) -> None:
    """Zero actions would turn the gripper."""
    (tmp_path / "arm.xml").write_text(Panda.mjcf.read_text().replace('name="tcp"', 'name="tool"'))
    home = HOME | {"joint7": HOME["joint7"] + turn}
    changes: dict[str, Any] = {"mjcf": "arm.xml", "home": home, "tool": {"site": "tool"}}
    with pytest.raises(UserError, match=r"at home the tool is turned by -?\d+\.\d deg about the vertical") as error:
        build_robot(written(tmp_path, **changes), {})
    changes["tool"]["quat"] = yaml.safe_load(str(error.value).partition("tool.quat: ")[2].partition("]")[0] + "]")
    robot = build_robot(written(tmp_path, **changes), {})
    _, mat, _ = Chain(robot.kinematics).tool(robot.home_qpos)
    np.testing.assert_allclose(mat, np.diag([1, -1, -1]), atol=0.05)
    build_robot(written(tmp_path, **changes | {"tool": {"site": "tool"}}), {"rotation": True})  # which can turn it


@pytest.mark.parametrize("servos", [{}, {"joint7": {"force": 12.0, "kp": 100.0, "kd": 10.0}}])
def test_a_joint_without_limits_may_turn_once_to_either_side_of_home(tmp_path: Path, servos: dict[str, object]) -> None:
    text = Panda.mjcf.read_text()
    for before, limited in (('<joint name="joint7"', "limited"), ('<position name="joint7"', "ctrllimited")):
        assert before in text
        text = text.replace(before, f'{before} {limited}="false"')
    (tmp_path / "free.xml").write_text(text)
    pool = make_pool("lift", {"robot": written(tmp_path, mjcf="free.xml", servos=servos)}, num_envs=8, num_threads=1)
    joint = pool.task.robot.kinematics.joints[6]
    assert (joint.low, joint.high) == (joint.home - 2 * np.pi, joint.home + 2 * np.pi)
    pool.reset(make_sampler(pool, seed=0))
    for _ in range(pool.spec.max_episode_steps):
        step = pool.step(pool.task.expert())
    assert step.episodes.success_at_end_M.float().mean() == 1


def test_what_the_file_of_an_arm_says_of_geoms_and_of_the_world_holds_for_the_arm_alone(tmp_path: Path) -> None:
    text = Panda.mjcf.read_text()
    of_main = '<geom group="3" margin="0.02" gap="0.01" solref="0.1 1" condim="1" friction="0.1 0 0" density="9"/>'
    flags = '<flag contact="disable" gravity="disable" actuation="disable"/>'
    world = f'<option gravity="0 0 -1">{flags}</option>'
    (tmp_path / "odd.xml").write_text(text.replace("<default>", f"{world}<default>{of_main}", 1))
    plain, odd = (
        make_pool("pick_place", {"robot": written(tmp_path, **changes)}, num_envs=1, num_threads=1).model
        for changes in ({}, {"mjcf": "odd.xml"})
    )
    bodies = [plain.body(name).id for name in ("world", "cube", "tray")]
    of_scene = np.isin(plain.geom_bodyid, bodies)
    for name in ("group", "margin", "gap", "solref", "condim", "friction"):
        ours, theirs = (getattr(model, f"geom_{name}") for model in (plain, odd))
        np.testing.assert_array_equal(ours[of_scene], theirs[of_scene], err_msg=name)
    np.testing.assert_array_equal(plain.opt.gravity, odd.opt.gravity)
    assert plain.opt.disableflags == odd.opt.disableflags


@pytest.mark.parametrize(
    "servo",
    [
        '<position kp="1000" kv="100" timeconst="0.1" name="joint1"',
        '<intvelocity kp="1000" kv="100" actrange="-3 3" name="joint1"',
    ],
)
def test_an_actuator_with_a_state_of_its_own_is_no_position_servo(tmp_path: Path, servo: str) -> None:
    """Its command is a rate, or comes late, and its state would begin each episode at 0 rad."""
    text = Panda.mjcf.read_text().replace('<position name="joint1" class="panda"', f'{servo} ctrlrange="-2 2"')
    (tmp_path / "late.xml").write_text(text)
    with pytest.raises(UserError, match="joint 'joint1': its actuator is no position servo"):
        make_pool("lift", {"robot": written(tmp_path, mjcf="late.xml")}, num_envs=1, num_threads=1)


def test_a_missing_file_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(UserError, match=r"Did you mean '.*my_arm\.yaml'"):
        build_robot(path.replace("my_arm", "my_amr"), {})


def test_an_arm_with_a_weight_holds_its_pose_by_its_targets_and_moves_by_position_alone(tmp_path: Path) -> None:
    mjcf = tmp_path / "heavy.xml"
    mjcf.write_text(Panda.mjcf.read_text().replace('gravcomp="1"', ""))
    sunk_m = {}
    for from_target in (False, True):
        control = {"from_target": from_target, "orientation": "free"}
        robot = written(
            tmp_path,
            mjcf=str(mjcf),
            servos={f"joint{i + 1}": {"kp": 3000.0, "kd": 300.0, "force": 200.0} for i in range(7)},
        )
        pool = make_pool("reach", {"robot": robot, "control": control}, num_envs=4, num_threads=1)
        pool.reset(make_sampler(pool, seed=0))
        for _ in range(5):
            pool.step(torch.zeros(4, 4))
        before = pool.arm.tcp_pos.clone()
        for _ in range(20):
            pool.step(torch.zeros(4, 4))
        sunk_m[from_target] = float((before - pool.arm.tcp_pos)[:, 2].max())
    assert sunk_m[True] < 0.02 < sunk_m[False]
    assert pool.spec.arm is not None
    assert (pool.spec.arm.orientation, pool.spec.arm.from_target) == ("free", True)
    assert pool.spec.state[6].name == "joint_target"
    before = pool.arm.tcp_pos.clone()
    pool.step(torch.tensor([[[1.0, 0, 0, 1]]] * 4)[:, 0])
    moved = pool.arm.tcp_pos - before
    assert (moved[:, 0] > 0.01).all()
    assert (moved[:, 1].abs() < 0.01).all()
