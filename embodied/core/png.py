"""Pictures as PNG, without a library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
Line = NDArray[np.int_]


def encode_png(rgb: NDArray[Any]) -> bytes:
    """A picture [h, w, 3] uint8 as a PNG file. ValueError on anything else."""
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
        raise ValueError(f"picture: got {rgb.dtype} {rgb.shape}, needed uint8 [h, w, 3]")
    height, width, _ = rgb.shape
    left = np.concatenate([np.zeros((height, 1, 3), np.uint8), rgb[:, :-1]], axis=1)
    rows = np.full((height, 1 + 3 * width), 1, np.uint8)  # each line: filter 1, differences to the pixel on the left
    rows[:, 1:] = (rgb - left).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + _chunk(b"IEND", b"")
    return SIGNATURE + chunks


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """The picture [h, w, 3] uint8 in a PNG file of 8-bit RGB without interlacing; ValueError on any other file."""
    if data[:8] != SIGNATURE:
        raise ValueError("it is not a PNG file; JPEG and others must be converted, for instance with pillow")
    header, compressed, at = b"", b"", 8
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + size]
        header = content if kind == b"IHDR" else header
        compressed += content if kind == b"IDAT" else b""
        at += 12 + size
    try:
        width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", header)
        lines = np.frombuffer(zlib.decompress(compressed), np.uint8)
    except (struct.error, zlib.error) as error:
        raise ValueError(f"the PNG file is damaged: {error}") from error
    if (depth, color, interlaced) != (8, 2, 0):
        raise ValueError(
            f"the PNG file has {depth} bits, colour type {color} and interlacing {interlaced}; what is read here is "
            "8-bit RGB (type 2) without interlacing, into which for instance pillow converts"
        )
    if lines.size != height * (1 + 3 * width):
        raise ValueError(f"the PNG file is damaged: it has {lines.size} bytes for {height} lines of {width} pixels")
    lines = lines.reshape(height, 1 + 3 * width)
    return _unfilter(lines[:, 0], lines[:, 1:].reshape(height, width, 3))


def _unfilter(filters_h: NDArray[np.uint8], raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo the filter of each line (PNG specification, section 9); arithmetic is modulo 256."""
    if (filters_h == 1).all():  # as encode_png writes them
        return np.cumsum(raw, axis=1, dtype=np.uint8)
    rgb = np.zeros_like(raw)
    above = np.zeros_like(raw[0])
    for y, kind in enumerate(filters_h.tolist()):
        if kind == 0:
            rgb[y] = raw[y]
        elif kind == 1:
            rgb[y] = np.cumsum(raw[y], axis=0, dtype=np.uint8)
        elif kind == 2:
            rgb[y] = raw[y] + above
        elif kind in (3, 4):
            rgb[y] = _predicted(raw[y].astype(int), above.astype(int), _average if kind == 3 else _paeth)
        else:
            raise ValueError(f"the PNG file is damaged: line {y} has filter {kind}")
        above = rgb[y]
    return rgb


def _predicted(raw: Line, above: Line, predict: Callable[[Line, Line, Line], Line]) -> NDArray[np.uint8]:
    """A line [w, 3] whose pixels are differences to what ``predict`` makes of those left, above, and left above."""
    line, left, corner = np.zeros_like(raw), np.zeros(3, int), np.zeros(3, int)
    for x in range(len(raw)):
        line[x] = (raw[x] + predict(left, above[x], corner)) % 256
        left, corner = line[x], above[x]
    return line.astype(np.uint8)


def _average(left: Line, above: Line, corner: Line) -> Line:
    return (left + above) // 2


def _paeth(left: Line, above: Line, corner: Line) -> Line:
    """Whichever of the three is nearest to left + above - corner; the first of equals."""
    choices = np.stack([left, above, corner])
    nearest: Line = choices[np.abs(left + above - corner - choices).argmin(0), np.arange(3)]
    return nearest


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
