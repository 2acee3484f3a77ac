"""Deployments that end badly: what was recorded is there, the first cause is read, and no arm moves unexpectedly."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied import deploy as deploy_command
from embodied.core.errors import UserError
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.control.safety import Safety
from embodied.deployment.report import load_episodes
from embodied.deployment.robots.mapping import RobotMapping, write_mapping
from embodied.session.deployed.deployment import claimed
from tests.commands.helpers import Outcome, run
from tests.commands.terminal import start_on_terminal
from tests.deployment.test_mapping import TOY, confirmed, reach_bundle, toy_mapping
from tests.deployment.toy_arm import HOME_DEG, NAMES, OFFSETS_DEG, SIGNS

BUNDLE = read_bundle(reach_bundle())
STEPS = 40  # of an episode of reach


def words_of(path: Path, mapping: RobotMapping | None = None, **options: Any) -> list[str]:
    """Return the words that drive the toy arm, with a report, a journal of its commands and a confirmed mapping."""
    write_mapping(path / "toy.json", confirmed(mapping or toy_mapping()))
    robot = json.dumps(options | {"journal": str(path / "journal")})
    return [
        f"bundle={reach_bundle()}", TOY, f"mapping={path / 'toy.json'}", f"robot_options={robot}",
        f"report={path / 'report'}",
    ]  # fmt: skip


def drive(path: Path, *words: str, mapping: RobotMapping | None = None, **options: Any) -> Outcome:
    return run(deploy_command.main, [*words_of(path, mapping, **options), *words])


def commands(path: Path) -> list[dict[str, float]]:
    """Return all commands that the toy arm got."""
    journal = path / "journal"
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def result_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "report" / "result.json").read_text())
    return found


def steps_of(path: Path) -> list[int]:
    """Return the control steps of each episode that was written."""
    records = load_episodes(path / "report" / "episodes", read_bundle(reach_bundle()))
    return [len(record.steps) for record in records]


# -- robots ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate_hz", [20, 100])
def test_a_robot_that_takes_no_command_ends_with_a_report_of_all_that_was_done(tmp_path: Path, rate_hz: int) -> None:
    outcome = drive(tmp_path, f"rate_hz={rate_hz}", fault="send", fails_after=33)
    assert outcome.code == 2
    assert outcome.stderr.splitlines()[-1] == "error: the toy arm takes no command"
    result = result_of(tmp_path)
    assert result["ended"] == {"the toy arm takes no command": 1}
    assert outcome.result["error"] == result["error"] == "the toy arm takes no command"
    assert len(commands(tmp_path)) == 32
    assert 0 < steps_of(tmp_path)[0] <= 32  # some ticks may have waited for a plan


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        ({"disconnect_fails": True}, 2, "the toy arm cannot be disconnected"),
        ({"disconnect_fails": True, "fails_after": 9, "fault": "io"}, 2, "the port of the toy arm failed"),
        ({"disconnect_fails": True, "fails_after": 9, "fault": "bug"}, 1, "'joint9'"),
    ],
)
def test_a_robot_that_cannot_be_disconnected_hides_nothing(
    tmp_path: Path, options: dict[str, Any], code: int, reason: str
) -> None:
    outcome = drive(tmp_path, "home=false", **options)
    assert outcome.code == code
    assert outcome.stderr.splitlines()[-1].endswith(reason)
    assert outcome.result["error"].endswith(reason)
    assert 0 < steps_of(tmp_path)[0] <= (8 if "fault" in options else STEPS)
    assert (tmp_path / "report" / "report.html").is_file()


def test_a_mapping_is_refused_with_its_reason_although_the_robot_cannot_be_disconnected(tmp_path: Path) -> None:
    words = words_of(tmp_path, disconnect_fails=True)
    write_mapping(tmp_path / "toy.json", toy_mapping())
    outcome = run(deploy_command.main, words)
    assert outcome.code == 2
    assert "nobody has confirmed this mapping" in outcome.stderr.splitlines()[-1]


def test_a_driver_that_hangs_is_an_event_and_the_arm_moves_no_more(tmp_path: Path) -> None:
    outcome = drive(tmp_path, fault="hang", fails_after=9)
    assert outcome.code == 2
    said = outcome.stderr.splitlines()[-1].removeprefix("error: ")
    assert re.fullmatch(r"the robot did not answer for \d+\.\d s \(get_observation\)", said)
    result = result_of(tmp_path)
    assert (result["ended"], result["interventions_by_kind"]["hung"]) == ({said: 1}, 1)
    assert 0 < steps_of(tmp_path)[0] <= 8
    with np.load(tmp_path / "report" / "episodes" / "0000.npz") as arrays:
        assert str(arrays["0/reason"]) == said
    assert len(commands(tmp_path)) == 8  # none after it answered, and no way home
    assert said in (tmp_path / "report" / "report.html").read_text()


def test_a_full_disk_hides_no_error_that_keeps_the_arm_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("embodied.session.deployed.deployment.save_episode", full)
    outcome = drive(tmp_path, fault="hang", fails_after=9)
    assert outcome.code == 2
    assert "the robot did not answer for" in outcome.stderr.splitlines()[-1]
    assert f"report={tmp_path / 'report'} cannot be written: No space left on device" in outcome.stderr
    assert len(commands(tmp_path)) == 8  # no way home


def test_the_arm_moves_home_between_two_episodes(tmp_path: Path) -> None:
    outcome = drive(tmp_path, "episodes=2")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.count("moving home") == 2
    starts = [record.steps[0].state for record in load_episodes(tmp_path / "report" / "episodes", BUNDLE)]
    np.testing.assert_allclose(starts[1][:7], starts[0][:7], atol=0.03)


def test_a_driver_that_hangs_on_the_way_home_is_a_failure(tmp_path: Path) -> None:
    pose = [*HOME_DEG]
    pose[1] += 20.0
    outcome = drive(tmp_path, fault="hang", fails_after=60, pose_deg=pose, follow=0.2)
    assert outcome.code == 2
    assert "the robot did not answer for" in outcome.stderr.splitlines()[-1]
    assert steps_of(tmp_path) == [STEPS]
    assert "hung" in (tmp_path / "report" / "interventions.jsonl").read_text()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("gone", "the robot is not connected any more"),
        ("lacks", "the robot's observation lacks elbow.pos, for 1 s"),
        ("array", "the robot's observation has [1.0, 2.0] as elbow.pos, needed a number, for 1 s"),
        ("none", "the robot's observation lacks base.pos, for 1 s"),
        ("mute", "the robot's answer to send_action lacks base.pos"),
        ("frozen", "the measured joints stay the same, to the last digit, far from their targets, for 1 s"),
    ],
)
def test_a_driver_that_answers_wrongly_is_named_and_the_arm_holds(tmp_path: Path, fault: str, said: str) -> None:
    pose = [*HOME_DEG]
    pose[1] += 20.0
    outcome = drive(tmp_path, fault=fault, fails_after=9, pose_deg=pose)
    assert (outcome.code, outcome.stderr.splitlines()[-1]) == (2, f"error: {said}")
    assert outcome.result["error"] == result_of(tmp_path)["error"] == said
    assert ("the robot does not move home: it is not connected" in outcome.stderr) == (fault == "gone")
    assert "Traceback" not in outcome.stderr
    sent = commands(tmp_path)
    assert len(sent) < 15 if fault in ("gone", "mute") else sent[-10:] == sent[-1:] * 10


def test_an_arm_that_does_not_come_home_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.deployment.control.site.MAX_S", 0.5)
    pose = [*HOME_DEG]
    pose[1] += 20.0
    outcome = drive(tmp_path, pose_deg=pose, follow=0.2)
    assert outcome.code == 2
    assert "did not reach its default pose" in outcome.result["error"]


# -- measurements ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("stamp", "said"),
    [
        ("old", "the observation is 1.000 s old"),
        ("future", "in the future: it must be of time.monotonic()"),
        ("nan", "the observation is nan s old"),
        ("wall", "in the future: it must be of time.monotonic()"),
    ],
)
def test_numbers_of_another_time_start_nothing(tmp_path: Path, stamp: str, said: str) -> None:
    outcome = drive(tmp_path, stamp=stamp)
    assert outcome.code == 2
    assert said in outcome.stderr.splitlines()[-1]
    assert commands(tmp_path) == []


def test_numbers_that_stay_old_hold_the_arm_and_end_the_deployment(tmp_path: Path) -> None:
    outcome = drive(tmp_path, fault="stale", fails_after=9)
    assert outcome.code == 2
    assert "s old, for 1 s" in outcome.stderr.splitlines()[-1]
    sent = commands(tmp_path)
    assert len(sent) > 20
    assert all(command == sent[7] for command in sent[8:])
    assert 0 < steps_of(tmp_path)[0] <= 8  # nothing was planned from them, or recorded as done
    assert result_of(tmp_path)["interventions_by_kind"] == {"stale": 1}


def test_fresh_numbers_drive_the_arm(tmp_path: Path) -> None:
    outcome = drive(tmp_path, "home=false", stamp="fresh")
    assert outcome.code == 0, outcome.stderr
    assert "stale" not in outcome.result["interventions_by_kind"]


def test_a_report_has_one_deployment_and_a_refused_one_leaves_no_directory(tmp_path: Path) -> None:
    with claimed(tmp_path / "report"):
        second = drive(tmp_path)
    assert second.code == 2
    assert "exists; give a new directory" in second.stderr.splitlines()[-1]
    assert not (tmp_path / "report").exists()
    write_mapping(tmp_path / "toy.json", toy_mapping())
    words = [f"bundle={reach_bundle()}", TOY, f"mapping={tmp_path / 'toy.json'}", f"report={tmp_path / 'report'}"]
    assert run(deploy_command.main, words).code == 2  # nobody confirmed the mapping
    assert not (tmp_path / "report").exists()


# -- starts ------------------------------------------------------------------------------------------------------------
def test_a_refused_start_does_not_move_the_arm(tmp_path: Path) -> None:
    """Joint 1 is off by 166 degrees, within its limits but far from what training saw."""
    mapping = toy_mapping()
    joint = replace(mapping.joints["joint1"], offset=166 * pi / 180)
    wrong = replace(mapping, joints=mapping.joints | {"joint1": joint})
    outcome = drive(tmp_path, mapping=wrong)
    assert outcome.code == 2
    assert "check unit, order, sign and place" in outcome.stderr.splitlines()[-1]
    assert commands(tmp_path) == []
    assert "check unit, order, sign and place" in result_of(tmp_path)["error"]


def test_a_refused_start_after_another_episode_does_not_move_the_arm_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two episodes a person prepares the scene, and the numbers that were refused may be wrong."""
    start, begun = Safety.start, list[int]()

    def refuse_the_second(safety: Safety, *words: Any) -> None:
        begun.append(len(commands(tmp_path)))
        if len(begun) == 2:
            raise UserError("the start is refused")
        start(safety, *words)

    monkeypatch.setattr(Safety, "start", refuse_the_second)
    outcome = drive(tmp_path, "episodes=2", "home=false")
    assert (outcome.code, outcome.stderr.splitlines()[-1]) == (2, "error: the start is refused")
    assert steps_of(tmp_path) == [STEPS]
    assert len(commands(tmp_path)) == begun[1] > 0


