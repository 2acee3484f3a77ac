"""Pictures as PNG, without a library."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def encode_png(rgb: NDArray[Any]) -> bytes:
    """A picture [h, w, 3] uint8 as a PNG file. ValueError on anything else."""
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
        raise ValueError(f"picture: got {rgb.dtype} {rgb.shape}, needed uint8 [h, w, 3]")
    height, width, _ = rgb.shape
    left = np.concatenate([np.zeros((height, 1, 3), np.uint8), rgb[:, :-1]], axis=1)
    rows = np.full((height, 1 + 3 * width), 1, np.uint8)  # each line: filter 1, differences to the pixel on the left
    rows[:, 1:] = (rgb - left).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
