"""Deployments that end badly: what was recorded is there, the first cause is read, and no arm moves unexpectedly."""

from __future__ import annotations

import json
import re
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
from tests.deployment.test_mapping import TOY, confirmed, reach_bundle, toy_mapping
from tests.deployment.toy_arm import HOME_DEG

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
