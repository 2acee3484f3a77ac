"""Where episodes take place: the robot, its clock, and who begins and judges an episode.

A simulated robot begins and judges episodes itself. Beside a real one a person prepares the scene and says whether the
task was solved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import read_simulation
from embodied.deployment.control.inference import Clock, RealClock
from embodied.deployment.options import DeployOptions
from embodied.deployment.robots.base import Robot
from embodied.deployment.robots.lerobot import connected
from embodied.deployment.robots.setup import mapped
from embodied.deployment.robots.sim import PERTURBATIONS, SimRobot


@dataclass
class Site:
    """A connected robot with its clock; a real one, unless it is a ``SimulatedSite``."""

    robot: Robot
    """The robot, in our names and units."""
    clock: Clock
    """Clock of the control loop."""
    frames: NDArray[np.uint8] | None = None
    """Film of an episode, uint8 [F, h, w, 3]; None without one."""

    def begin(self, seed: int, episode: int) -> str | None:
        """Begin an episode; return its instruction, if the site chooses it."""
        _wait_for_enter(f"episode {episode + 1}: prepare the scene, then press Enter ")
        return None

    def judge(self) -> bool | None:
        """Return whether the task is solved; None if nobody can tell."""
        return ask("solved?") if sys.stdin.isatty() else None

    def keep_holding(self) -> None:
        """Keep the connection after an emergency stop until a person says so: many arms fall without it."""
        _wait_for_enter("the robot holds; press Enter to disconnect ")

    def film(self) -> None:
        """Keep a film of the episode that has just ended; a real robot has none."""


@dataclass
class SimulatedSite(Site):
    """A simulated robot, whose episodes are those of ``embodied.eval``."""

    robot: SimRobot

    def begin(self, seed: int, episode: int) -> str | None:
        return self.robot.reset(seed, episode)

    def judge(self) -> bool | None:
        return bool(self.robot.outcome()["success"])

    def keep_holding(self) -> None: ...

    def film(self) -> None:
        print("filming the episode: every picture is ray cast, a minute or more", file=sys.stderr)
        self.frames = self.robot.frames()


@contextmanager
def site_of(options: DeployOptions, path: Path, bundle: Bundle) -> Iterator[Site]:
    """Yield the site of the options with a connected robot. UserError for bad options."""
    if options.robot == "sim":
        simulated = SimRobot(bundle, read_simulation(path), PERTURBATIONS[options.perturbation], options.lockstep)
        with simulated:
            yield SimulatedSite(simulated, simulated)
        return
    with connected(options.robot, options.robot_options) as robot:
        yield Site(mapped(robot, options, bundle), RealClock())


def ask(question: str) -> bool:
    """Ask a yes-or-no question on the terminal."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _wait_for_enter(message: str) -> None:
    """Wait for Enter, if there is a terminal."""
    if sys.stdin.isatty():
        print(message, end="", file=sys.stderr, flush=True)
        sys.stdin.readline()
