"""Faults while a robot is driven: it holds, the reason is said, and nothing beyond the limits leaves."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied import deploy as deploy_command
from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.deployment.bundle.description import SIMULATION_FILE
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.control.inference import Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Limits, Safety
from embodied.deployment.control.site import EmergencyKey
from embodied.deployment.robots.base import Observation
from embodied.deployment.robots.mapping import write_mapping
from embodied.deployment.robots.sim import SimRobot
from embodied.deployment.serving.protocol import encode
from tests.commands.helpers import run
from tests.deployment.exports import flow_bundle
from tests.deployment.test_client import saying
from tests.deployment.test_mapping import TOY, confirmed, reach_bundle, toy_mapping
from tests.deployment.toy_arm import ToyArm

BUNDLE = read_bundle(flow_bundle())
JOINTS = [f"{joint.name}.pos" for joint in BUNDLE.arm.joints]


class Still:
    """A planner of small displacements."""

    bundle = BUNDLE

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        return np.tile(np.float32([0.005, 0, 0, 0.04]), (1, 4, 1))


class Faulty(SimRobot):
    """The simulated robot with a measurement that is wrong in some observations."""

    blind: range = range(0)
    broken: str = ""
    reads: Any = float("nan")

    def begin(self, **faults: Any) -> None:
        self.reset(0, 0)
        self.seen, self.commands = 0, list[dict[str, float]]()
        self.blind, self.broken, self.reads = range(0), "", float("nan")
        self.__dict__.update(faults)

    def get_observation(self) -> Observation:
        self.seen += 1
        found = super().get_observation()
        return found | {self.broken: self.reads} if self.seen in self.blind else found

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.commands.append(action)
        return super().send_action(action)


@pytest.fixture(scope="module")
def robot() -> Iterator[Faulty]:
    simulation = json.loads((flow_bundle() / SIMULATION_FILE).read_text())
    with Faulty(BUNDLE, simulation, lockstep=True) as connected:
        yield connected


def loop_on(robot: Faulty, **options: Any) -> ControlLoop:
    return ControlLoop(
        BUNDLE, robot, Inference(Still(), robot, simulated=True), Safety(BUNDLE.arms), **options
    )  # fmt: skip


# -- sensors and robots ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("broken", ["joint3.pos", "joint5.vel", "gripper.pos", "cube_pos[1]"])
def test_a_sensor_that_fails_for_a_moment_holds_the_robot(robot: Faulty, broken: str) -> None:
    robot.begin(broken=broken, blind=range(7, 10))
    record = loop_on(robot).run(steps=12)
    assert (record.reason, len(record.steps), record.waited_ticks) == ("time limit", 12, 3)
    assert record.interventions["not finite"] == 1
    held = robot.commands[4:8]  # of the last observation before, and of the three blind ones
    assert all(command == held[0] for command in held)
    assert all(np.isfinite([*command.values()]).all() for command in robot.commands)


def test_the_time_that_a_person_takes_to_answer_is_no_time_without_measurements(robot: Faulty) -> None:
    """A wrong number before the question and another one after it are two moments, not one of 30 s."""
    robot.begin(broken="joint3.pos", blind=range(4, 7, 2))  # of every second observation an action is asked

    def think(action: str) -> bool:
        robot.sleep_until(robot.now() + 30.0)
        return True

    record = loop_on(robot, confirm=think).run(steps=4)
    assert (record.reason, len(record.steps), record.waited_ticks) == ("time limit", 4, 2)
    assert record.interventions["not finite"] == 2


@pytest.mark.parametrize("reads", [None, [0.1, 0.2]])
def test_a_number_that_is_missing_for_a_moment_holds_the_robot_but_nothing_begins_without(
    robot: Faulty, reads: Any
) -> None:
    robot.begin(broken="cube_pos[1]", reads=reads, blind=range(7, 10))
    record = loop_on(robot).run(steps=12)
    assert (record.reason, len(record.steps), record.interventions["lacking"]) == ("time limit", 12, 1)
    robot.begin(broken="cube_pos[1]", reads=reads, blind=range(2, 10))
    with pytest.raises(UserError, match=r"the robot's observation .*cube_pos\[1\]"):
        loop_on(robot).run(steps=12)
    assert robot.commands == []


def test_a_measurement_far_from_training_holds_the_robot_but_not_at_the_beginning(robot: Faulty) -> None:
    robot.begin(broken="cube_pos[1]", reads=40.0, blind=range(7, 10))
    record = loop_on(robot).run(steps=12)
    assert (record.reason, len(record.steps), record.waited_ticks) == ("time limit", 12, 3)
    assert record.interventions["range"] == 1
    assert np.abs(record.stack("state")).max() < 40.0  # no plan was made from it
    robot.begin(broken="cube_pos[1]", reads=40.0, blind=range(2, 10))
    with pytest.raises(UserError, match=r"cube_pos\[1\] is 40, training saw .* check unit"):
        loop_on(robot).run(steps=12)
    assert robot.commands == []


def test_a_joint_that_jumps_for_a_moment_holds_the_robot_and_one_that_stays_away_ends_the_episode(
    robot: Faulty,
) -> None:
    robot.begin(broken="joint1.pos", reads=0.6, blind=range(7, 8))
    loop = loop_on(robot)
    record = loop.run(steps=12)
    assert (len(record.steps), record.waited_ticks, record.interventions["jump"]) == (12, 1, 1)
    assert "joint1 moved by +0." in loop.safety.log[-1].detail
    assert robot.commands[5] == robot.commands[4]
    first = np.array([command["joint1.pos"] for command in robot.commands])
    assert np.abs(np.diff(first)).max() < 0.1
    robot.begin(broken="joint1.pos", reads=0.6, blind=range(7, 1000))
    with pytest.raises(UserError, match=r"joint1 moved by .* which it cannot, for 1 s"):
        loop_on(robot).run()


def test_a_sensor_that_stays_broken_ends_the_episode(robot: Faulty) -> None:
    robot.begin(broken="joint3.vel", blind=range(7, 1000))
    loop = loop_on(robot)
    with pytest.raises(UserError, match=r"not finite in joint3.vel, for 1 s"):
        loop.run()
    assert 5 + 19 <= loop.record.ticks <= 5 + 21
    assert all(command == robot.commands[4] for command in robot.commands[5:])


def test_what_the_robot_changes_is_noticed_and_recorded(robot: Faulty) -> None:
    robot.begin()
    loop, send = loop_on(robot), robot.send_action
    robot.send_action = lambda action: send(action | {"joint4.pos": -2.0})  # type: ignore[method-assign]
    try:
        record = loop.run(steps=3)
    finally:
        del robot.send_action
    assert record.interventions["robot"] == 1
    assert [target[3] for target in record.stack("target")] == [-2.0] * 3
    assert "it sent joint4.pos -2.0000 in place of" in loop.safety.log[-1].detail
    for answer in ({"gripper.pos": 0.0}, {"joint4.pos": float("nan")}):
        robot.begin()
        loop, send = loop_on(robot), robot.send_action
        robot.send_action = lambda action, send=send, answer=answer: send(action) | answer  # type: ignore[misc, method-assign]
        try:
            record = loop.run(steps=3)
        finally:
            del robot.send_action
        assert record.interventions["robot"] == 1
        assert f"it sent {next(iter(answer))} " in loop.safety.log[-1].detail
        assert np.isfinite(record.stack("target")).all()


def test_the_recorded_state_is_what_the_policy_saw(robot: Faulty) -> None:
    robot.begin()
    seen: list[NDArray[Any]] = []

    class Noting(Still):
        def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
            seen.append(inputs["state"][0])
            return np.tile(np.float32([0, 0, 0, 0.015]), (1, 4, 1))  # it moves the finger target

    loop = loop_on(robot)
    loop.inference.planner = Noting()
    record = loop.run(steps=9)
    np.testing.assert_array_equal(record.stack("state")[::4], np.stack(seen))


# -- policies ----------------------------------------------------------------------------------------------------------
class Ticking:
    """A clock that moves when it is told to."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def sleep_until(self, time_s: float) -> None:
        self.time_s = max(self.time_s, time_s)


