"""Around the episodes: the robot and its clock, who begins and judges an episode, the emergency key, the way home.

A simulated robot begins and judges episodes itself. Beside a real one a person prepares the scene and says whether the
task was solved.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np
from numpy.typing import NDArray

from embodied.core.spec import Arms, joints_of
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import read_simulation
from embodied.deployment.control.inference import Clock
from embodied.deployment.control.safety import Safety, Watchdog
from embodied.deployment.options import DeployOptions
from embodied.deployment.robots.base import Robot, Unusable, action_names, age, connected, joint_names, values
from embodied.deployment.robots.setup import mapped
from embodied.deployment.robots.sim import SimRobot

SPEED = 0.2  # share of the largest speed of the joints
SHARE = 0.5  # at most this share of a limit that an option tightened, so that the safety need not intervene
PERIOD_S = 0.02
LAG = 2.0  # how far targets may be ahead of the joints, as a multiple of how far they are at this speed
REACHED, SAGS = 0.02, 0.1  # distance at which a pose counts as reached; of arms that bear their weight by lagging
MAX_S = 15.0
LET_GO = "disconnect"  # what a person types to let go of a robot after an emergency


@dataclass
class Site:
    """A connected robot with its clock; a real one, unless it is a ``SimulatedSite``."""

    robot: Robot
    """The robot, in our names and units."""
    clock: Clock
    frames: NDArray[np.uint8] | None = None
    """Film of an episode, uint8 [F, h, w, 3]; None without one."""
    resets: ClassVar[bool] = False
    """Whether ``begin`` brings the robot to its default pose."""

    def begin(self, seed: int, episode: int) -> str | None:
        """Begin an episode; return its instruction, if the site chooses it."""
        _wait_for("", f"episode {episode + 1}: prepare the scene, then press Enter ")
        return None

    def ended(self) -> None:
        """Take note that an episode has ended just now."""

    def judge(self) -> bool | None:
        """Return whether the task was solved; None if nobody can tell."""
        return ask("solved?") if sys.stdin.isatty() else None

    def keep_holding(self) -> None:
        """Keep the connection after an emergency stop until a person says so: many arms fall without it.

        A word is needed, because people in a panic press Enter and other keys many times.
        """
        _wait_for(LET_GO, f"the robot holds, and may fall without its connection; type {LET_GO} ")

    def film(self) -> None:
        """Keep a film of the episode that has just ended; a real robot has none."""


@dataclass
class SimulatedSite(Site):
    """A simulated robot, whose episodes are those of ``embodied.eval``."""

    robot: SimRobot
    resets: ClassVar[bool] = True
    solved: bool = False
    """Whether the last episode ended solved; simulated time goes on after it."""

    def begin(self, seed: int, episode: int) -> str | None:
        return self.robot.reset(seed, episode)

    def ended(self) -> None:
        self.solved = self.robot.success()

    def judge(self) -> bool | None:
        return self.solved

    def keep_holding(self) -> None: ...

    def film(self) -> None:
        print("filming the episode: every picture is ray cast, a minute or more", file=sys.stderr)
        self.frames = self.robot.frames()


@contextmanager
def site_of(options: DeployOptions, path: Path, bundle: Bundle) -> Iterator[Site]:
    """Yield the site of the options with a connected robot. UserError for bad options."""
    if options.robot == "sim":
        simulated = SimRobot(bundle, read_simulation(path), options.perturbation == "real", options.lockstep)
        with simulated:
            yield SimulatedSite(simulated, simulated)
        return
    with connected(options.robot, options.robot_options) as robot:
        yield Site(mapped(robot, options, bundle), Clock())


def ask(question: str) -> bool:
    """Return whether a person answers yes."""
    return prompt(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def prompt(message: str) -> str:
    """Return the line that a person types once the message is shown; empty at the end of the input.

    What was typed on the terminal before is forgotten, because it answers nothing that the person had seen.
    """
    if sys.stdin.isatty():
        with suppress(termios.error):  # the terminal is gone
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
    print(message, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _wait_for(word: str, message: str) -> None:
    """Wait until a person types this word alone. Return at once without a terminal; ConnectionError if it is lost."""
    if not sys.stdin.isatty():
        return
    while not (line := prompt(message)) or line.strip() != word:
        if not sys.stdin.isatty():
            raise ConnectionError("the terminal is gone")


class EmergencyKey:
    """Watch for any key on a terminal inside ``with``; Ctrl-C keeps its meaning there. It needs no display.

    stream: the terminal; None is stdin. It is read only while the program is in its foreground. Without a terminal, as
    under nohup, in a container or as a service, there is no key, and nothing is read.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdin if stream is None else stream
        self._before: list[Any] | None = None
        self._pressed = False

    @property
    def watching(self) -> bool:
        """Whether a key would be noticed now."""
        return self._before is not None

    def __enter__(self) -> EmergencyKey:
        self._pressed = False
        stream = self._stream
        if stream is not None and not stream.closed and stream.isatty() and self._in_foreground():
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream)  # keys arrive without Enter; those pressed before are forgotten
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and self._in_foreground():
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._stream, termios.TCSAFLUSH, self._before)
        self._before = None

    def pressed(self) -> bool:
        """Return whether a key has been pressed since ``__enter__``. ConnectionError if the terminal is gone."""
        watched = self._before is not None and self._in_foreground()
        if watched and not self._pressed and select.select([self._stream], [], [], 0.0)[0]:
            with suppress(OSError):
                self._pressed = bool(os.read(self._stream.fileno(), 1024))
            if not self._pressed:
                self._before = None
                raise ConnectionError("the terminal is gone, and the emergency key with it")
        return self._pressed

    def _in_foreground(self) -> bool:
        """Return whether this process may read the terminal; one in the background would be stopped by the system."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except OSError:  # it is not the terminal of this session, so the system does not mind
            return True


def move_home(robot: Robot, arms: Arms, safety: Safety, clock: Clock, stop: Callable[[], bool] = lambda: False) -> bool:
    """Move all arms to the default pose with their grippers as they are; return whether it was reached in time.

    The time is MAX_S seconds, or twice that of the way at its speed.

    safety: of the robot's last episode. stop: called in every step; True ends the move, and the robot holds its
    measured position. UserError if the arm's pose is unknown, RobotHangs if the robot does not answer.
    """
    names, joints = joint_names(arms), joints_of(arms).values()
    near = SAGS if any(arm.from_target for arm in arms.values()) else REACHED
    home = np.array([joint.home for joint in joints])
    speed = np.array([joint.max_velocity for joint in joints])
    largest = np.minimum(SPEED * speed, SHARE * safety.limits.max_velocity_J)
    step, lag = PERIOD_S * largest, LAG * largest * safety.limits.max_lead_J / safety.limits.max_velocity_J
    watchdog = Watchdog(clock, safety, PERIOD_S)

    def measured() -> tuple[np.ndarray, np.ndarray, float]:
        observation = robot.get_observation()
        watchdog.answered("get_observation")
        qpos, qvel = values(observation, names), values(observation, joint_names(arms, "vel"))
        return qpos, qvel, age(observation, clock.now())

    qpos, qvel, age_s = measured()
    fingers_m, began_s = safety.hold()[1], clock.now()
    safety.start(qpos, fingers_m, began_s, "the way home", age_s)
    target = qpos
    fault: Unusable | None = None
    longest_s = max(MAX_S, 2 * float(np.max(np.abs(home - qpos) / largest)))
    for tick in range(1, round(longest_s / PERIOD_S)):
        stopped = stop()
        if stopped:
            target = qpos
        elif not safety.blind and (np.abs(target - qpos) <= lag).all():  # one that is blocked is waited for
            way = home - target  # straight, so that the tool stays inside of the workspace
            target = target + way / max(1.0, float(np.max(np.abs(way) / step)))
        if fault is None:
            sent, fingers = safety.filter(target, fingers_m, qpos, qvel, clock.now(), age_s)
        elif stopped:
            sent, fingers = safety.hold()
        else:
            sent, fingers = safety.hold_blind(fault, clock.now())
        robot.send_action(dict(zip(action_names(arms), [*sent.tolist(), *fingers.tolist()], strict=True)))
        watchdog.answered("send_action")
        if stopped:
            safety.report("stopped", "a person stopped the robot on its way home", clock.now())
            return False
        clock.sleep_until(began_s + tick * PERIOD_S)
        try:
            (qpos, qvel, age_s), fault = measured(), None
            safety.check_moves(qpos, clock.now())
        except Unusable as error:
            fault = error
        if fault is None and np.abs(qpos - home).max() < near:
            return True
    return False
