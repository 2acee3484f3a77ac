"""PNG files: what is written is read; damaged, foreign and oversized ones are refused."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from embodied.data.images import decode_png, encode_png

IMAGE = (np.random.default_rng(0).integers(0, 9, (23, 17, 3)).cumsum(0) % 256).astype(np.uint8)


def by_pillow(image: np.ndarray, mode: str = "RGB", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).convert(mode).save(file, kind)
    return file.getvalue()


def png(width: int, height: int, lines: bytes) -> bytes:
    """A PNG file of 8-bit RGB with any content."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def test_what_is_written_is_read() -> None:
    file = encode_png(IMAGE)
    np.testing.assert_array_equal(decode_png(file), IMAGE)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))), IMAGE)
    np.testing.assert_array_equal(decode_png(png(2, 1, bytes([0, 1, 2, 3, 4, 5, 6]))), [[[1, 2, 3], [4, 5, 6]]])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (by_pillow(IMAGE, kind="JPEG"), "it is not a PNG file; JPEG and others must be converted"),
        (b"", "it is not a PNG file"),
        (by_pillow(IMAGE, "RGBA"), "holds RGBA, needed is RGB"),
        (by_pillow(IMAGE, "L"), "holds L, needed is RGB"),
        (png(2, 2, bytes(3)), "the PNG file is damaged"),
        (png(1, 1, bytes([9, 0, 0, 0])), "the PNG file is damaged"),
        (png(5000, 5000, b""), "5000 x 5000 pixels, at most"),
        (png(100_000, 100_000, b""), "too large"),
    ],
)
def test_other_files_are_refused(file: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_png(file)


def test_a_file_that_is_cut_short_is_refused_wherever_it_ends() -> None:
    file = encode_png(IMAGE)
    end = file.index(b"IDAT") + 40
    for size in range(end):
        with pytest.raises(ValueError, match="PNG file"):
            decode_png(file[:size])
