"""Confidence intervals: of a success rate over episodes, and of a mean over training seeds."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

# 97.5th percentiles of Student's t distribution with 1, 2, ... degrees of freedom
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604,
        2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860)  # fmt: skip
Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a binomial proportion; [0, 1] if there are no trials.

    ValueError unless 0 <= successes <= trials.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).

    >>> [round(x, 4) for x in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} must be between 0 and trials={trials}")
    if trials == 0:
        return 0.0, 1.0
    rate, z = successes / trials, Z_95
    scale = 1.0 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% t interval of the mean of two or more values. With more than 21 it is a little too wide.

    >>> [round(x, 3) for x in t_interval([0.9, 0.95, 1.0])]
    [0.826, 1.074]
    """
    half = T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half
