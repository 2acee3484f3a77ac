"""A bundle for two arms: what a robot of two arms measures and is told, its limits, its mapping."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from embodied import compare, deploy, export
from embodied.core.errors import UserError
from embodied.core.execution import EvalRollout
from embodied.core.spec import joints_of
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import BUNDLE_FILE, parse_bundle, read_bundle, read_simulation
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.control.arm import Controller, StateBuilder
from embodied.deployment.control.inference import Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Safety
from embodied.deployment.robots.base import Unusable, action_names, gripper_names, joint_names, values
from embodied.deployment.robots.mapping import MappedRobot, RobotMapping
from embodied.deployment.robots.setup import check_confirmed, confirm, fingers_in, poses, propose
from embodied.deployment.robots.sim import SimRobot
from embodied.envs import make_pool, make_sampler
from embodied.session.factories import evaluation_plans, make_env
from tests.commands.helpers import SMALL, run, run_train
from tests.deployment.exports import random_policy, small_config, write_small
from tests.deployment.toy_arm import ToyArm, ToyConfig

KINDS: list[dict[str, Any]] = [{}, {"task.robots": {"left": "so101", "right": "so101"}}]
SIDES = ("left_", "right_")


@cache
def bar_bundle(kind: int = 0) -> Path:
    path = Path(mkdtemp(prefix="bundle-"))
    write_small(path, small_config("lift_bar", "flow", **KINDS[kind]))
    return path


class TwoToys:
    """Two toy arms as one robot, as LeRobot's robots of two arms: the same names with left_ and right_ before them."""

    name = "two_toys"

    def __init__(self, config: ToyConfig) -> None:
        self.arms = {side: ToyArm(config) for side in SIDES}

    @property
    def observation_features(self) -> dict[str, Any]:
        return {side + name: kind for side, arm in self.arms.items() for name, kind in arm.observation_features.items()}

    @property
    def action_features(self) -> dict[str, Any]:
        return {side + name: kind for side, arm in self.arms.items() for name, kind in arm.action_features.items()}

    @property
    def is_connected(self) -> bool:
        return all(arm.is_connected for arm in self.arms.values())

    def connect(self, calibrate: bool = True) -> None:
        for arm in self.arms.values():
            arm.connect(calibrate)

    def disconnect(self) -> None:
        for arm in self.arms.values():
            arm.disconnect()

    def get_observation(self) -> dict[str, Any]:
        return {side + name: value for side, arm in self.arms.items() for name, value in arm.get_observation().items()}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        sent = {}
        for side, arm in self.arms.items():
            own = {name.removeprefix(side): value for name, value in action.items() if name.startswith(side)}
            sent |= {side + name: value for name, value in arm.send_action(own).items()}
        return sent


