"""Captions: a strip of text above each image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]

LINES = 2
BACKGROUND, INK = (32, 36, 44), (255, 255, 255)


def caption(rgb_nhw3: Pixels, texts: Sequence[str]) -> Pixels:
    """Put n texts above images [n, h, w, 3]; return [n, h + s, w, 3].

    The height s of the strip depends on h alone and is even. A text has at most ``LINES`` lines, in the largest font
    that fits.
    """
    n, height, width, _ = rgb_nhw3.shape
    size = max(8, height // 16)
    strips = np.zeros((n, 2 * round(0.7 * LINES * size), width, 3), np.uint8)
    for strip, text in zip(strips, texts, strict=True):
        strip[:] = _strip(text, size, *strip.shape[:2])
    return np.concatenate([strips, rgb_nhw3], axis=1)


def _strip(text: str, largest: int, height: int, width: int) -> Image.Image:
    """Draw the text in the middle of an image, in a font of at most ``largest`` pixels."""
    for size in range(largest, 0, -1):
        font = ImageFont.load_default(size)
        lines = _wrapped(text, font, width - size)
        if len(lines) <= LINES and max(map(font.getlength, lines)) <= width - size:
            break
    image = Image.new("RGB", (width, height), BACKGROUND)
    at = (width / 2, height / 2)
    ImageDraw.Draw(image).text(at, "\n".join(lines), INK, font, anchor="mm", align="center", spacing=size // 6)
    return image


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Break text into lines of whole words, none wider than ``width`` unless a single word is."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
