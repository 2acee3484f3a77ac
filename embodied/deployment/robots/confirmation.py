"""A person confirms a mapping with the robot in two poses, which the mapping must then read.

The default pose alone shows too little. Where a joint is at zero, its sign, its unit and an exchange with another such
joint change nothing. In the second pose every joint is away from zero and has moved by an amount of its own. A person
brings the real arm into both poses by their drawing; a confirmation from one drives no robot. It holds for the very
mapping, arm and robot that were confirmed.
"""

import hashlib
import json
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.core.spec import ArmSpec
from embodied.deployment.robots.mapping import Confirmation, MappedRobot, RobotMapping

Array = NDArray[np.float64]
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
    tolerance, wanted = TOLERANCE * _units(robot.arm), poses(robot.arm)
    here = [name for name, pose in wanted.items() if (np.abs(qpos_J - pose) <= tolerance).all()]
    if not here:
        name = next((name for name in wanted if name not in seen), DEFAULT)
        wrong = [
            f"{joint.name} is read at {value:+.2f} and belongs at {pose:+.2f}"
            for joint, value, pose, far in zip(robot.arm.joints, qpos_J, wanted[name], tolerance, strict=True)
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
    for name in (DEFAULT, SECOND):
        if name not in confirmed.poses:
            raise UserError(
                f"{confirmed.by} confirmed this mapping in one pose, which does not show every sign, unit and "
                f"exchange: move the arm to its {name} pose (red in the picture), then confirm_mapping=<your name>"
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


def draw_poses(arm: ArmSpec, poses: Mapping[str, Array]) -> NDArray[np.uint8]:
    """Draw each pose (joint positions [J], by name) from the side, the front and above, uint8 [h, 3 * h, 3].

    The first pose is blue, the second red, the third green; a grey line is the ground, from above the base. The hand is
    a bar along the tool's y axis, where the fingers of a Panda are, and a line with a square along its x axis.
    """
    image = np.full((SIZE, len(VIEWS) * SIZE, 3), 255, np.uint8)
    ground = round(0.85 * SIZE)
    image[ground, :] = 200
    image[:, SIZE::SIZE] = 120
    chain = Chain(arm)
    for colour, qpos in zip(COLOURS, poses.values(), strict=False):
        tool, frame, _ = chain.tool(qpos)
        bar = tool + FINGERS_M * np.stack([-frame[:, 1], frame[:, 1]])
        flag = np.stack([tool, tool + FLAG_M * frame[:, 0]])
        for view, (right, up) in enumerate(VIEWS):
            origin = np.array([(view + ORIGINS[view]) * SIZE, ground])
            axes = SCALE * np.array([right, np.negative(up)], np.float64).T
            for points in (chain.points(qpos), bar, flag):
                for start, end in pairwise(origin + points @ axes):
                    _line(image, start, end, colour)
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


def _line(image: NDArray[np.uint8], start: Array, end: Array, colour: tuple[int, int, int]) -> None:
    count = max(2, int(np.abs(end - start).max()) + 1)
    for x, y in np.linspace(start, end, count):
        _square(image, np.array([x, y]), colour, 1)


def _square(image: NDArray[np.uint8], at: Array, colour: tuple[int, int, int], half: int = 4) -> None:
    x, y = round(float(at[0])), round(float(at[1]))
    image[max(0, y - half) : max(0, y + half + 1), max(0, x - half) : max(0, x + half + 1)] = colour
