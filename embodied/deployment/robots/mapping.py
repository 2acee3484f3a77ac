"""Names, units, signs and offsets of one robot, as a person confirmed them: ``mapping.json``.

    robot's number ── unit ──► sign * number + offset ──► ours (rad, m), by name and never by order

``setup`` makes a first draft from the names that the robot has, and lets a person confirm it.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import pi
from pathlib import Path
from typing import Any, Literal

from embodied.core.errors import UserError, unknown_name
from embodied.core.spec import Arms, ArmSpec, described, joints_of
from embodied.deployment.bundle.format import read_json
from embodied.deployment.robots.base import GRIPPER, Action, Driver, Observation, number
from embodied.deployment.validation import from_json

Unit = Literal["rad", "deg", "m", "mm", "percent"]
FACTORS: dict[str, float] = {"rad": 1.0, "deg": pi / 180, "m": 1.0, "mm": 1e-3}
MAX_BYTES = 2**20
DIFFERENCE_S = 0.04  # shortest time of a difference of positions: a bit of an encoder is no speed
STILL_S = 0.2  # after so long without a change the arm stands still


@dataclass(frozen=True, slots=True)
class Entry:
    """One joint or the gripper on the robot."""

    name: str
    """Name in the robot's observations and actions."""
    unit: Unit
    """Unit of its numbers. ``percent`` runs from 0 at ``low`` to 100 at ``high``."""
    sign: int = 1
    """1, or -1 if the robot counts the other way; 1 with ``percent``, where ``low`` may be above ``high``."""
    offset: float = 0.0
    """Our number where the robot's is 0, rad or m."""
    low: float | None = None
    high: float | None = None
    """With ``percent``: our numbers at 0 and at 100."""
    velocity: str | None = None
    """Name of the velocity, in ``unit`` per second; None: it is computed from positions."""

    def check(self, where: str) -> None:
        """Raise UserError for values that do not fit together."""
        percent, ends = self.unit == "percent", (self.low, self.high)
        if self.sign not in ((1,) if percent else (1, -1)):
            raise UserError(f"{where}.sign: got {self.sign}, allowed: {'1' if percent else '1, -1'}")
        if percent and (None in ends or self.low == self.high):
            raise UserError(f"{where}: percent needs low and high, which differ; got {self.low} and {self.high}")
        if not percent and ends != (None, None):
            raise UserError(f"{where}: low and high are for percent only, its unit is {self.unit}")

    @property
    def factor(self) -> float:
        """Our number per number of the robot, with the sign."""
        if self.low is not None and self.high is not None:
            return (self.high - self.low) / 100.0
        return self.sign * FACTORS[self.unit]

    @property
    def zero(self) -> float:
        """Our number where the robot's is 0."""
        return self.offset + (self.low or 0.0)

    def from_robot(self, value: float) -> float:
        return self.factor * value + self.zero

    def to_robot(self, value: float) -> float:
        return (value - self.zero) / self.factor


def shut_at(arm: ArmSpec) -> float:
    """Return the position of fingers that are shut around nothing."""
    return 0.0 if arm.gripper.position_unit == "m" else arm.gripper.closed_m


def gripper_entry(arm: ArmSpec, name: str) -> Entry:
    """Return the gripper of an arm as LeRobot counts it: from 0, closed, to 100, as open as it can be."""
    return Entry(name, "percent", low=shut_at(arm), high=arm.gripper.max_position_m)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Who confirmed a mapping, and in which poses (embodied.deployment.robots.setup)."""

    by: str
    at: str
    """Name of the person; date and time, UTC."""
    sha256: str
    """Hash of what was confirmed: the mapping, the policy's arm and the robot's names."""
    poses: tuple[str, ...]
    """Poses in which the robot was seen."""


@dataclass(frozen=True, slots=True)
class RobotMapping:
    """The content of ``mapping.json``."""

    robot: str
    joints: dict[str, Entry]
    gripper: Entry
    """Each joint of the bundle by our name, and the gripper: distance of each finger from the centre."""
    external: dict[str, str] = field(default_factory=dict)
    cameras: dict[str, str] = field(default_factory=dict)
    """The robot's names of external numbers and of cameras, by ours; a missing one has the same name."""
    confirmed: Confirmation | None = None
    right_gripper: Entry | None = None
    """That of the right one of two arms; then ``gripper`` is the left one's."""

    @property
    def entries(self) -> dict[str, Entry]:
        """Entries by our names of positions."""
        grippers = {GRIPPER: self.gripper}
        if self.right_gripper is not None:
            grippers = {f"left_{GRIPPER}": self.gripper, f"right_{GRIPPER}": self.right_gripper}
        return {f"{name}.pos": entry for name, entry in self.joints.items()} | grippers

    def check(self, arms: Arms) -> None:
        """Raise UserError unless it maps every joint of the arms, and each quantity to a name of its own."""
        known = [*joints_of(arms)]
        for name in self.joints:
            if name not in known:
                raise unknown_name("joint in the mapping", name, known)
        missing = [name for name in known if name not in self.joints]
        if missing:
            raise UserError(f"mapping: lacks {', '.join(missing)}")
        if (self.right_gripper is not None) != (len(arms) > 1):
            got = "none" if self.right_gripper is None else "one"
            raise UserError(f"mapping: right_gripper: got {got}, and the policy has {len(arms)} arms")
        ours = [*self.entries, *(f"{name}.vel" for name in self.joints), *self.external, *self.cameras]
        read = [name for entry in self.entries.values() for name in (entry.name, entry.velocity) if name is not None]
        for names in (ours, [*read, *self.external.values()]):
            for name in names:
                if names.count(name) > 1:
                    raise UserError(f"mapping: {name} stands for two quantities")
        for name, entry in self.entries.items():
            entry.check(f"mapping.{name}")


