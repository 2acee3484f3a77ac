"""From a new robot to one that may be driven: draft its mapping, look at its picture, confirm it in two poses, use it.

The default pose alone shows too little: where a joint is at zero, its sign, its unit and an exchange with another such
joint change nothing. In the second pose every joint is away from zero and has moved by an amount of its own. A person
brings the real arm into both poses by their drawing; a confirmation from one drives no robot. It holds for the very
mapping, arm and robot that were confirmed.
"""

import hashlib
import json
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm import Array, Chain
from embodied.core.errors import UserError
from embodied.core.spec import Arms, ArmSpec, JointSpec, described, joints_of
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.control.arm import StateBuilder
from embodied.deployment.control.safety import check_age
from embodied.deployment.options import DeployOptions
from embodied.deployment.robots.base import (
    Driver,
    Robot,
    action_names,
    age,
    connected,
    gripper_names,
    joint_names,
    number,
    values,
)
from embodied.deployment.robots.mapping import (
    Confirmation,
    Entry,
    MappedRobot,
    RobotMapping,
    gripper_entry,
    read_mapping,
    shut_at,
    write_mapping,
)

DEFAULT, SECOND = "default", "second"
NEAREST, SPACING = 0.4, 0.3  # smallest move of a joint between the poses, and smallest difference of two moves
TOLERANCE = 0.2  # largest distance of the real arm from a pose
SHARE = 3.0  # the three numbers above are rad, or less for a joint whose range is below SHARE rad
TRIES = 2_000

SIZE = 360  # pixels of a view's edge
SCALE = 250.0  # pixels per metre
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44))
# What points to the right and what up, in the base frame: from its right side, from the front, and from above as its
# base sees it.
VIEWS = (((1, 0, 0), (0, 0, 1)), ((0, 1, 0), (0, 0, 1)), ((0, -1, 0), (1, 0, 0)))
ORIGINS = (0.3, 0.5, 0.5)  # of each view, share of its width
FINGERS_M, FLAG_M = 0.05, 0.1  # half the bar of the fingers, and the line of the hand's direction


def mapped(robot: Driver, options: DeployOptions, bundle: Bundle) -> Robot:
    """Return the robot behind its mapping. UserError, and a picture, for a mapping that nobody confirmed."""
    assert options.mapping is not None
    path = Path(options.mapping)
    found = MappedRobot(robot, read_mapping(path), bundle.arms)
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
        try:
            found = MappedRobot(robot, read_mapping(path), bundle.arms)
        except UserError as error:
            raise UserError(f"mapping={path} needs a correction: {error}") from error
        qpos, gripper = show(found, path)
        seen: tuple[str, ...] = ()
        if options.confirm_mapping is not None:
            mapping = confirm(found, options.confirm_mapping, qpos, gripper)
            write_mapping(path, mapping)
            assert mapping.confirmed is not None
            seen = mapping.confirmed.poses
        lacking = [name for name in poses(bundle.arms) if name not in seen]
        if lacking:
            right_shut = len(bundle.arms) > 1 and lacking[0] == SECOND
            grip = "the left gripper open, the right one shut" if right_shut else "gripper open"
            where = f"into its {lacking[0]} pose (red in {path.with_suffix('.png')}), {grip}"
            print(f"next: move the arm by hand {where}, then confirm_mapping=<your name>", file=sys.stderr)
        return {
            "bundle": options.bundle, "robot": found.name, "mapping": options.mapping, "confirmed_poses": [*seen],
            "confirmed": not lacking,
        }  # fmt: skip


