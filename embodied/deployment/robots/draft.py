"""A first draft of a mapping, from the names that a robot has. Everything in it is a guess, for a person to check."""

from __future__ import annotations

from math import pi

from embodied.core.errors import UserError
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.control.observation import StateBuilder
from embodied.deployment.robots.base import GRIPPER, Robot
from embodied.deployment.robots.mapping import Entry, RobotMapping, Unit


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