# -- people ------------------------------------------------------------------------------------------------------------
class Driven:
    """The command in a process of its own, on a terminal of its own."""

    def __init__(self, root: Path, words: list[str]) -> None:
        self.process, self.person = start_on_terminal("embodied.deploy", words, root)
        self.said = ""

    def wait_for(self, text: str, times: int = 1) -> None:
        while self.said.count(text) < times:
            self.said += os.read(self.person, 4096).decode()

    def wait_for_commands(self, path: Path, count: int) -> None:
        while len(commands(path)) < count:
            assert self.process.poll() is None, self.said
            time.sleep(0.02)

    def type(self, text: str) -> None:
        os.write(self.person, text.encode())

    def begin(self, episode: int = 1) -> None:
        """Start an episode, and wait until the arm is moving."""
        self.wait_for(f"episode {episode}: prepare the scene")
        self.type("\n")
        self.wait_for("press any key to stop the robot at once", episode)

    def close(self) -> None:
        """Close the terminal."""
        os.close(self.person)
        self.person = -1

    def ended(self) -> tuple[int, dict[str, Any]]:
        """Return exit code and result."""
        if self.person >= 0:
            try:
                while piece := os.read(self.person, 4096):
                    self.said += piece.decode()
            except OSError:  # the other end is closed
                self.close()
        stdout, _ = self.process.communicate(timeout=120)
        return self.process.returncode, json.loads(stdout.splitlines()[-1])