def propose(bundle: Bundle, robot: Driver) -> RobotMapping:
    """Return a draft for a connected robot. UserError for a robot with fewer joints than the policy's arm.

    A joint gets the robot's name that ends with ours, such as ``fr3_joint1.pos`` for ``joint1.pos``. If one has none,
    or several, all are taken in the robot's order; of two arms they then keep our names, which a person has to replace,
    and so do their grippers. If a joint is beyond a full turn of radians, all are in degrees. A
    finger is in metres, as in ROS, and so is a gripper whose number lies within the opening of the policy's. Any other
    gripper runs from 0 to 100, as LeRobot's do. A place that the robot calls ``<term>_pos`` is found for a term that it
    lacks.
    """
    names, observed, joints = list(robot.action_features), robot.observation_features, joints_of(bundle.arms)
    grippers = [name for name in names if "gripper" in name or "finger" in name]
    positions = [name for name in names if name not in grippers]
    if len(positions) < len(joints):
        raise UserError(f"the robot has {len(positions)} joints, the policy's arms {len(joints)}")
    now, one, own = robot.get_observation(), len(bundle.arms) == 1, gripper_names(bundle.arms)
    chosen = _alike(joint_names(bundle.arms), positions) or (positions if one else joint_names(bundle.arms))
    degrees = any(abs(number(now, name)) > 2 * pi for name in chosen[: len(joints)] if name in now)
    entries = {}
    for joint, name in zip(joints, chosen, strict=False):
        speed = name.removesuffix(".pos") + ".vel"
        entries[joint] = Entry(name, "deg" if degrees else "rad", velocity=speed if speed in observed else None)
    fingers = grippers[:1] or own if one else _alike(own, grippers) or own
    of_arms = [
        Entry(name, arm.gripper.position_unit)
        if "finger" in name or (name in now and 0 < number(now, name) <= 1.05 * arm.gripper.max_position_m)
        else gripper_entry(arm, name)
        for arm, name in zip(bundle.arms.values(), fingers, strict=True)
    ]
    lacking = [name for name in StateBuilder(bundle).external_names if name not in observed]
    places = {name: name.replace("[", "_pos[") for name in lacking}
    external = {ours: theirs for ours, theirs in places.items() if theirs in observed}
    left, right = of_arms if len(of_arms) > 1 else (of_arms[0], None)
    return RobotMapping(robot.name, entries, left, external, right_gripper=right)