@pytest.mark.parametrize("kind", range(2))
def test_states_and_targets_are_those_of_training(kind: int) -> None:
    bundle = read_bundle(bar_bundle(kind))
    pool = make_pool(
        "lift_bar", {"robots": read_simulation(bar_bundle(kind))["task"]["robots"]}, num_envs=4, num_threads=1
    )
    pool.reset(make_sampler(pool, seed=3))
    draw = torch.Generator().manual_seed(0)
    for _ in range(8):
        pool.step(2 * torch.rand(4, 1, pool.spec.action_dim, generator=draw) - 1)
    builder, controller = StateBuilder(bundle), Controller(bundle.arms, bundle.action)
    scale, offset = (np.array([getattr(term, name) for term in bundle.action]) for name in ("scale", "offset"))
    names = [*joint_names(bundle.arms), *joint_names(bundle.arms, "vel"), *gripper_names(bundle.arms)]
    fingers_NG = np.stack([arm.finger_qpos.mean(-1) for arm in pool.arm.arms], 1)
    numbers = np.concatenate([pool.arm.joint_pos.numpy(), pool.arm.joint_vel.numpy(), fingers_NG], 1)
    quantities, obs = pool.task.observe(), pool.observe()["state"].numpy() / pool.spec.state_scale
    finger_targets = np.concatenate([arm.finger_targets[:, :1] for arm in pool.arm.arms], 1)
    last = np.concatenate([pool.arm.ctrl[:, arm.parts.arm.ctrl] for arm in pool.arm.arms], 1)
    chosen = 2 * torch.rand(4, bundle.action_dim, generator=draw).double().numpy() - 1
    qpos = pool.arm.joint_pos.numpy().copy()
    states = []
    for n in range(4):
        observation = dict(zip(names, numbers[n].tolist(), strict=True))
        for term in builder.external:
            observation |= dict(zip(term.entry_names, quantities[term.name][n].tolist(), strict=True))
        assert set(builder.needed) == set(observation)
        states.append(builder.state(observation, finger_targets[n], last[n]))
    same = ["_fingers[" not in name for name in pool.spec.state_names]
    np.testing.assert_allclose(np.stack(states)[:, same], obs[:, same], atol=2e-6)
    pool.arm.apply(chosen, None)
    base = last if bundle.arm.from_target else qpos
    for n in range(4):
        joints, fingers = controller.targets(chosen[n] * scale + offset, base[n], finger_targets[n])
        expected = [pool.arm.ctrl[n, arm.parts.arm.ctrl] for arm in pool.arm.arms]
        np.testing.assert_allclose(joints, np.concatenate(expected), atol=1e-9)
        for finger, arm in zip(fingers, pool.arm.arms, strict=True):
            np.testing.assert_allclose(pool.arm.ctrl[n, arm.parts.gripper.ctrl], finger, atol=1e-9)


def test_an_episode_is_the_one_of_the_evaluation() -> None:
    """With SO-101s: each has one finger, so the state is the same to the last digit."""
    config, path = small_config("lift_bar", "flow", **KINDS[1]), bar_bundle(1)
    bundle, env, expected = read_bundle(path), make_env(config, 1, 1), list[np.ndarray]()
    env.on_control_step = lambda pool: expected.append(pool.arm.joint_pos[0].numpy().copy())
    rollout = EvalRollout(random_policy(config), env, evaluation_plans(env.spec, 2, 5).rows(slice(1, 2)), seeded=False)
    while len(expected) < 36:
        rollout.step()
    env.close()
    safety = Safety(bundle.arms)
    safety.limits = replace(safety.limits, ramp_s=0.0)
    with SimRobot(bundle, read_simulation(path), lockstep=True) as robot:
        assert set(robot.action_features) == {*joint_names(bundle.arms), "left_gripper.pos", "right_gripper.pos"}
        robot.reset(5, 1)
        inference = Inference(PolicyRunner(path), robot, simulated=True)
        record = ControlLoop(bundle, robot, inference, safety).run(steps=36)
    assert record.interventions == {}
    np.testing.assert_allclose(record.stack("qpos")[1:], np.stack(expected)[:35], atol=1e-6)


@pytest.mark.slow(reason="trains, exports, compares and deploys")
def test_a_run_and_its_bundle_agree_and_drive_both_arms(tmp_path: Path) -> None:
    trained, bundle, report = tmp_path / "run", tmp_path / "bundle", tmp_path / "report"
    words = [*SMALL, "task=lift_bar", "task.max_episode_steps=10", "total_steps=256", f"out={trained}"]
    assert run_train(*words).code == 0
    assert run(export.main, [f"run={trained}", f"out={bundle}", "episodes=2"]).result["parity_max"] < 1e-5
    words = [f"policies=[{trained},{bundle}]", "limit=20", "num_threads=1", f"out={tmp_path}/compared.json"]
    assert run(compare.main, words).result["solved_by_one"] == [0, 0]
    for words in (["episodes=2", "lockstep=true", "perturbation=real", f"report={report}"], ["episodes=1"]):
        driven = run(deploy.main, [f"bundle={bundle}", "robot=sim", "video=false", *words])
        assert driven.code == 0, driven.stderr
        assert driven.result["ended"] == {"time limit": driven.result["episodes"]}
        assert "right_joint7" in driven.stderr
        assert "nothing keeps the two arms from touching each other" in driven.stderr
        assert "did not reach its default pose" not in driven.stderr
    assert "right_joint7" in (report / "report.html").read_text()


