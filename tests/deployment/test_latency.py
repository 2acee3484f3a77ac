"""When commands take effect under a latency, in the time of the physics."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied.core.process.child import Builder, ChildProcess
from embodied.deployment.bundle.description import SIMULATION_FILE
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.control.inference import Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Safety
from embodied.deployment.report import EpisodeRecord
from embodied.deployment.robots.sim import SimRobot
from embodied.envs.mujoco.robots import robot_process
from embodied.envs.mujoco.robots.robot_process import SimulatedArm
from tests.deployment.builders import make_bundle
from tests.deployment.exports import flow_bundle

BUNDLE = read_bundle(flow_bundle())
DT, HALF_STEP = BUNDLE.control_dt_s, 0.005
"""Control step, and half of a step of the physics, s."""


class Logging(SimulatedArm):
    """The simulated arm with a log of its commands and the time of the physics at which they take effect."""

    def reset(self, seed: int, episode: int) -> str:
        self.commands: list[tuple[float, dict[str, float]]] = []
        return super().reset(seed, episode)

    def act(self, targets: Mapping[str, float]) -> None:
        super().act(targets)
        self.commands.append((self.time_s, dict(targets)))


class InThread(ChildProcess):
    """A child process that is a thread here, at the other end of a connection."""

    is_alive = True

    def __init__(self, connection: Connection) -> None:
        self.name, self._connection, self._builder = "a thread", connection, Builder()


@contextmanager
def serving(lockstep: bool) -> Iterator[tuple[SimRobot, Logging]]:
    """Yield a robot whose process is a thread here, and its arm."""
    simulation = json.loads((flow_bundle() / SIMULATION_FILE).read_text())
    robot, arm = SimRobot(BUNDLE, simulation, lockstep=lockstep), Logging(simulation["task"])
    ours, theirs = Pipe()
    robot._process = InThread(ours)
    thread = threading.Thread(target=robot_process.serve, args=(arm, theirs, lockstep))
    thread.start()
    try:
        yield robot, arm
    finally:
        ours.close()
        thread.join()
        theirs.close()
        arm.pool.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[SimRobot, Logging]]:
    with serving(lockstep=True) as found:
        yield found


class Closing:
    """A planner whose first chunk holds the gripper open, and whose later ones close it."""

    bundle = BUNDLE

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        self.plans += 1
        return np.tile(np.float32([0.005, 0, 0, 0.04 if self.plans == 1 else 0.0]), (1, 4, 1))


def run(robot: SimRobot, planner: Any, latency_s: float, steps: int = 16, **options: Any) -> EpisodeRecord:
    robot.reset(0, 0)
    inference, bundle = Inference(planner, robot, latency_s, simulated=True), planner.bundle
    return ControlLoop(bundle, robot, inference, Safety(bundle.arms), **options).run(steps=steps)


@pytest.mark.parametrize("latency_ms", [0, 1, 7, 23, 26, 44, 74, 90, 100, 100.5, 104, 106, 120, 130])
@pytest.mark.parametrize("schedule", ["synchronous", "ensemble", "rtc"])
def test_a_chunk_takes_effect_at_the_physics_step_nearest_to_its_arrival(
    served: tuple[SimRobot, Logging], schedule: str, latency_ms: float
) -> None:
    """The robot waits for the first chunk; the second one is planned when the first is used up, or a step later."""
    robot, arm = served
    latency_s = latency_ms / 1e3
    run(robot, Closing(), latency_s, steps=8, schedule=schedule)
    closing = [time_s for time_s, command in arm.commands if command["gripper.pos"] < 0.039]
    planned_s = latency_s + (1 if schedule == "ensemble" else BUNDLE.execute) * DT
    assert abs(closing[0] - (planned_s + latency_s)) <= HALF_STEP + 1e-9


def test_half_a_millisecond_of_latency_costs_no_control_step(served: tuple[SimRobot, Logging]) -> None:
    robot, _ = served

    def path(latency_s: float) -> NDArray[np.float64]:
        return run(robot, PolicyRunner(flow_bundle()), latency_s, steps=40, schedule="rtc").stack("qpos")

    exact, little, step = path(0.1), path(0.1005), path(0.15)
    assert np.abs(little - exact).max() < 0.1 * np.abs(step - exact).max()


@pytest.mark.parametrize("latency_s", [0.05, 0.1, 0.15])
def test_a_chunk_that_arrives_with_a_tick_belongs_to_it(served: tuple[SimRobot, Logging], latency_s: float) -> None:
    robot, arm = served
    record = run(robot, PolicyRunner(flow_bundle()), latency_s, steps=20, schedule="rtc")
    assert len(arm.commands) == record.ticks


@pytest.mark.parametrize("latency_s", [0.1, 0.1005, 0.12])
def test_a_policy_trained_under_delays_is_told_the_nearest_one(
    served: tuple[SimRobot, Logging], tmp_path: Path, latency_s: float
) -> None:
    bundle, asked = make_bundle(tmp_path, max_delay=2, horizon=6), list[Mapping[str, NDArray[Any]]]()
    runner = PolicyRunner(tmp_path)

    def plan(inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        asked.append(inputs)
        return runner.plan(inputs)

    record = run(served[0], SimpleNamespace(bundle=bundle, plan=plan), latency_s, steps=20, schedule="rtc")
    assert [int(inputs["delay"][0]) for inputs in asked] == [0, 0, 2, 2, 2]
    assert (record.padded_steps, record.beyond_max_delay) == (0, 0)
    for k in (2, 3, 4):  # the prefix is what was executed
        np.testing.assert_array_equal(asked[k]["prefix"][0], record.stack("action")[4 * k : 4 * k + 2])


def test_a_wait_delays_the_steps_after_it_and_shortens_none(served: tuple[SimRobot, Logging]) -> None:
    robot, _ = served
    record = run(robot, PolicyRunner(flow_bundle()), 0.02, steps=12)
    # a step is recorded with the time of its observation; the first one of a chunk then waits for 20 ms
    began_s = record.stack("time_s")
    np.testing.assert_allclose(np.diff(began_s), [0.07 if i % 4 == 0 else 0.05 for i in range(11)], atol=1e-9)


def test_the_command_of_a_late_chunk_starts_from_the_pose_at_the_beginning_of_its_step(
    served: tuple[SimRobot, Logging],
) -> None:
    """An action is a displacement over a whole control step: the same one again changes no target."""
    robot, arm = served

    class Same(Closing):
        def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
            return np.tile(np.float32([0.01, 0, 0, 0.02]), (1, 4, 1))

    run(robot, Same(), 0.13, steps=8, schedule="rtc")
    sent = {round(time_s, 3): command for time_s, command in arm.commands}
    # the first step began at 0.13 s, and step 6 at 0.43 s; the chunk that was planned in step 4 arrived 0.13 s later
    assert sent[0.46] == pytest.approx(sent[0.43], abs=1e-9)


def test_real_time_physics_is_at_the_step_nearest_to_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(robot_process, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with serving(lockstep=False) as (robot, arm):
        robot.reset(0, 0)
        for clock.now_s, expected_s in ((0.014, 0.01), (0.016, 0.02), (0.0249, 0.02), (0.0251, 0.03)):
            deadline_s = time.monotonic() + 10.0
            while arm.time_s < expected_s - 1e-9 and time.monotonic() < deadline_s:
                time.sleep(0.001)
            robot.send_action(dict.fromkeys(robot.action_features, 0.0))
            assert arm.commands[-1][0] == pytest.approx(expected_s)


def test_latency_is_added_to_what_the_policy_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)

    def sleep(time_s: float) -> None:
        clock.now_s += time_s

    def plan(inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        sleep(0.02)
        return np.zeros((1, 4, 4), np.float32)

    monkeypatch.setattr("embodied.deployment.control.inference.time", SimpleNamespace(sleep=sleep))
    inference = Inference(SimpleNamespace(plan=plan), SimpleNamespace(now=lambda: clock.now_s), added_s=0.1)  # type: ignore[arg-type]
    inference.submit({})
    taken = inference.take(10.0)
    inference.close()
    assert taken is not None
    assert taken[1] == pytest.approx(0.12)