def test_a_latency_ends_when_the_chunk_was_planned_not_when_it_is_taken() -> None:
    clock = Ticking()

    class Slow(Still):
        def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
            clock.time_s += 0.02
            return super().plan(inputs)

    with closing(Inference(Slow(), clock)) as inference:
        inference.submit({})
        assert inference._future is not None
        wait([inference._future])
        clock.time_s = 0.05  # the next control step
        taken = inference.take()
        assert taken is not None
        assert taken[1] == pytest.approx(0.02)


def test_a_policy_that_hangs_is_noticed_and_its_error_raised() -> None:
    clock, gate = Ticking(), threading.Event()

    class Hanging(Still):
        def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
            assert gate.wait(60)
            raise UserError("it woke up")

    with closing(Inference(Hanging(), clock, added_s=0.1, timeout_s=2.0)) as inference:
        inference.submit({})
        clock.time_s = 2.0
        assert inference.take() is None
        clock.time_s = 2.2
        with pytest.raises(ConnectionError, match="the policy hangs: no chunk after 2 s"):
            inference.take()
        inference.drop()  # does not wait for it
        gate.set()
        inference.submit({})
        with pytest.raises(UserError, match="it woke up"):
            inference.take(60)


def test_a_robot_whose_policy_hangs_holds_and_the_deployment_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, gate, sent = iter(range(10_000)), threading.Event(), list[dict[str, float]]()
    plan, send = PolicyRunner.plan, ToyArm.send_action

    def hang(self: PolicyRunner, inputs: Any) -> Any:
        if next(plans) == 3:
            gate.wait(60)
        return plan(self, inputs)

    def note(self: ToyArm, action: dict[str, float]) -> dict[str, float]:
        sent.append(action)
        return send(self, action)

    monkeypatch.setattr(PolicyRunner, "plan", hang)
    monkeypatch.setattr(ToyArm, "send_action", note)
    write_mapping(tmp_path / "toy.json", confirmed(toy_mapping()))
    words = [f"bundle={reach_bundle()}", TOY, f"mapping={tmp_path / 'toy.json'}", "home=false", "plan_timeout_s=0.5"]
    outcome = run(deploy_command.main, words)
    gate.set()
    assert outcome.code == 2
    assert "the policy hangs: no chunk after 0.5 s" in outcome.stderr
    assert all(command == sent[-1] for command in sent[-5:])


