"""Where episodes take place: the robot, its clock, and how an episode begins and is judged.

A simulated robot begins and judges episodes itself. Beside a real one a person prepares the scene and says whether the
task was solved.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle.format import Bundle, read_simulation
from embodied.deployment.control.inference import Clock, RealClock
from embodied.deployment.control.safety import Limits
from embodied.deployment.options import DeployOptions
from embodied.deployment.robots.base import Robot, age
from embodied.deployment.robots.confirmation import DEFAULT, SECOND, check_confirmed, confirm, poses
from embodied.deployment.robots.draft import propose
from embodied.deployment.robots.lerobot import load_robot
from embodied.deployment.robots.mapping import MappedRobot, in_words, positions, read_mapping, write_mapping
from embodied.deployment.robots.picture import draw_poses, encode_png
from embodied.deployment.robots.sim import PERTURBATIONS, SimRobot

Frames = NDArray[np.uint8]
Array = NDArray[np.float64]


@dataclass
class Stage:
    """A connected robot with its clock; a real one, unless it is a ``SimulatedStage``."""

    robot: Robot
    """The robot, in our names and units."""
    clock: Clock
    """Clock of the control loop."""
    frames: Frames | None = None
    """Film of an episode, uint8 [F, h, w, 3]; None without one."""

    def begin(self, seed: int, episode: int) -> str | None:
        """Begin an episode; return its instruction, if the stage chooses it."""
        if sys.stdin.isatty():
            print(f"episode {episode + 1}: prepare the scene, then press Enter ", end="", file=sys.stderr, flush=True)
            sys.stdin.readline()
        return None

    def judge(self) -> bool | None:
        """Return whether the task is solved; None if nobody can tell."""
        return ask("solved?") if sys.stdin.isatty() else None

    def keep_holding(self) -> None:
        """Keep the connection after an emergency stop until a person says so: many arms fall without it."""
        if sys.stdin.isatty():
            print("the robot holds; press Enter to disconnect ", end="", file=sys.stderr, flush=True)
            sys.stdin.readline()

    def film(self) -> None:
        """Keep a film of the episode that has just ended; a real robot has none."""


@dataclass
class SimulatedStage(Stage):
    """A simulated robot, whose episodes are those of ``embodied.eval``."""

    def begin(self, seed: int, episode: int) -> str | None:
        assert isinstance(self.robot, SimRobot)
        return self.robot.reset(seed, episode)

    def judge(self) -> bool | None:
        assert isinstance(self.robot, SimRobot)
        return bool(self.robot.outcome()["success"])

    def keep_holding(self) -> None: ...

    def film(self) -> None:
        assert isinstance(self.robot, SimRobot)
        print("filming the episode: every picture is ray cast, a minute or more", file=sys.stderr)
        self.frames = self.robot.frames()


@contextmanager
def stage_of(options: DeployOptions, path: Path, bundle: Bundle) -> Iterator[Stage]:
    """Yield the stage of the options with a connected robot. UserError for bad options."""
    if options.robot == "sim":
        simulated = SimRobot(bundle, read_simulation(path), PERTURBATIONS[options.perturbation], options.lockstep)
        with simulated:
            yield SimulatedStage(simulated, simulated)
        return
    with connected(options) as robot:
        yield Stage(mapped(robot, options, bundle), RealClock())


@contextmanager
def connected(options: DeployOptions) -> Iterator[Robot]:
    """Yield the robot of the options, connected. What went wrong before is raised, not what goes wrong at its end."""
    robot = load_robot(options.robot, parse_options(options.robot_options))
    robot.connect()
    try:
        yield robot
    except BaseException:
        try:
            robot.disconnect()
        except Exception as error:
            print(f"the robot did not disconnect: {error}", file=sys.stderr)
        raise
    robot.disconnect()


def mapped(robot: Robot, options: DeployOptions, bundle: Bundle) -> Robot:
    """Return the robot behind its mapping. UserError, and a picture, for a mapping that nobody confirmed."""
    assert options.mapping is not None
    path = Path(options.mapping)
    found = MappedRobot(robot, read_mapping(path), bundle.arm)
    try:
        check_confirmed(found)
    except UserError as error:
        try:
            show(found, path)
        except (OSError, UserError) as other:
            print(f"there is no picture: {other}", file=sys.stderr)
        raise UserError(f"{path}: {error}") from error
    return found


def map_robot(options: DeployOptions, bundle: Bundle) -> dict[str, Any]:
    """Draft or confirm the mapping of a robot, and draw it; return the command's result."""
    assert options.mapping is not None
    path = Path(options.mapping)
    with connected(options) as robot:
        if options.propose_mapping:
            if path.exists():
                raise UserError(f"mapping={path} exists: give a new file")
            write_mapping(path, propose(bundle, robot))
        found = MappedRobot(robot, read_mapping(path), bundle.arm)
        qpos = show(found, path)
        seen: tuple[str, ...] = ()
        if options.confirm_mapping is not None:
            mapping = confirm(found, options.confirm_mapping, qpos)
            write_mapping(path, mapping)
            assert mapping.confirmed is not None
            seen = mapping.confirmed.poses
        lacking = [name for name in poses(bundle.arm) if name not in seen]
        if lacking:
            print(
                f"next: move the arm by hand into its {lacking[0]} pose (red in {path.with_suffix('.png')}), then "
                "confirm_mapping=<your name>",
                file=sys.stderr,
            )
        return {
            "bundle": options.bundle, "robot": found.name, "mapping": options.mapping, "confirmed_poses": [*seen],
            "confirmed": not lacking,
        }  # fmt: skip


def show(robot: MappedRobot, path: Path) -> Array:
    """Print the mapping as a table, draw the robot's pose and those of a confirmation; return the joints [J].

    UserError for an old measurement.
    """
    observation = robot.get_observation()
    Limits.of(robot.arm).check_age(age(observation, time.monotonic()))
    now, wanted = positions(robot.arm, observation), poses(robot.arm)
    print(in_words(robot.mapping, robot.arm, now, wanted), file=sys.stderr)
    picture = path.with_suffix(".png")
    rows = [draw_poses(robot.arm, {"now": now, name: pose}) for name, pose in wanted.items()]
    picture.write_bytes(encode_png(np.concatenate(rows)))
    print(
        f"{picture}: blue is the robot now, as the mapping reads it; red is its {DEFAULT} pose in the upper row, its "
        f"{SECOND} pose in the lower one. Seen from its right side, from the front, and from above",
        file=sys.stderr,
    )
    return now


def parse_options(text: str) -> dict[str, Any]:
    """Return the JSON object of ``robot_options``; UserError if it is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"robot_options: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"robot_options: got {text}, needed a JSON object")
    return found


def ask(question: str) -> bool:
    """Ask a yes-or-no question on the terminal."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
