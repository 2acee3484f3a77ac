"""Confidence intervals: of a success rate over episodes, and of a mean over training seeds."""

import math
from collections.abc import Sequence

Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson score interval of a binomial proportion; [0, 1] if there are no trials.

    z: quantile of the standard normal for the wanted confidence. ValueError unless 0 <= successes <= trials.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).

    >>> [round(x, 4) for x in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} must be between 0 and trials={trials}")
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    scale = 1.0 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def student_t_quantile(degrees: int, confidence: float = 0.95) -> float:
    """Return the t with P(|T| <= t) = confidence for Student's T with so many degrees of freedom.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4, inverted by bisection.
    ValueError for less than one degree of freedom or a confidence outside (0, 1).

    >>> [round(student_t_quantile(n), 3) for n in (1, 2, 9)]
    [12.706, 4.303, 2.262]
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(f"got degrees={degrees}, confidence={confidence}, allowed: at least 1, between 0 and 1")

    def probability(angle: float) -> float:  # of |T| <= sqrt(degrees) * tan(angle)
        cos, term = math.cos(angle), 1.0 if degrees % 2 == 0 else math.cos(angle)
        total = 0.0
        for i in range(2 if degrees % 2 == 0 else 3, degrees + 1, 2):
            total += term
            term *= cos * cos * (i - 1) / i
        if degrees % 2 == 0:
            return math.sin(angle) * total
        return 2 / math.pi * (angle + math.sin(angle) * total)

    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of the 95% t interval of the mean of values, such as those of training seeds.

    The half width is infinite for a single value. ValueError for none.

    >>> [round(x, 1) for x in t_interval([84.5, 71.5, 91.0])]
    [82.3, 24.7]
    """
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    mean, count = sum(values) / len(values), len(values)
    if count == 1:
        return mean, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, student_t_quantile(count - 1) * math.sqrt(variance / count)
