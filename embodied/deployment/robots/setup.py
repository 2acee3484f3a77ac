"""From a new robot to one that may be driven: draft its mapping, look at its picture, confirm it, use it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.control.safety import Limits
from embodied.deployment.options import DeployOptions
from embodied.deployment.robots.base import Robot, age, joint_values
from embodied.deployment.robots.confirmation import DEFAULT, SECOND, check_confirmed, confirm, poses
from embodied.deployment.robots.draft import propose
from embodied.deployment.robots.lerobot import connected
from embodied.deployment.robots.mapping import MappedRobot, read_mapping, write_mapping
from embodied.deployment.robots.picture import draw_poses, encode_png

Array = NDArray[np.float64]


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
    with connected(options.robot, options.robot_options) as robot:
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
    now, wanted = joint_values(robot.arm, observation), poses(robot.arm)
    print(_table(robot, now, wanted), file=sys.stderr)
    picture = path.with_suffix(".png")
    rows = [draw_poses(robot.arm, {"now": now, name: pose}) for name, pose in wanted.items()]
    picture.write_bytes(encode_png(np.concatenate(rows)))
    print(
        f"{picture}: blue is the robot now, as the mapping reads it; red is its {DEFAULT} pose in the upper row, its "
        f"{SECOND} pose in the lower one. Seen from its right side, from the front, and from above",
        file=sys.stderr,
    )
    return now


def _table(robot: MappedRobot, now_J: Array, wanted: Mapping[str, Array]) -> str:
    """Return a table: each joint with its name on the robot, its position now and in the poses [J]; rad or m."""
    titles = "".join(f"{title:>10}" for title in ("now", *wanted))
    lines = [f"{'joint':10} {'on the robot':24} sign  {'unit':8}{titles}  (rad, m)"]
    for i, joint in enumerate(robot.arm.joints):
        entry, columns = robot.mapping.joints[joint.name], [now_J[i], *(pose[i] for pose in wanted.values())]
        numbers = "".join(f"{value:+10.3f}" for value in columns)
        lines.append(f"{joint.name:10} {entry.name:24} {entry.sign:+d}    {entry.unit:8}{numbers}")
    gripper = robot.mapping.gripper
    lines.append(f"{'gripper':10} {gripper.name:24} {gripper.sign:+d}    {gripper.unit}")
    return "\n".join(lines)
