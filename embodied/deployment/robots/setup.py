"""From a new robot to one that may be driven: draft its mapping, look at its picture, confirm it, use it."""

import sys
import time
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.control.arm import StateBuilder
from embodied.deployment.control.safety import Limits
from embodied.deployment.options import DeployOptions
from embodied.deployment.robots.base import GRIPPER, Robot, age, connected, joint_values
from embodied.deployment.robots.confirmation import (
    DEFAULT,
    SECOND,
    check_confirmed,
    confirm,
    draw_poses,
    encode_png,
    poses,
)
from embodied.deployment.robots.mapping import Entry, MappedRobot, RobotMapping, Unit, read_mapping, write_mapping


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
            where = f"into its {lacking[0]} pose (red in {path.with_suffix('.png')})"
            print(f"next: move the arm by hand {where}, then confirm_mapping=<your name>", file=sys.stderr)
        return {
            "bundle": options.bundle, "robot": found.name, "mapping": options.mapping, "confirmed_poses": [*seen],
            "confirmed": not lacking,
        }  # fmt: skip


def propose(bundle: Bundle, robot: Robot) -> RobotMapping:
    """Return a draft for a connected robot. UserError for a robot with fewer joints than the policy's arm.

    A joint gets the robot's name that ends with ours, such as ``fr3_joint1.pos`` for ``joint1.pos``. If one has none,
    or several, all are taken in the robot's order. If a joint is beyond a full turn of radians, all are in degrees. A
    gripper runs from 0 to 100, as LeRobot's do, and a finger is in metres, as in ROS. A place that the robot calls
    ``<term>_pos`` is found for a term that it lacks.
    """
    names, observed, arm = list(robot.action_features), robot.observation_features, bundle.arm
    grippers = [name for name in names if "gripper" in name or "finger" in name]
    positions = [name for name in names if name not in grippers]
    if len(positions) < len(arm.joints):
        raise UserError(f"the robot has {len(positions)} joints, the policy's arm {len(arm.joints)}")
    alike = [[name for name in positions if name.endswith(f"{joint.name}.pos")] for joint in arm.joints]
    chosen = [found[0] for found in alike] if all(len(found) == 1 for found in alike) else positions
    now = robot.get_observation()
    unit: Unit = "deg" if any(abs(float(now.get(name, 0.0))) > 2 * pi for name in chosen[: len(arm.joints)]) else "rad"
    joints = {}
    for joint, name in zip(arm.joints, chosen, strict=False):
        speed = name.removesuffix(".pos") + ".vel"
        joints[joint.name] = Entry(name, unit, velocity=speed if speed in observed else None)
    name = grippers[0] if grippers else GRIPPER
    percent = Entry(name, "percent", low=0.0, high=arm.gripper.max_position_m)
    gripper = Entry(name, "m") if "finger" in name else percent
    lacking = [name for name in StateBuilder(bundle).external_names if name not in observed]
    places = {name: name.replace("[", "_pos[") for name in lacking}
    external = {ours: theirs for ours, theirs in places.items() if theirs in observed}
    return RobotMapping(robot.name, joints, gripper, external)


def show(robot: MappedRobot, path: Path) -> NDArray[np.float64]:
    """Print the mapping as a table, draw the robot's pose and those of a confirmation; return the joints [J].

    Positions in the table are rad or m. UserError for an old measurement.
    """
    observation = robot.get_observation()
    Limits.of(robot.arm).check_age(age(observation, time.monotonic()))
    now, wanted, picture = joint_values(robot.arm, observation), poses(robot.arm), path.with_suffix(".png")
    drawn = {"now": now, **wanted}
    lines = [f"{'joint':10} {'on the robot':24} sign  {'unit':8}{''.join(f'{name:>10}' for name in drawn)}  (rad, m)"]
    for i, joint in enumerate(robot.arm.joints):
        entry, numbers = robot.mapping.joints[joint.name], "".join(f"{pose[i]:+10.3f}" for pose in drawn.values())
        lines.append(f"{joint.name:10} {entry.name:24} {entry.sign:+d}    {entry.unit:8}{numbers}")
    gripper = robot.mapping.gripper
    lines.append(f"{'gripper':10} {gripper.name:24} {gripper.sign:+d}    {gripper.unit}")
    rows = [draw_poses(robot.arm, {"now": now, name: pose}) for name, pose in wanted.items()]
    picture.write_bytes(encode_png(np.concatenate(rows)))
    lines.append(
        f"{picture}: blue is the robot now, as the mapping reads it; red is its {DEFAULT} pose in the upper row, its "
        f"{SECOND} pose in the lower one. Seen from its right side, from the front, and from above"
    )
    print("\n".join(lines), file=sys.stderr)
    return now