@pytest.fixture
def start(root: Path) -> Iterator[Any]:
    started: list[Driven] = []

    def begin(words: list[str]) -> Driven:
        started.append(Driven(root, words))
        return started[-1]

    yield begin
    for driven in started:
        driven.process.kill()
        driven.process.wait()


def test_the_emergency_key_within_a_control_step_keeps_the_record(start: Any, tmp_path: Path) -> None:
    driven = start([*words_of(tmp_path), "rate_hz=100"])
    driven.begin()
    driven.wait_for_commands(tmp_path, 33)
    driven.type("x")
    driven.wait_for("type disconnect")
    assert steps_of(tmp_path)[0] > 0  # written before a person answers
    driven.type("disconnect\n")
    code, result = driven.ended()
    assert (code, result["ended"], result["error"]) == (130, {"stopped": 1}, "emergency key")


def test_the_emergency_key_on_the_way_home_is_a_failure(start: Any, tmp_path: Path) -> None:
    driven = start(words_of(tmp_path))
    driven.begin()
    driven.wait_for("solved?")
    driven.type("n\n")
    driven.wait_for("moving home; press any key")
    driven.type("x")
    driven.wait_for("type disconnect")
    driven.type("disconnect\n")
    code, result = driven.ended()
    assert (code, result["failed_episodes"], result["error"]) == (1, [1], "emergency key on the way home")
    assert "stopped" in (tmp_path / "report" / "interventions.jsonl").read_text()


