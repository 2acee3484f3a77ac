"""A person confirms a mapping with the robot in two poses, which the mapping must then read.

The default pose alone shows too little. Where a joint is at zero, its sign, its unit and an exchange with another such
joint change nothing. In the second pose every joint is away from zero and has moved by an amount of its own. A person
brings the real arm into both poses by their drawing; a confirmation from one drives no robot. It holds for the very
mapping, arm and robot that were confirmed.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm.kinematics import Chain
from embodied.core.errors import UserError
from embodied.core.spec import ArmSpec
from embodied.deployment.robots.mapping import Confirmation, MappedRobot, RobotMapping

Array = NDArray[np.float64]
DEFAULT, SECOND = "default", "second"
NEAREST, SPACING = 0.4, 0.3  # smallest move of a joint between the poses, and smallest difference of two moves
TOLERANCE = 0.2  # largest distance of the real arm from a pose
SHARE = 3.0  # the three numbers above are rad, or less for a joint whose range is below SHARE rad
TRIES = 2_000


@cache
def poses(arm: ArmSpec) -> dict[str, Array]:
    """Return the poses of a confirmation, joint positions [J] by name. UserError for an arm that has no second one.

    Of TRIES random second poses it is the one whose tool is nearest to that of the default pose, without a joint or the
    tool lower than all of them are there.
    """
    home = np.array([joint.home for joint in arm.joints])
    low, high = (np.array([getattr(joint, end) for joint in arm.joints]) for end in ("low", "high"))
    unit, margin, nearest = _units(arm), 0.05 * (high - low), np.inf
    sizes = NEAREST + SPACING * np.arange((len(home) + 1) // 2)
    moves, random = np.concatenate([sizes, -sizes]), np.random.Generator(np.random.Philox(key=0))
    found, chain = {DEFAULT: home}, Chain(arm)
    default = chain.points(home)
    for _ in range(TRIES):
        second = home + unit * random.permutation(moves)[: len(home)]
        within = (second >= low + margin) & (second <= high - margin) & (np.abs(second) >= NEAREST * unit)
        if not within.all():
            continue
        points = chain.points(second)
        distance = float(np.linalg.norm(points[-1] - default[-1]))
        if distance < nearest and points[2:, 2].min() >= default[2:, 2].min():
            nearest, found[SECOND] = distance, second
    if SECOND not in found:
        raise UserError("the arm's joint limits leave no second pose in which to confirm a mapping")
    return found


def confirm(robot: MappedRobot, by: str, qpos_J: Array) -> RobotMapping:
    """Return the mapping with the pose in which the arm is now among the confirmed ones.

    by: name of the person. qpos: measured joint positions. UserError for an empty name, or in another pose.
    """
    if not by.strip():
        raise UserError("confirm_mapping: give your name")
    before, sha256 = robot.mapping.confirmed, digest(robot)
    seen = before.poses if before is not None and before.sha256 == sha256 else ()
    tolerance, names = TOLERANCE * _units(robot.arm), [joint.name for joint in robot.arm.joints]
    wanted = poses(robot.arm)
    here = [name for name, pose in wanted.items() if (np.abs(qpos_J - pose) <= tolerance).all()]
    if not here:
        name = next((name for name in wanted if name not in seen), DEFAULT)
        wrong = [
            f"{joint} is read at {value:+.2f} and belongs at {pose:+.2f}"
            for joint, value, pose, far in zip(names, qpos_J, wanted[name], tolerance, strict=True)
            if not abs(value - pose) <= far
        ]
        raise UserError(
            f"the mapping does not read the {name} pose: {'; '.join(wrong)}. If the real arm is in that pose (red in "
            "the picture), sign, unit or offset of these joints is wrong, or two are exchanged"
        )
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    together = tuple(name for name in wanted if name in (*seen, *here))
    return replace(robot.mapping, confirmed=Confirmation(by.strip(), at, sha256, together))


def check_confirmed(robot: MappedRobot) -> None:
    """Raise UserError unless a person confirmed this very mapping, for this arm and robot, in both poses."""
    confirmed = robot.mapping.confirmed
    how = "confirm_mapping=<your name> in the default and in the second pose"
    if confirmed is None:
        raise UserError(f"nobody has confirmed this mapping: look at its picture, then {how}")
    if confirmed.sha256 != digest(robot):
        raise UserError(
            f"the mapping, the policy's arm or the robot's names changed after {confirmed.by} confirmed it on "
            f"{confirmed.at}: look at its picture again, then {how}"
        )
    lacking = [name for name in (DEFAULT, SECOND) if name not in confirmed.poses]
    if lacking:
        raise UserError(
            f"{confirmed.by} confirmed this mapping in one pose, which does not show every sign, unit and exchange: "
            f"move the arm to its {lacking[0]} pose (red in the picture), then confirm_mapping=<your name> again"
        )


def digest(robot: MappedRobot) -> str:
    """Return the SHA-256 of what a confirmation holds for: mapping, arm with its limits, and the robot's names."""
    content = {
        "mapping": asdict(replace(robot.mapping, confirmed=None)),
        "arm": asdict(robot.arm),
        "robot": robot.robot.name,
        "actions": sorted(robot.robot.action_features),
        "observations": sorted(robot.robot.observation_features),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _units(arm: ArmSpec) -> Array:
    """Return what the constants above count in for each joint, rad or m, [J]."""
    spans = np.array([joint.high - joint.low for joint in arm.joints]) / SHARE
    return np.where([joint.kind == "hinge" for joint in arm.joints], np.minimum(1.0, spans), spans)
