"""Pictures of an arm's poses as line drawings, PNG. Standard library and numpy alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm.kinematics import Chain
from embodied.core.spec import ArmSpec

Array = NDArray[np.float64]
SIZE = 360  # pixels of a view's edge
SCALE = 250.0  # pixels per metre
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44))
# What points to the right and what up, in the base frame: from its right side, from the front, and from above as its
# base sees it.
VIEWS = (((1, 0, 0), (0, 0, 1)), ((0, 1, 0), (0, 0, 1)), ((0, -1, 0), (1, 0, 0)))
ORIGINS = (0.3, 0.5, 0.5)  # of each view, share of its width
FINGERS_M, FLAG_M = 0.05, 0.1  # half the bar of the fingers, and the line of the hand's direction


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
