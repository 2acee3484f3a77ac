"""Intervals against published values."""

from __future__ import annotations

import pytest

from embodied.core.statistics import wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (190, 200, 0.9104, 0.9726),
    ],
)
def test_known_intervals(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_extremes_and_symmetry() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 50)[0] == 0.0
    assert wilson_interval(50, 50)[1] == 1.0
    low, high = wilson_interval(30, 100)
    assert wilson_interval(70, 100) == pytest.approx((1 - high, 1 - low))
    assert low < 0.3 < high


@pytest.mark.parametrize(("successes", "trials"), [(-1, 5), (6, 5)])
def test_impossible_counts(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, trials)