# -- limits ------------------------------------------------------------------------------------------------------------
def started() -> tuple[Safety, np.ndarray, np.ndarray]:
    arms = read_bundle(bar_bundle()).arms
    safety, home = Safety(arms), np.array([joint.home for joint in joints_of(arms).values()])
    fingers = np.array([0.04, 0.04])
    safety.start(home, fingers, 0.0)
    return safety, home, fingers


def test_each_tool_has_a_box_of_its_own() -> None:
    """One tool that is outside, and may come back, lets the other one no further out."""
    safety, home, fingers = started()
    low = safety.limits.workspace_low_m.copy()
    low[0, 2] = safety.chains[0].tool(home[:7])[0][2] + 0.05  # the left tool is 5 cm too low
    low[1, 2] = safety.chains[1].tool(home[7:])[0][2]
    safety.limits = replace(safety.limits, workspace_low_m=low)
    down = home.copy()
    down[8] += 0.1  # the right shoulder leans forward
    assert safety.chains[1].tool(down[7:])[0][2] < low[1, 2] - 1e-3
    sent, _ = safety.filter(down, fingers, home, np.zeros(14), 5.0)
    np.testing.assert_array_equal(sent, home)
    assert safety.counts["workspace"] == 1


def test_an_arm_that_is_outside_lets_the_other_one_hold_its_targets() -> None:
    safety, home, fingers = started()
    low = safety.limits.workspace_low_m.copy()
    low[0, 2] = safety.chains[0].tool(home[:7])[0][2] + 0.002
    safety.limits = replace(safety.limits, workspace_low_m=low)
    down, sagged = home.copy(), home.copy()
    down[1] += 0.1  # the left shoulder leans forward
    sagged[8] += 0.01  # the right one sags under the load
    for tick in range(10):
        sent, _ = safety.filter(down, fingers, sagged, np.zeros(14), 5.0 + 0.05 * tick)
    np.testing.assert_array_equal(sent[7:], home[7:])
    assert "the left tool would be" in safety.log[-1].detail


@pytest.mark.parametrize("seed", range(3))
def test_nothing_beyond_a_limit_of_either_arm_leaves(seed: int) -> None:
    random, (safety, home, _) = np.random.default_rng(seed), started()
    limits, qpos, extremes = safety.limits, home.copy(), [np.nan, np.inf, -np.inf, 1e9, -1e9]
    for tick in range(300):
        targets = qpos + random.normal(size=14) * random.choice([0.01, 0.3, 10.0], size=2).repeat(7)
        if random.random() < 0.2:
            targets[random.integers(14)] = random.choice(extremes)
        fingers = random.choice([0.02, *extremes], size=2)
        qvel = random.normal(size=14) * random.choice([0.1, 5.0], size=2).repeat(7)
        sent, sent_fingers = safety.filter(targets, fingers, qpos, qvel, 5.0 + 0.05 * tick)
        assert ((sent >= limits.low_J) & (sent <= limits.high_J)).all()
        assert (np.abs(sent - qpos) <= limits.max_lead_J + 1e-9).all()
        assert ((sent_fingers >= limits.finger_low_m) & (sent_fingers <= limits.finger_high_m)).all()
        for chain, own, low, high in zip(
            safety.chains, np.split(sent, 2), limits.workspace_low_m, limits.workspace_high_m, strict=True
        ):
            tool = chain.tool(own)[0]
            assert ((tool >= low - 1e-6) & (tool <= high + 1e-6)).all()
        qpos = qpos + 0.5 * (sent - qpos)
    assert {"not finite", "lead", "velocity", "gripper", "workspace"} <= set(safety.counts)


def test_what_is_wrong_with_one_arm_holds_both() -> None:
    safety, home, fingers = started()
    sent, _ = safety.filter(home + 0.01, fingers, home, np.zeros(14), 5.0)
    broken = home.copy()
    broken[13] = np.nan
    held, _ = safety.filter(home + 0.05, fingers, broken, np.zeros(14), 5.05)
    np.testing.assert_array_equal(held, sent)
    jumped = home.copy()
    jumped[13] += 2.0
    safety.check_moves(home, 5.1)
    with pytest.raises(Unusable, match=r"right_joint7 moved by \+2\.000 rad"):
        safety.check_moves(jumped, 5.15)
    _, closed = safety.filter(home, np.array([0.04, -1.0]), home, np.zeros(14), 5.2)
    assert closed.tolist() == [0.04, safety.limits.finger_low_m]