def read_mapping(path: Path) -> RobotMapping:
    """Read a mapping. UserError if it is missing or malformed; it may be unconfirmed."""
    if not path.is_file():
        raise UserError(f"mapping={path} is not a file: mapping=<file> propose_mapping=true writes a first draft")
    return from_json(RobotMapping, read_json(path, MAX_BYTES), path.name)


def write_mapping(path: Path, mapping: RobotMapping) -> None:
    path.write_text(json.dumps(described(mapping), indent=1) + "\n", encoding="utf-8")


Changes = deque[tuple[float, dict[str, float]]]
"""Times at which the positions of an arm were seen to change, and the positions."""


def _speeds(now: dict[str, float], seen: Changes) -> dict[str, float]:
    """Return the speed of each position; see ``MappedRobot.get_observation``. seen: of this arm, is kept up to date."""
    now_s = time.monotonic()
    if seen and now == seen[-1][1] and (len(seen) == 1 or now_s - seen[-1][0] > STILL_S):
        seen.clear()
    if not seen or now != seen[-1][1]:
        seen.append((now_s, now))
    while len(seen) > 2 and now_s - seen[1][0] >= DIFFERENCE_S:
        seen.popleft()
    (before_s, before), (last_s, last) = seen[0], seen[-1]
    if last_s - before_s < DIFFERENCE_S:
        return dict.fromkeys(now, 0.0)
    return {name: (last[name] - before[name]) / (last_s - before_s) for name in now}


class MappedRobot:
    """A ``Robot``, in our names and units, made of a ``Driver``. UserError for one without the names of the mapping."""

    def __init__(self, robot: Driver, mapping: RobotMapping, arms: Arms) -> None:
        mapping.check(arms)
        self.robot, self.mapping, self.arms, self.name = robot, mapping, arms, mapping.robot
        self._entries = mapping.entries
        actions = {entry.name for entry in self._entries.values()}
        self._own = actions | {entry.velocity for entry in self._entries.values() if entry.velocity is not None}
        self._renamed = mapping.external | mapping.cameras
        seen = self._own | {*self._renamed.values()}
        needed = (("actions", actions, robot.action_features), ("observations", seen, robot.observation_features))
        for what, names, features in needed:
            for name in sorted(names - features.keys()):
                raise unknown_name(f"name in the robot's {what}", name, features)
        ours = {*self._entries, *(f"{name}.vel" for name in mapping.joints), *self._renamed}
        self._hidden = seen | ours
        self._changes: dict[str, Changes] = {side: deque() for side in arms}

    @property
    def is_connected(self) -> bool:
        return self.robot.is_connected

    def get_observation(self) -> Observation:
        """Return the newest measurements. Velocities that the robot lacks are differences over DIFFERENCE_S or more.

        They are of the times at which positions were seen to change, as the robot may measure less often than it is
        asked; its time stamp may be that of other numbers. Unusable if a number of the mapping is missing.
        """
        theirs = self.robot.get_observation()
        ours = {name: entry.from_robot(number(theirs, entry.name)) for name, entry in self._entries.items()}
        found, speeds = Observation(ours), dict[str, float]()
        for side, seen in self._changes.items():  # each arm has its own times
            speeds |= _speeds({name: value for name, value in ours.items() if name.startswith(side)}, seen)
        for joint, entry in self.mapping.joints.items():
            given = None if entry.velocity is None else entry.factor * number(theirs, entry.velocity)
            found[f"{joint}.vel"] = speeds[f"{joint}.pos"] if given is None else given
        return found | self._others(theirs)

    def send_action(self, action: Action) -> Action:
        """Command position targets in our units; return what the robot says that it sent. Unusable if it does not."""
        theirs = {entry.name: entry.to_robot(action[name]) for name, entry in self._entries.items()}
        sent, whose = self.robot.send_action(theirs), "answer to send_action"
        return {name: entry.from_robot(number(sent, entry.name, whose)) for name, entry in self._entries.items()}

    def _others(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the mapping renames, and what else has a name that stands for nothing of the mapping."""
        others = {name: value for name, value in found.items() if name not in self._hidden}
        return others | {ours: found[theirs] for ours, theirs in self._renamed.items() if theirs in found}
