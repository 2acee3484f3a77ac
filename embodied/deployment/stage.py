"""Where episodes take place: the robot, its clock, and how an episode begins and is judged.

A simulated robot begins and judges episodes itself. Beside a real one a person prepares the scene and says whether the
task was solved.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle import Bundle, read_simulation
from embodied.deployment.draft import propose
from embodied.deployment.inference import Clock, RealClock
from embodied.deployment.mapping import MappedRobot, in_words, positions, read_mapping, write_mapping
from embodied.deployment.options import DeployOptions
from embodied.deployment.picture import draw_poses, encode_png
from embodied.deployment.robots.base import Robot
from embodied.deployment.robots.lerobot import load_robot
from embodied.deployment.robots.sim import PERTURBATIONS, SimRobot

Frames = NDArray[np.uint8]


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
    robot = load_robot(options.robot, parse_options(options.robot_options))
    robot.connect()
    try:
        yield Stage(mapped(robot, options, bundle), RealClock())
    finally:
        robot.disconnect()


def mapped(robot: Robot, options: DeployOptions, bundle: Bundle) -> Robot:
    """Return the robot behind its mapping. UserError for a mapping that nobody confirmed.

    With ``propose_mapping`` the mapping is a new draft, with ``confirm_mapping`` it is confirmed.
    """
    assert options.mapping is not None
    path = Path(options.mapping)
    if options.propose_mapping:
        if path.exists():
            raise UserError(f"mapping={path} exists: give a new file")
        write_mapping(path, propose(bundle, robot))
    mapping = read_mapping(path)
    found = MappedRobot(robot, mapping, bundle.arm)
    if options.confirm_mapping is not None:
        write_mapping(path, mapping.confirm(options.confirm_mapping))
        return found
    try:
        mapping.check_confirmed()
    except UserError as error:
        picture = show(found, bundle, path)
        if options.propose_mapping:
            return found
        raise UserError(f"{path}: {error} (picture: {picture})") from error
    return found


def show(robot: MappedRobot, bundle: Bundle, path: Path) -> Path:
    """Print the mapping as a table, and draw the robot's pose (blue) and the default pose (red); return the picture."""
    observation = robot.get_observation()
    print(in_words(robot.mapping, bundle.arm, observation), file=sys.stderr)
    home = np.array([joint.home for joint in bundle.arm.joints])
    picture = path.with_suffix(".png")
    image = draw_poses(bundle.arm, {"now": positions(bundle.arm, observation), "default": home})
    picture.write_bytes(encode_png(image))
    print(f"{picture}: blue is the robot's pose now, red the default pose; left from the side", file=sys.stderr)
    return picture


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