def test_an_arm_that_is_frozen_is_noticed_while_the_other_one_moves() -> None:
    safety, home, fingers = started()
    qpos = home.copy()
    for tick in range(22):
        safety.check_moves(qpos.copy(), 5.0 + 0.05 * tick)
        safety.filter(home + 0.2, fingers, qpos, np.zeros(14), 5.0 + 0.05 * tick)
        qpos[7:] += 1e-4  # the right arm alone
    with pytest.raises(Unusable, match="stay the same, to the last digit"):
        safety.check_moves(qpos, 6.1)


# -- a robot's own names -----------------------------------------------------------------------------------------------
class Panda2(TwoToys):
    """Two arms that count in our units, in a pose of the confirmation."""

    def __init__(self, bundle: Bundle, pose: str) -> None:
        super().__init__(ToyConfig())
        numbers = [*poses(bundle.arms)[pose].tolist(), *fingers_in(bundle.arms)[pose].tolist()]
        seen = dict(zip(action_names(bundle.arms), numbers, strict=True))
        for side, arm in self.arms.items():
            arm._now = {name.removeprefix(side): value for name, value in seen.items() if name.startswith(side)}
            arm._target = dict(arm._now)
        self.connect()


def confirmed_in_both(bundle: Bundle, mapping: RobotMapping) -> RobotMapping:
    for pose in ("default", "second"):
        mapped = MappedRobot(Panda2(bundle, pose), mapping, bundle.arms)
        seen = mapped.get_observation()
        numbers = (values(seen, names(bundle.arms)) for names in (joint_names, gripper_names))
        mapping = confirm(mapped, "A. Person", *numbers)
    check_confirmed(MappedRobot(Panda2(bundle, "default"), mapping, bundle.arms))
    return mapping


def test_the_draft_of_a_robot_with_two_arms_is_confirmed_in_both_poses() -> None:
    bundle = read_bundle(bar_bundle())
    mapping = propose(bundle, Panda2(bundle, "default"))
    assert (mapping.gripper.name, mapping.gripper.unit) == ("left_gripper.pos", "m")
    assert mapping.right_gripper is not None
    assert replace(confirmed_in_both(bundle, mapping), confirmed=None) == mapping


def exchanged(mapping: RobotMapping, *joints: str) -> RobotMapping:
    twins = {f"{a}{joint}": mapping.joints[f"{b}{joint}"] for joint in joints for a, b in (SIDES, SIDES[::-1])}
    return replace(mapping, joints=mapping.joints | twins)


@pytest.mark.parametrize("kind", range(2))
def test_exchanged_arms_are_not_confirmed(kind: int) -> None:
    bundle = read_bundle(bar_bundle(kind))
    mapping = propose(bundle, Panda2(bundle, "default"))
    names = [joint.name for joint in bundle.arm.joints]
    for wrong in (exchanged(mapping, *names), *(exchanged(mapping, name) for name in names)):
        with pytest.raises(UserError, match="does not read the second pose: left_"):
            confirmed_in_both(bundle, wrong)
    assert mapping.right_gripper is not None
    grippers = replace(mapping, gripper=mapping.right_gripper, right_gripper=mapping.gripper)
    with pytest.raises(
        UserError, match=r"reads the left gripper at .* In this pose it has to be open: .* the two are exchanged"
    ):
        confirmed_in_both(bundle, grippers)


def test_names_that_do_not_say_which_arm_they_are_of_are_left_to_a_person(tmp_path: Path) -> None:
    bundle, robot = read_bundle(bar_bundle()), Panda2(read_bundle(bar_bundle()), "default")
    for arm in robot.arms.values():
        arm._now = {name.replace("joint", "axis").replace("gripper", "finger_1"): at for name, at in arm._now.items()}
        arm._target = dict(arm._now)
    mapping = propose(bundle, robot)
    assert mapping.joints["right_joint3"].name == "right_joint3.pos"
    assert mapping.gripper.name == "left_gripper.pos"
    with pytest.raises(UserError, match=r"unknown name in the robot's actions 'left_gripper\.pos'"):
        MappedRobot(robot, mapping, bundle.arms)


