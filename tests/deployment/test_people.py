"""Deployments with a person at the terminal: answers, keys, Ctrl-C and a terminal that is closed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands.terminal import start_on_terminal
from tests.deployment.test_endings import STEPS, commands, result_of, steps_of, words_of
from tests.deployment.test_mapping import reach_bundle
from tests.deployment.toy_arm import HOME_DEG, NAMES, OFFSETS_DEG, SIGNS


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
