"""The control loop on the simulated robot, which is a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.execution import EvalRollout
from embodied.deployment.bundle.description import SIMULATION_FILE
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.control.inference import Clock, Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Safety
from embodied.deployment.control.site import move_home
from embodied.deployment.robots.base import Robot
from embodied.deployment.robots.sim import SimRobot
from embodied.envs.mujoco.robot_file import REAL, Perturbation
from embodied.envs.mujoco.robots.gripper_arm import backlash
from embodied.envs.mujoco.robots.robot_process import SimulatedArm
from embodied.session.factories import evaluation_plans, make_env
from tests.deployment.builders import make_bundle
from tests.deployment.exports import flow_bundle, random_policy, small_config

BUNDLE = read_bundle(flow_bundle())
SIMULATION = json.loads((flow_bundle() / SIMULATION_FILE).read_text())


@pytest.fixture(scope="module")
def robot() -> Iterator[SimRobot]:
    with SimRobot(BUNDLE, SIMULATION, lockstep=True) as connected:
        yield connected


def loop_on(
    robot: SimRobot, planner: Any = None, latency_s: float = 0.0, ramp_s: float = 0.0, **options: Any
) -> ControlLoop:
    inference = Inference(planner or PolicyRunner(flow_bundle()), robot, latency_s, simulated=True)
    safety = Safety(BUNDLE.arms)
    safety.limits = replace(safety.limits, ramp_s=ramp_s)
    return ControlLoop(BUNDLE, robot, inference, safety, **options)


def test_an_episode_is_the_one_of_the_evaluation(robot: SimRobot) -> None:
    """The runner, controller and simulated robot together do what policy and pool do in training."""
    config = small_config("pick_place", "flow", **{"policy.head_hidden": [16]})
    policy = random_policy(config)
    env = make_env(config, 1, 1)
    expected: list[NDArray[np.float64]] = []
    env.on_control_step = lambda pool: expected.append(pool.arm.qpos[0, :7].copy())
    rollout = EvalRollout(policy, env, evaluation_plans(env.spec, 2, 5).rows(slice(1, 2)), seeded=False)
    for _ in range(19):
        rollout.step()
    env.close()

    robot.reset(5, 1)
    loop = loop_on(robot)
    record = loop.run(steps=77)
    assert record.interventions == {}
    np.testing.assert_allclose(record.stack("qpos")[1:], np.stack(expected)[:76], atol=2e-4)


def test_the_robot_follows_its_protocol(robot: SimRobot) -> None:
    assert isinstance(robot, Robot)
    assert robot.is_connected
    assert set(robot.action_features) == {*(f"joint{i}.pos" for i in range(1, 8)), "gripper.pos"}
    observation = robot.get_observation()
    assert set(observation) == set(robot.observation_features)


def test_latency_makes_a_synchronous_robot_wait_and_rtc_not(robot: SimRobot) -> None:
    robot.reset(0, 0)
    waiting = loop_on(robot, latency_s=0.1).run(steps=12)
    assert waiting.waited_ticks == 6  # two ticks for each of three chunks
    assert waiting.latencies_s == pytest.approx([0.1] * 3)
    robot.reset(0, 0)
    chunking = loop_on(robot, latency_s=0.1, schedule="rtc").run(steps=12)
    assert chunking.waited_ticks == 2  # before the first chunk
    assert chunking.missed_deadlines == 0


def test_a_policy_trained_under_delays_gets_delay_and_prefix(robot: SimRobot, tmp_path: Path) -> None:
    bundle, asked = make_bundle(tmp_path, max_delay=2, horizon=6), list[Mapping[str, NDArray[Any]]]()
    runner = PolicyRunner(tmp_path)

    class Noting:
        def __init__(self) -> None:
            self.bundle = bundle

        def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
            asked.append(inputs)
            return runner.plan(inputs)

    def loop_under(latency_s: float) -> ControlLoop:
        inference = Inference(Noting(), robot, latency_s, simulated=True)
        return ControlLoop(bundle, robot, inference, Safety(bundle.arms), schedule="rtc")

    loop = loop_under(0.1)
    for episode in range(2):
        robot.reset(0, episode)
        record = loop.run(steps=16)
        assert (record.padded_steps, record.beyond_max_delay) == (0, 0)
    # the robot waits for the first chunk of an episode; the first latency of all is not taken for typical
    assert [int(inputs["delay"][0]) for inputs in asked] == [0, 0, 2, 2, 0, 2, 2, 2]
    for k in (1, 2, 3):
        np.testing.assert_array_equal(asked[4 + k]["prefix"][0], record.stack("action")[4 * k : 4 * k + 2])
    asked.clear()
    robot.reset(0, 0)
    record = loop_under(0.15).run(steps=16)
    assert record.beyond_max_delay > 1
    assert max(int(inputs["delay"][0]) for inputs in asked) == 2


def test_linear_interpolation_reaches_the_same_targets_in_more_commands(robot: SimRobot) -> None:
    robot.reset(0, 0)
    held = loop_on(robot, Gentle()).run(steps=4)
    robot.reset(0, 0)
    smooth = loop_on(robot, Gentle(), rate_hz=100, interpolation="linear").run(steps=4)
    assert (held.ticks, smooth.ticks) == (4, 20)
    np.testing.assert_allclose(smooth.stack("target")[0], held.stack("target")[0], atol=1e-9)


def test_a_rate_that_does_not_fit_is_refused(robot: SimRobot) -> None:
    with pytest.raises(UserError, match="rate_hz: got 30, allowed: whole multiples of the policy's 20"):
        loop_on(robot, rate_hz=30)


def test_a_refused_action_is_not_sent(robot: SimRobot) -> None:
    robot.reset(0, 0)
    asked: list[str] = []

    def confirm(action: str) -> bool:
        asked.append(action)
        return len(asked) < 3

    record = loop_on(robot, confirm=confirm).run()
    assert (record.reason, len(record.steps)) == ("refused", 2)
    assert asked[0].startswith("dx ")


def test_an_arm_that_was_moved_while_a_person_was_asked_is_measured_again(robot: SimRobot) -> None:
    robot.reset(0, 0)
    asked = list[int]()
    joint1 = BUNDLE.arm.joints[0].name

    def move_it(_: str) -> bool:
        asked.append(len(asked))
        if len(asked) == 3:
            at = robot.get_observation()
            for tick in range(60):
                robot.send_action({name: at[name] for name in robot.action_features} | {f"{joint1}.pos": 0.01 * tick})
                robot.sleep_until(robot.now() + 0.05)
        return len(asked) <= 3

    record = loop_on(robot, confirm=move_it).run(steps=8)
    moved = record.steps[2].qpos[0] - record.steps[1].qpos[0]
    assert moved > 0.3
    assert abs(record.steps[2].target[0] - record.steps[2].qpos[0]) < 0.1


def test_the_time_that_a_person_takes_to_answer_is_not_missed(robot: SimRobot) -> None:
    robot.reset(0, 0)

    def think(action: str) -> bool:
        robot.sleep_until(robot.now() + 3.0)
        return True

    record = loop_on(robot, confirm=think).run(steps=4)
    assert (record.ticks, record.missed_deadlines, record.interventions) == (4, 0, {})


def test_an_episode_ends_after_its_last_control_step(robot: SimRobot) -> None:
    """Success is that of the state in which ``embodied.eval`` judges it, one control step after the last action."""
    robot.reset(0, 0)
    record = loop_on(robot).run(steps=10)
    assert robot.now() == pytest.approx(10 * BUNDLE.control_dt_s)
    assert record.control_steps_hz == pytest.approx(20.0)


class Gentle:
    """A planner that moves the tool by a centimetre per step."""

    bundle = BUNDLE

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        return np.tile(np.float32([0.01, 0, 0, 0.04]), (1, 4, 1))


class Broken:
    """A planner whose third chunk is not finite."""

    bundle = BUNDLE

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        self.plans += 1
        value = np.nan if self.plans == 3 else 0.0
        return np.full((1, 4, 4), value, np.float32)


def test_actions_that_are_not_finite_hold_the_robot(robot: SimRobot) -> None:
    robot.reset(0, 0)
    record = loop_on(robot, Broken()).run(steps=16)
    assert record.interventions["not finite"] == 1
    assert np.isfinite(record.stack("target")).all()
    held = record.stack("target")[8:12]
    np.testing.assert_allclose(held, np.broadcast_to(record.stack("target")[7], (4, 7)), atol=0.05)


def test_home_is_reached_within_the_limits(robot: SimRobot) -> None:
    robot.reset(0, 0)
    loop = loop_on(robot)
    loop.run(steps=20)
    assert move_home(robot, BUNDLE.arms, loop.safety, robot)
    observation = robot.get_observation()
    assert max(abs(observation[f"{joint.name}.pos"] - joint.home) for joint in BUNDLE.arm.joints) < 0.02


def test_the_way_home_is_straight_and_waits_for_an_arm_that_is_blocked(
    robot: SimRobot, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot.reset(0, 0)
    loop = loop_on(robot)
    loop.run(steps=20)
    send, sent, free_after = robot.send_action, list[list[float]](), 150
    joints = [f"{joint.name}.pos" for joint in BUNDLE.arm.joints]
    start = np.array([robot.get_observation()[name] for name in joints])

    def blocked(action: dict[str, float]) -> dict[str, float]:
        sent.append([action[name] for name in joints])
        stays = dict(zip(joints, start.tolist(), strict=True)) if len(sent) < free_after else {}
        send({**action, **stays})
        return action

    monkeypatch.setattr(robot, "send_action", blocked)
    assert move_home(robot, BUNDLE.arms, loop.safety, robot)
    targets, way = np.array(sent), np.array([joint.home for joint in BUNDLE.arm.joints]) - start
    waiting = targets[free_after - 20 : free_after - 1]
    assert np.abs(waiting - start).max() < 0.5 * loop.safety.limits.max_lead_J.max()
    np.testing.assert_allclose(waiting, np.broadcast_to(waiting[0], waiting.shape), atol=1e-3)
    share = (waiting[0] - start) @ way / (way @ way)
    assert 0.02 < share < 0.9
    np.testing.assert_allclose(waiting[0] - start, share * way, atol=5e-3)


def test_the_way_home_keeps_away_from_a_tightened_speed(robot: SimRobot, monkeypatch: pytest.MonkeyPatch) -> None:
    robot.reset(0, 0)
    loop, safety = loop_on(robot), Safety(BUNDLE.arms, 0.2)
    record = loop.run(steps=20)
    safety.start(record.steps[-1].qpos, loop.safety.hold()[1], robot.now())
    seen, observe = [], robot.get_observation
    monkeypatch.setattr(robot, "get_observation", lambda: seen.append(observe()) or seen[-1])
    assert move_home(robot, BUNDLE.arms, safety, robot)
    assert len(seen) > 20
    moved = np.array([[entry[f"{joint.name}.vel"] for joint in BUNDLE.arm.joints] for entry in seen[10:]])
    assert (np.abs(moved) < 0.75 * safety.limits.max_velocity_J).all()


def test_perturbations_change_the_arm() -> None:
    assert all(getattr(REAL, name) != value for name, value in asdict(Perturbation()).items())
    moved = []
    for perturbation in ({}, {"gains": 0.3}, {"action_delay_s": 0.2}, {"backlash_rad": 0.2}):
        arm = SimulatedArm(SIMULATION["task"], perturbation=Perturbation(**perturbation))
        start = arm.observe()
        targets = {f"{name}.pos": start[f"{name}.pos"] for name in arm.joints} | {"gripper.pos": start["gripper.pos"]}
        arm.act(targets | {"joint1.pos": start["joint1.pos"] + 0.1})
        while arm.time_s < 0.15:
            arm.step()
        moved.append(arm.observe()["joint1.pos"] - start["joint1.pos"])
        arm.pool.close()
    assert moved[0] > 0.05
    assert 0.001 < moved[1] < 0.7 * moved[0]
    assert abs(moved[2]) < 1e-3
    assert abs(moved[3]) < 1e-3


def test_backlash_swallows_small_reversals() -> None:
    output, outputs = np.zeros(1), []
    for value in (0.05, 0.2, 0.15, 0.05, -0.1):
        output = backlash(output, np.array([value]), 0.2)
        outputs.append(float(output[0]))
    assert outputs == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.0])


def test_a_robot_that_dies_is_a_clear_error_and_leaves_no_process() -> None:
    robot = SimRobot(BUNDLE, SIMULATION)
    robot.connect()
    assert robot._process is not None
    pid = robot._process.process.pid
    os.kill(pid, signal.SIGKILL)
    robot._process.wait()
    with pytest.raises(ConnectionError, match="the process of the simulated robot ended by SIGKILL"):
        robot.get_observation()
    robot.disconnect()
    assert not robot.is_connected


def test_the_process_ends_with_its_parent(root: Path) -> None:
    code = f"""
