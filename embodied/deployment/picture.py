"""Pictures of an arm's poses as line drawings, PNG. Standard library and numpy alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from embodied.core.kinematics import Chain, about, matrix_of
from embodied.core.spec import ArmSpec

Array = NDArray[np.float64]
SIZE = 360  # pixels of a view's edge
SCALE = 250.0  # pixels per metre
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44))
VIEWS = ((0, 2), (1, 2))  # side: x to the right; front: y to the right; z is up in both


def draw_poses(arm: ArmSpec, poses: Mapping[str, Array]) -> NDArray[np.uint8]:
    """Draw each pose (joint positions [J], by name) from the side (left) and the front (right), uint8 [h, w, 3].

    The first pose is blue, the second red, the third green; the tool is a square, the ground a grey line.
    """
    image = np.full((SIZE, 2 * SIZE, 3), 255, np.uint8)
    ground = round(0.85 * SIZE)
    image[ground, :] = 200
    image[:, SIZE] = 120
    for colour, qpos in zip(COLOURS, poses.values(), strict=False):
        points = skeleton(arm, qpos)
        for view, (right, up) in enumerate(VIEWS):
            origin = view * SIZE + SIZE // (4 if view == 0 else 2)
            pixels = np.stack([origin + SCALE * points[:, right], ground - SCALE * points[:, up]], -1)
            for start, end in pairwise(pixels):
                _line(image, start, end, colour)
            _square(image, pixels[-1], colour)
    return image


def skeleton(arm: ArmSpec, qpos_J: Array) -> Array:
    """Return the points of the arm from the base over every joint to the tool, [J + 2, 3], base frame, m."""
    pos, mat, points = np.zeros(3), np.eye(3), [np.zeros(3)]
    for joint, value in zip(arm.joints, qpos_J, strict=True):
        pos, mat = pos + mat @ np.array(joint.pos_m), mat @ matrix_of(joint.quat)
        points.append(pos)
        axis = np.array(joint.axis)
        if joint.kind == "slide":
            pos = pos + mat @ axis * value
        else:
            mat = mat @ about(axis, float(value))
    return np.stack([*points, Chain(arm).tool(qpos_J)[0]])


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
