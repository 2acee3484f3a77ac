"""Words above pictures: they are there, they fit, and the pictures are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.report.video import BACKGROUND, caption

SHORT, LONG = "lift the cube", "pick up the yellow cylinder and put it in the right tray"


def ink(strip_sw3: np.ndarray) -> np.ndarray:
    """Where something is written, bool [s, w]."""
    return (strip_sw3 != BACKGROUND).any(-1)


@pytest.mark.parametrize("size", [(240, 320), (48, 64), (392, 1176)])
def test_texts_are_above_their_pictures(size: tuple[int, int]) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (3, *size, 3)).astype(np.uint8)
    shown = caption(rgb, [SHORT, LONG, SHORT])
    above = shown.shape[1] - size[0]
    assert above > 0
    assert above % 2 == 0
    assert np.array_equal(shown[:, above:], rgb)
    strips = shown[:, :above]
    assert np.array_equal(strips[0], strips[2])
    assert not np.array_equal(strips[0], strips[1])
    for strip in strips:
        rows, columns = ink(strip).any(1), ink(strip).any(0)
        assert rows.any()
        assert not rows[[0, -1]].any(), "letters must not touch the edges"
        assert not columns[[0, -1]].any()


def test_a_long_text_takes_a_second_line_before_its_letters_shrink() -> None:
    rgb = np.zeros((1, 240, 320, 3), np.uint8)
    short, long, endless = (ink(caption(rgb, [text])[0, :-240]) for text in (SHORT, LONG, 8 * LONG))
    assert [lines(strip) for strip in (short, long)] == [1, 2]
    assert line_height(long) >= 0.8 * line_height(short)
    assert line_height(endless) < 0.8 * line_height(short)


def lines(strip_sw: np.ndarray) -> int:
    """Blocks of neighbouring rows with ink."""
    rows = strip_sw.any(1)
    return int(rows[0]) + int((rows[1:] & ~rows[:-1]).sum())


def line_height(strip_sw: np.ndarray) -> int:
    """Pixels of the first block of rows with ink."""
    rows = strip_sw.any(1)
    first = int(rows.argmax())
    return int((~rows[first:]).argmax())