def _alike(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Return the name of theirs that ends with each of ours; nothing if one has none, or several."""
    found = [[name for name in theirs if name.endswith(own)] for own in ours]
    return [name for (name,) in found] if all(len(names) == 1 for names in found) else []


def show(robot: MappedRobot, path: Path) -> tuple[Array, Array]:
    """Print the mapping in rad or m, draw the poses; return joints [J] and grippers. UserError for old numbers."""
    arms, observation = robot.arms, robot.get_observation()
    check_age(age(observation, time.monotonic()))
    now, wanted, picture = values(observation, joint_names(arms)), poses(arms), path.with_suffix(".png")
    grippers = values(observation, gripper_names(arms))
    fingers = fingers_in(arms)
    drawn = {"now": np.append(now, grippers), **{name: np.append(wanted[name], fingers[name]) for name in wanted}}
    lines = [f"{'joint':14} {'on the robot':24} sign  {'unit':8}{''.join(f'{name:>10}' for name in drawn)}  (rad, m)"]
    entries = robot.mapping.entries
    for i, name in enumerate(action_names(arms)):
        entry = entries[name]
        numbers = "".join(f"{pose[i]:+10.{3 if i < len(now) else 4}f}" for pose in drawn.values())
        lines.append(f"{name.removesuffix('.pos'):14} {entry.name:24} {entry.sign:+d}    {entry.unit:8}{numbers}")
    rows = [draw_poses(arms, {"now": now, name: pose}) for name, pose in wanted.items()]
    picture.write_bytes(encode_png(np.concatenate(rows)))
    red = f"red is its {DEFAULT} pose in the upper row, its {SECOND} pose in the lower one"
    views = "Seen from its right side, from the front, and from above"
    lines.append(f"{picture}: blue is the robot now, as the mapping reads it; {red}. {views}")
    print("\n".join(lines), file=sys.stderr)
    return now, grippers


def poses(arms: Arms) -> dict[str, Array]:
    """Return the poses of a confirmation, joint positions [J] of all arms by name; see ``_poses``.

    In the second pose each joint is elsewhere than that of the other arm, and the right gripper is shut
    (``fingers_in``), so that exchanged arms are noticed.
    """
    left, *others = arms.values()
    each = [found := _poses(left), *(_poses(arm, tuple(found[SECOND])) for arm in others)]
    return {name: np.concatenate([found[name] for found in each]) for name in (DEFAULT, SECOND)}


def fingers_in(arms: Arms) -> dict[str, Array]:
    """Return where the fingers of each arm are in each pose, [arms]: open, but of the right arm shut in the second."""
    opened = np.array([arm.gripper.open_m for arm in arms.values()])
    shut = np.array([shut_at(arm) for arm in arms.values()])
    return {DEFAULT: opened, SECOND: np.append(opened[:1], shut[1:])}


@cache
def _poses(arm: ArmSpec, other: tuple[float, ...] = ()) -> dict[str, Array]:
    """Return the poses of one arm, joint positions [J] by name. UserError for an arm that has no second one.

    Of TRIES random second poses it is the one whose tool is nearest to that of the default pose, without a joint or the
    tool lower than all of them are there. other: second pose of the left arm, from which each joint is away.
    """
    home = np.array([joint.home for joint in arm.joints])
    low, high = (np.array([getattr(joint, end) for joint in arm.joints]) for end in ("low", "high"))
    unit, margin, nearest = _units(arm.joints), 0.05 * (high - low), np.inf
    sizes = NEAREST + SPACING * np.arange((len(home) + 1) // 2)
    moves, random = np.concatenate([sizes, -sizes]), np.random.Generator(np.random.Philox(key=0))
    found, chain = {DEFAULT: home}, Chain(arm)
    default = chain.points(home)
    for _ in range(TRIES):
        second = home + unit * random.permutation(moves)[: len(home)]
        within = (second >= low + margin) & (second <= high - margin) & (np.abs(second) >= NEAREST * unit)
        if not within.all() or (other and (np.abs(second - other) < 0.99 * SPACING * unit).any()):
            continue
        points = chain.points(second)
        distance = float(np.linalg.norm(points[-1] - default[-1]))
        if distance < nearest and points[2:, 2].min() >= default[2:, 2].min():
            nearest, found[SECOND] = distance, second
    if SECOND not in found:
        raise UserError("the arm's joint limits leave no second pose in which to confirm a mapping")
    return found


def _units(joints: Iterable[JointSpec]) -> Array:
    """Return what the constants above count in for each joint, rad or m, [J]."""
    spans = np.array([joint.high - joint.low for joint in joints]) / SHARE
    return np.where([joint.kind == "hinge" for joint in joints], np.minimum(1.0, spans), spans)


def confirm(robot: MappedRobot, by: str, qpos_J: Array, grippers_m: Array) -> RobotMapping:
    """Return the mapping, confirmed ``by`` a person in the arms' present pose, with ``fingers_in`` that pose.

    UserError for another pose, or for a gripper that is read otherwise: 4% in place of 4 cm is read as closed.
    """
    if not by.strip():
        raise UserError("confirm_mapping: give your name")
    before, sha256, joints = robot.mapping.confirmed, digest(robot), joints_of(robot.arms)
    seen = before.poses if before is not None and before.sha256 == sha256 else ()
    tolerance, wanted = TOLERANCE * _units(joints.values()), poses(robot.arms)
    here = [name for name, pose in wanted.items() if (np.abs(qpos_J - pose) <= tolerance).all()]
    if not here:
        name = next((name for name in wanted if name not in seen), DEFAULT)
        wrong = [
            f"{joint} is read at {value:+.2f} and belongs at {pose:+.2f}"
            for joint, value, pose, far in zip(joints, qpos_J, wanted[name], tolerance, strict=True)
            if not abs(value - pose) <= far
        ]
        why = "sign, unit or offset of these joints is wrong, or two are exchanged"
        if_there = f"If the real arm is in that pose (red in the picture), {why}"
        raise UserError(f"the mapping does not read the {name} pose: {'; '.join(wrong)}. {if_there}")
    each = zip(robot.arms.values(), grippers_m, fingers_in(robot.arms)[here[0]], gripper_names(robot.arms), strict=True)
    for arm, gripper_m, wanted_m, name in each:
        opened, unit, most = arm.gripper.open_m, arm.gripper.position_unit, 1.05 * arm.gripper.max_position_m
        shut = shut_at(arm)
        other = shut if wanted_m == opened else opened
        if not (abs(gripper_m - wanted_m) < abs(gripper_m - other) and gripper_m <= most):
            which, verb = name.removesuffix(".pos").replace("_", " "), "open" if wanted_m == opened else "shut"
            exchanged = ", or the two are exchanged" if len(robot.arms) > 1 else ""
            why = f"{verb} it; if it is {verb}, its unit, low, high or offset is wrong{exchanged}"
            read = f"the mapping reads the {which} at {gripper_m:.4g} {unit}"
            ends = f"open is {opened:.4g}, closed is {shut:.4g} {unit}"
            raise UserError(f"{read}: {ends}. In this pose it has to be {verb}: {why}")
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
        since = f"changed after {confirmed.by} confirmed it on {confirmed.at}"
        raise UserError(
            f"the mapping, the policy's arm or the robot's names {since}: look at its picture again, then {how}"
        )
    for name in (DEFAULT, SECOND):
        if name not in confirmed.poses:
            cure = f"move the arm to its {name} pose (red in the picture), then confirm_mapping=<your name>"
            raise UserError(f"{confirmed.by} confirmed this mapping in one pose, which shows too little: {cure}")


def digest(robot: MappedRobot) -> str:
    """Return the SHA-256 of what a confirmation holds for: mapping, arm with its limits, and the robot's names."""
    content = {
        "mapping": described(replace(robot.mapping, confirmed=None)),
        **{f"{side}arm": described(arm) for side, arm in robot.arms.items()},
        "robot": robot.robot.name, "actions": sorted(robot.robot.action_features),
        "observations": sorted(robot.robot.observation_features),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def draw_poses(arms: Arms, poses: Mapping[str, Array]) -> NDArray[np.uint8]:
    """Draw each pose (joints [J] of all arms, by name) from the side, the front and above, uint8 [h, 3 * h, 3].

    The first pose is blue, the second red, the third green; a grey line is the ground, from above the base. The hand is
    a bar along the tool's y axis, where the fingers of a Panda are, and a line with a square along its x axis.
    """
    image = np.full((SIZE, len(VIEWS) * SIZE, 3), 255, np.uint8)
    ground = round(0.85 * SIZE)
    image[ground, :] = 200
    image[:, SIZE::SIZE] = 120
    chains = [Chain(arm) for arm in arms.values()]
    drawn = [
        (colour, chain, qpos)
        for colour, pose in zip(COLOURS, poses.values(), strict=False)
        for chain, qpos in zip(chains, np.split(pose, len(chains)), strict=True)
    ]
    for colour, chain, qpos in drawn:
        tool, frame, _ = chain.tool(qpos)
        skeleton = chain.points(qpos)
        skeleton[0, 1] = skeleton[1, 1]  # one of two arms stands aside
        bar = tool + FINGERS_M * np.stack([-frame[:, 1], frame[:, 1]])
        flag = np.stack([tool, tool + FLAG_M * frame[:, 0]])
        for view, (right, up) in enumerate(VIEWS):
            origin = np.array([(view + ORIGINS[view]) * SIZE, ground])
            axes = SCALE * np.array([right, np.negative(up)], np.float64).T
            for points in (skeleton, bar, flag):
                for start, end in pairwise(origin + points @ axes):
                    for point in np.linspace(start, end, max(2, int(np.abs(end - start).max()) + 1)):
                        _square(image, point, colour, 1)
            _square(image, origin + flag[1] @ axes, colour)
    return image


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """Return an image [h, w, 3] as PNG (ISO/IEC 15948), without filters."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], 1).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _square(image: NDArray[np.uint8], at: Array, colour: tuple[int, int, int], half: int = 4) -> None:
    x, y = round(float(at[0])), round(float(at[1]))
    image[max(0, y - half) : max(0, y + half + 1), max(0, x - half) : max(0, x + half + 1)] = colour