def test_an_answer_that_was_typed_before_its_question_is_forgotten(start: Any, tmp_path: Path) -> None:
    """Two keys too many at the first question must not execute an action that nobody saw."""
    driven = start([*words_of(tmp_path), "confirm=true", "home=false"])
    driven.wait_for("prepare the scene")
    driven.type("\ny\ny\n")  # the first Enter is too early for the rest
    driven.wait_for("execute?")
    time.sleep(0.3)
    assert commands(tmp_path) == []
    driven.type("y\ny\n\n")
    driven.wait_for("execute?", 2)
    time.sleep(0.3)
    assert len(commands(tmp_path)) == 1
    driven.type("n\n")
    driven.wait_for("solved?")
    driven.type("n\n")
    code, result = driven.ended()
    assert (code, result["ended"], steps_of(tmp_path)) == (0, {"refused": 1}, [1])


@pytest.mark.parametrize("answer", ["n", "y"])
def test_an_arm_whose_action_was_refused_moves_home_only_if_a_person_says_so(
    start: Any, tmp_path: Path, answer: str
) -> None:
    driven = start([*words_of(tmp_path, pose_deg=[20.0, *HOME_DEG[1:]]), "confirm=true"])
    driven.wait_for("prepare the scene")
    driven.type("\n")
    driven.wait_for("execute?")
    driven.type("y\n")
    driven.wait_for("execute?", 2)
    driven.type("n\n")
    driven.wait_for("solved?")
    driven.type("n\ny\ny\n")
    driven.wait_for("move home?")
    time.sleep(0.3)
    assert len(commands(tmp_path)) == 1
    driven.type(f"{answer}\n")
    code, result = driven.ended()
    assert (code, result["ended"]) == (0, {"refused": 1})
    assert ("the robot stays where it is" in driven.said) == (len(commands(tmp_path)) == 1) == (answer == "n")