def test_a_mapping_of_two_arms_needs_both_grippers() -> None:
    bundle = read_bundle(bar_bundle())
    robot = Panda2(bundle, "default")
    mapping = propose(bundle, robot)
    mapped = MappedRobot(robot, mapping, bundle.arms)
    grippers = {"left_gripper.pos": 0.01, "right_gripper.pos": 0.03}
    sent = mapped.send_action(dict.fromkeys(joint_names(bundle.arms), 0.1) | grippers)
    assert sent["right_gripper.pos"] == pytest.approx(0.03)
    assert robot.arms["left_"].sent[-1]["gripper.pos"] == pytest.approx(0.01)
    with pytest.raises(UserError, match="right_gripper: got none, and the policy has 2 arms"):
        MappedRobot(robot, replace(mapping, right_gripper=None), bundle.arms)


def test_speeds_of_an_arm_that_is_measured_less_often_are_its_own() -> None:
    bundle = read_bundle(bar_bundle())
    robot = Panda2(bundle, "default")
    mapped, speeds, began_s = MappedRobot(robot, propose(bundle, robot), bundle.arms), [], time.monotonic()
    starts = {side: arm._now["joint1.pos"] for side, arm in robot.arms.items()}
    while (now_s := time.monotonic() - began_s) < 0.6:
        for side, period_s in zip(SIDES, (0.01, 0.1), strict=True):
            arm = robot.arms[side]
            arm._now["joint1.pos"] = arm._target["joint1.pos"] = starts[side] + now_s // period_s * period_s
        seen = mapped.get_observation()
        if now_s > 0.35:
            speeds.append((seen["left_joint1.vel"], seen["right_joint1.vel"]))
        time.sleep(0.005)
    assert np.abs(np.median(speeds, 0) - 1).max() < 0.3
    assert np.std([right for _, right in speeds]) < 0.3


# -- what was changed --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["right_arm"]["joints"].pop(), "right_arm: is of another kind than arm"),
        (lambda c: c["right_arm"]["joints"].clear(), "right_arm: is of another kind than arm"),
        (lambda c: c["right_arm"]["joints"][3].update(high=-0.1), "right_arm: is of another kind than arm"),
        (lambda c: c["right_arm"]["gripper"].update(open_m=0.03), "right_arm: is of another kind than arm"),
        (lambda c: c["right_arm"]["joints"][0].update(max_velocity=1e6), "right_arm.joints.0..max_velocity: got 1e"),
        (lambda c: c["right_arm"].update(workspace_low_m=[9, 9, 9]), "right_arm.workspace: low 9 is not below"),
        (lambda c: c["right_arm"].update(from_target=1), "right_arm.from_target"),
        (lambda c: c.pop("right_arm"), "action: has 8 entries, the arm's control needs 4"),
        (lambda c: c["action"][3].update(scale=1.0), "action: left_gripper is -0.985 to 1.015 m, the gripper's"),
        (lambda c: c["action"][4].update(scale=-0.06), "action: a scale is -0.06, allowed: above 0"),
        (lambda c: c["action"].__delitem__(slice(1, None)), "action: has 1 entries, the"),
        (lambda c: c["action"].clear(), "action: has 0 entries, the arm's control needs 8"),
        (
            lambda c: c["action"].reverse(),
            "action: entries 0 to 3 are of one arm, and have names that begin with left_",
        ),
        (lambda c: c["state"][6].update(size=8), "state: right_joint_pos has 8 entries, the arm needs 7"),
    ],
)
def test_a_second_arm_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    content = json.loads((bar_bundle() / BUNDLE_FILE).read_text())
    assert parse_bundle(content, "bundle.json").right_arm is not None
    change(content)
    with pytest.raises(UserError, match=message):
        parse_bundle(content, "bundle.json")