import json, os, sys
from pathlib import Path
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.robots.sim import SimRobot
path = Path({str(flow_bundle())!r})
robot = SimRobot(read_bundle(path), json.loads((path / "simulation.json").read_text()))
robot.connect()
print(robot._process.process.pid, flush=True)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    child = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the simulated robot outlived its parent"
        time.sleep(0.05)


def test_wrong_commands_are_refused_by_the_process(robot: SimRobot) -> None:
    with pytest.raises(UserError, match=r"needed joint1\.pos"):
        robot.send_action({"joint1.pos": 0.0})
    with pytest.raises(UserError, match="NaN"):
        robot.send_action(dict.fromkeys(robot.action_features, float("nan")))
    assert robot.is_connected


def test_real_time_keeps_its_rate() -> None:
    """Half a second in real time: ticks follow the clock, and inference is in a thread of its own."""
    with SimRobot(BUNDLE, SIMULATION) as robot:
        robot.reset(0, 0)
        inference = Inference(PolicyRunner(flow_bundle()), Clock())
        loop = ControlLoop(BUNDLE, robot, inference, Safety(BUNDLE.arms), schedule="rtc")
        record = loop.run(steps=10)
        inference.close()
        assert len(record.steps) == 10
        assert record.duration_s > 0.4
        assert len(record.latencies_s) >= 2