def test_an_episode_begins_only_when_a_person_has_seen_its_question(start: Any, tmp_path: Path) -> None:
    driven = start([*words_of(tmp_path), "home=false", "episodes=2"])
    driven.begin()
    driven.wait_for("solved?")
    driven.type("n\n\n\n")
    driven.wait_for("episode 2: prepare the scene")
    before = len(commands(tmp_path))
    driven.type("\x04")  # the end of input is no Enter
    driven.wait_for("episode 2: prepare the scene", 2)
    assert len(commands(tmp_path)) == before
    driven.begin(2)
    driven.wait_for("solved?", 2)
    driven.type("n\n")
    assert driven.ended()[0] == 0


def test_keys_of_a_panic_do_not_let_go_of_the_arm(start: Any, tmp_path: Path) -> None:
    driven = start(words_of(tmp_path))
    driven.begin()
    driven.wait_for_commands(tmp_path, 8)
    driven.type("\n\n\n\n")
    driven.wait_for("type disconnect")
    driven.type("\n")
    driven.wait_for("type disconnect", 2)
    driven.type("y\n")
    driven.wait_for("type disconnect", 3)
    driven.type("\x03")
    driven.wait_for("the robot still holds")
    assert driven.process.poll() is None
    driven.type("disconnect\n")
    code, result = driven.ended()
    assert (code, result["error"]) == (130, "emergency key")


def test_a_second_ctrl_c_stops_the_way_home_and_keeps_the_report(start: Any, tmp_path: Path) -> None:
    pose = [*HOME_DEG]
    pose[1] += 20.0
    driven = start(words_of(tmp_path, pose_deg=pose, follow=0.2))  # its way home takes long
    driven.begin()
    driven.wait_for_commands(tmp_path, 8)
    driven.type("\x03")
    driven.wait_for("moving home; press any key")
    driven.type("\x03")
    code, result = driven.ended()
    assert (code, result["ended"]) == (130, {"interrupted": 1})
    assert "the robot holds where it is" in driven.said
    assert "Traceback" not in driven.said
    assert steps_of(tmp_path)[0] > 0


def test_a_closed_terminal_is_a_ctrl_c(start: Any, tmp_path: Path) -> None:
    driven = start(words_of(tmp_path))
    driven.begin()
    driven.wait_for_commands(tmp_path, 8)
    driven.close()
    code, result = driven.ended()
    assert (code, result["ended"], result["error"]) == (130, {"interrupted": 1}, "interrupted")
    assert steps_of(tmp_path)[0] > 0
    home = dict(zip(NAMES, (np.array(HOME_DEG) - OFFSETS_DEG) / SIGNS, strict=True))
    last = commands(tmp_path)[-1]
    assert all(abs(last[f"{name}.pos"] - at) < 2.0 for name, at in home.items())  # it moved home


def test_what_was_recorded_survives_the_death_of_the_program(start: Any, tmp_path: Path) -> None:
    driven = start([*words_of(tmp_path), "episodes=9"])
    driven.begin()
    driven.wait_for("solved?")
    driven.type("y\n")
    driven.begin(2)
    driven.process.send_signal(signal.SIGKILL)
    driven.process.wait()
    assert steps_of(tmp_path) == [STEPS]
    assert result_of(tmp_path)["success_at_end"] == 1.0
    assert "solved; time limit" in (tmp_path / "report" / "report.html").read_text()


def test_ctrl_c_on_the_terminal_moves_a_simulated_arm_home(start: Any, tmp_path: Path) -> None:
    """The terminal sends it to the process of the simulated arm as well, which goes on."""
    driven = start(
        [f"bundle={reach_bundle()}", "robot=sim", "episodes=9", f"report={tmp_path / 'report'}", "video=false"]
    )
    driven.wait_for("press any key to stop the robot at once", 2)
    driven.type("\x03")
    code, result = driven.ended()
    assert (code, result["error"]) == (130, "interrupted"), driven.said
    assert "moving home" in driven.said
    assert "the robot stays where it is" not in driven.said
