"""PNG files: what is written, and what is read of others' writing."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from embodied.core.png import SIGNATURE, decode_png, encode_png

PICTURE = (np.random.default_rng(0).integers(0, 9, (23, 17, 3)).cumsum(0) % 256).astype(np.uint8)


def by_pillow(picture: np.ndarray, mode: str = "RGB", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(file, kind)
    return file.getvalue()


def filtered(picture: np.ndarray, kinds: list[int]) -> bytes:
    """A PNG file whose line y has filter ``kinds[y % len]``, by the book (PNG specification, section 9.2)."""
    height, width, _ = picture.shape
    x, lines = picture.astype(int), b""
    for y in range(height):
        up = x[y - 1] if y else np.zeros((width, 3), int)
        left, corner = (np.vstack([np.zeros((1, 3), int), row[:-1]]) for row in (x[y], up))
        estimate = left + up - corner
        near = [abs(estimate - value) for value in (left, up, corner)]
        paeth = np.where((near[0] <= near[1]) & (near[0] <= near[2]), left, np.where(near[1] <= near[2], up, corner))
        kind = kinds[y % len(kinds)]
        line = x[y] - [0 * up, left, up, (left + up) // 2, paeth][kind]
        lines += bytes([kind]) + (line % 256).astype(np.uint8).tobytes()
    return png(struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), zlib.compress(lines))


def png(header: bytes, data: bytes) -> bytes:
    chunks = ((b"IHDR", header), (b"IDAT", data[:10]), (b"IDAT", data[10:]), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return SIGNATURE + b"".join(parts)


def test_what_is_written_is_read() -> None:
    np.testing.assert_array_equal(decode_png(encode_png(PICTURE)), PICTURE)
    np.testing.assert_array_equal(decode_png(by_pillow(PICTURE)), PICTURE)


@pytest.mark.parametrize("kinds", [[0], [1], [2], [3], [4], [3, 1, 4, 0, 2]])
def test_every_filter_is_undone(kinds: list[int]) -> None:
    file = filtered(PICTURE, kinds)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))), PICTURE)
    np.testing.assert_array_equal(decode_png(file), PICTURE)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (by_pillow(PICTURE, kind="JPEG"), "it is not a PNG file; JPEG and others must be converted"),
        (by_pillow(PICTURE, "RGBA"), "has 8 bits, colour type 6 and interlacing 0; what is read here is 8-bit RGB"),
        (by_pillow(PICTURE, "L"), "colour type 0"),
        (filtered(PICTURE, [0])[:80], "the PNG file is damaged"),
        (SIGNATURE, "the PNG file is damaged"),
        (
            png(struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0), zlib.compress(bytes(3))),
            "has 3 bytes for 2 lines of 2 pixels",
        ),
        (png(struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0), zlib.compress(bytes([9, 0, 0, 0]))), "line 0 has filter 9"),
    ],
)
def test_other_files_are_refused(file: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_png(file)
