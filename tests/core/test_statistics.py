"""Intervals against published values."""

from __future__ import annotations

import math

import pytest

from embodied.core.statistics import student_t_quantile, t_interval, wilson_interval


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


def test_wider_with_confidence_narrower_with_trials() -> None:
    def width(trials: int, z: float) -> float:
        low, high = wilson_interval(trials // 2, trials, z)
        return high - low

    assert width(100, 2.576) > width(100, 1.96) > width(400, 1.96)


@pytest.mark.parametrize(("successes", "trials"), [(-1, 5), (6, 5)])
def test_impossible_counts(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, trials)


@pytest.mark.parametrize(
    ("degrees", "confidence", "expected"),
    [
        (1, 0.95, 12.7062), (2, 0.95, 4.3027), (3, 0.95, 3.1824), (4, 0.95, 2.7764), (9, 0.95, 2.2622),
        (30, 0.95, 2.0423), (120, 0.95, 1.9799), (2, 0.99, 9.9248), (5, 0.9, 2.0150), (100_000, 0.95, 1.9600),
    ],
)  # fmt: skip
def test_quantiles_of_student_are_those_of_the_tables(degrees: int, confidence: float, expected: float) -> None:
    assert student_t_quantile(degrees, confidence) == pytest.approx(expected, abs=1e-4)


def test_the_interval_over_seeds_is_about_seeds_and_not_about_episodes() -> None:
    """Three seeds of 200 episodes: pooled, their Wilson interval would be 79 to 85."""
    center, half = t_interval([84.5, 71.5, 91.0])
    assert center == pytest.approx(82.33, abs=0.01)
    assert half == pytest.approx(24.66, abs=0.02)
    assert t_interval([3.0]) == (3.0, math.inf)
    assert t_interval([1.0, 1.0]) == (1.0, 0.0)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (2, 0.0), (2, 1.0)])
def test_quantiles_that_do_not_exist(degrees: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="allowed: at least 1, between 0 and 1"):
        student_t_quantile(degrees, confidence)
    with pytest.raises(ValueError, match="at least one value"):
        t_interval([])
