"""The protocols of robots, in the shape of LeRobot's ``Robot``, the names of what travels, and how a robot is loaded.

    Driver (another library's names and units) ── Mapping ──► Robot (ours) ──► control loop

Names towards a bundle (``arm.joints[i].name`` is the name of a joint):

    <joint>.pos, <joint>.vel     position and velocity of a joint, rad and rad/s (m and m/s for a slide)
    gripper.pos                  distance of each finger from the point where the fingers meet, m
    left_<joint>.pos, ...        the same of two arms, with left_ and right_ before the names
    <term>[<i>]                  entry of a term with source ``external``: what perception or a person provides
    <camera>                     image, uint8 [height, width, 3], RGB
    timestamp                    when the oldest of these numbers was measured, s on ``time.monotonic``; without it an
                                 observation is new. A time of another clock holds the robot

An action has ``<joint>.pos`` of every joint and ``gripper.pos``: position targets. A robot with other names, signs or
units is used through a ``Mapping`` (embodied.deployment.robots.mapping).
"""

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line
from embodied.core.spec import Arms, joints_of

Observation = dict[str, Any]  # numbers and images by name
Action = dict[str, float]  # position targets by name
GRIPPER = "gripper.pos"


@runtime_checkable
class Robot(Protocol):
    """A robot that is driven by position targets. Methods may raise ConnectionError when the robot is gone."""

    name: str
    """Manufacturer and model."""

    @property
    def is_connected(self) -> bool:
        """Whether the robot can be driven now."""

    def get_observation(self) -> Observation:
        """Return the newest measurements."""

    def send_action(self, action: Action) -> Action:
        """Command position targets; return what was really sent."""


@runtime_checkable
class Driver(Robot, Protocol):
    """A robot of another library, which says what its names are and is connected by a command."""

    @property
    def observation_features(self) -> dict[str, Any]:
        """Type (float) or shape of each entry of an observation, by name."""

    @property
    def action_features(self) -> dict[str, Any]:
        """Type (float) of each entry of an action, by name."""

    def connect(self, calibrate: bool = True) -> None:
        """Open the connection; calibrate the robot if it needs that and ``calibrate`` is True."""

    def disconnect(self) -> None:
        """Close the connection."""


def joint_names(arms: Arms, quantity: str = "pos") -> list[str]:
    """Return the names of ``pos`` or ``vel`` of the joints of all arms, in order."""
    return [f"{name}.{quantity}" for name in joints_of(arms)]


def gripper_names(arms: Arms) -> list[str]:
    """Return the name of the gripper's position of each arm."""
    return [side + GRIPPER for side in arms]


def action_names(arms: Arms) -> list[str]:
    """Return the names of an action: position targets of all joints, then of the grippers."""
    return [*joint_names(arms), *gripper_names(arms)]


def values(observation: Observation, names: list[str]) -> NDArray[np.float64]:
    """Return numbers of an observation by name; they may be NaN."""
    return np.array([float(observation[name]) for name in names])


class Unusable(UserError):
    """A measurement that no plan may be made from, but that may pass: the robot holds meanwhile.

    kind: of the intervention (``Intervention.kind``), such as ``not finite``, ``lacking`` or ``stale``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def number(found: Any, name: str, whose: str = "observation") -> float:
    """Return a number by name, which may be NaN. Unusable if it is missing or no number: drivers give anything."""
    value = found.get(name) if isinstance(found, Mapping) else found
    if value is None:
        raise Unusable("lacking", f"the robot's {whose} lacks {name}")
    try:
        return float(value)
    except (TypeError, ValueError):
        got = one_line(value)[:40]
        raise Unusable("lacking", f"the robot's {whose} has {got} as {name}, needed a number") from None


def age(observation: Observation, now_s: float) -> float:
    """Return the age of an observation, s; 0 without its ``timestamp``, negative for a time in the future."""
    return now_s - number(observation, "timestamp") if "timestamp" in observation else 0.0


def load_robot(name: str, options: Mapping[str, Any]) -> Driver:
    """Build the robot ``<module>:<Class>``, of LeRobot or of anybody who follows its ``Robot``.

    options: keyword arguments of its ``config_class``, as LeRobot's robots have one, or else of the class itself.
    UserError if it cannot be imported or built, or lacks a method of ``Driver``.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"robot={name}: {error}") from error
    try:
        config_class = getattr(found, "config_class", None)
        robot = found(**options) if config_class is None else found(config_class(**options))
    except TypeError as error:
        raise UserError(f"robot_options of {name}: {error}") from error
    if not isinstance(robot, Driver):
        parts = (*dir(Driver), "name")  # ``dir`` lacks an attribute without a value
        needed = [part for part in parts if not part.startswith("_") and not hasattr(robot, part)]
        raise UserError(f"robot={name} is no robot: it lacks {', '.join(needed)}")
    return robot


@contextmanager
def connected(name: str, options: str) -> Iterator[Driver]:
    """Yield the robot, connected; an error inside comes before one of disconnecting. options: for ``load_robot``."""
    try:
        content = json.loads(options)
    except ValueError as error:
        raise UserError(f"robot_options: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"robot_options: got {options}, needed a JSON object")
    robot = load_robot(name, content)
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