# -- networks ----------------------------------------------------------------------------------------------------------
def test_no_server_loosens_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that describes the widest limits that it may, and plans as far and as fast as a bundle allows."""
    bundle = read_bundle(reach_bundle())
    joints = tuple(replace(joint, low=-100.0, high=100.0, max_velocity=20.0) for joint in bundle.arm.joints)
    arm = replace(bundle.arm, joints=joints, workspace_low_m=(-9.0,) * 3, workspace_high_m=(9.0,) * 3)
    scale, offset = (np.float32([getattr(term, name) for term in bundle.action]) for name in ("scale", "offset"))
    furthest = np.tile(offset + scale, (bundle.horizon, 1))
    moves: list[tuple[dict[str, float], dict[str, float]]] = []
    send = ToyArm.send_action

    def note(self: ToyArm, action: dict[str, float]) -> dict[str, float]:
        moves.append((dict(self._now), action))
        return send(self, action)

    monkeypatch.setattr(ToyArm, "send_action", note)
    mapping = toy_mapping()
    write_mapping(tmp_path / "toy.json", confirmed(mapping))
    described = asdict(replace(bundle, arm=arm))
    with saying(encode(described), lambda: encode({"actions": furthest})) as address:
        words = [f"bundle={reach_bundle()}", TOY, f"mapping={tmp_path / 'toy.json'}", f"server={address}", "home=false"]
        outcome = run(deploy_command.main, words)
    assert outcome.code == 0 or "check unit, order, sign and place" in outcome.stderr, outcome.stderr  # it came far
    limits, chain, leads = Limits.of(bundle.arms), Chain(bundle.arm), []
    assert len(moves) > 10
    for before, command in moves:
        entries = [mapping.joints[joint.name] for joint in bundle.arm.joints]
        sent = np.array([entry.from_robot(command[entry.name]) for entry in entries])
        qpos = np.array([entry.from_robot(before[entry.name]) for entry in entries])
        assert ((sent >= limits.low_J - 1e-9) & (sent <= limits.high_J + 1e-9)).all()
        leads.append(np.abs(sent - qpos) / limits.max_lead_J)
        tool = chain.tool(sent)[0]
        assert ((tool >= limits.workspace_low_m - 1e-6) & (tool <= limits.workspace_high_m + 1e-6)).all()
    assert np.max(leads) == pytest.approx(1.0)


# -- people ------------------------------------------------------------------------------------------------------------
def test_a_stop_holds_the_measured_position_at_once(robot: Faulty) -> None:
    robot.begin()
    ticks = iter([False] * 5 + [True])
    record = loop_on(robot, stop=lambda: next(ticks)).run()
    assert (record.reason, record.ticks, record.interventions["stopped"]) == ("stopped", 5, 1)
    measured = robot.get_observation()
    last = robot.commands[-1]
    np.testing.assert_allclose([last[name] for name in JOINTS], [measured[name] for name in JOINTS], atol=1e-9)
    assert last["gripper.pos"] == robot.commands[-2]["gripper.pos"]


def test_the_emergency_key_is_any_key_and_the_terminal_is_restored() -> None:
    person, terminal = pty.openpty()
    with open(terminal, closefd=True) as stream:
        before = subprocess.run(["stty", "-g"], stdin=stream, capture_output=True, text=True, check=True).stdout
        os.write(person, b"typed before\n")
        select.select([stream], [], [])
        with EmergencyKey(stream) as key:
            assert key.watching
            assert not key.pressed()
            os.write(person, b" ")
            while not key.pressed():
                pass
        assert key.pressed()
        after = subprocess.run(["stty", "-g"], stdin=stream, capture_output=True, text=True, check=True).stdout
        assert after == before
    os.close(person)


def test_without_a_terminal_there_is_no_key() -> None:
    with open(os.devnull) as stream, EmergencyKey(stream) as key:
        assert not key.watching
        assert not key.pressed()


def test_a_key_on_the_terminal_stops_the_command(root: Path, tmp_path: Path) -> None:
    person, terminal = pty.openpty()
    words = [f"bundle={flow_bundle()}", "robot=sim", "episodes=9", f"report={tmp_path / 'report'}", "video=false"]
    with open(terminal, closefd=True) as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "embodied.deploy", *words],
            cwd=root, stdin=stream, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "press any key" in line:
                break
        os.write(person, b"x")
        stdout, stderr = process.communicate(timeout=120)
    os.close(person)
    assert process.returncode == 130, stderr
    assert json.loads(stdout)["ended"] == {"stopped": 1}
    assert (tmp_path / "report" / "report.html").is_file()
    log = [json.loads(line) for line in (tmp_path / "report" / "interventions.jsonl").read_text().splitlines()]
    assert "stopped" in {entry["kind"] for entry in log}
