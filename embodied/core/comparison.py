"""Paired comparison of two policies that may be read after every episode, and stopped by what it shows.

    success of a and b in the same episodes ──► d in {-1, 0, 1} ──► wealth of bets on "the mean is above m" ──► shown?

A share c of the wealth is staked in each episode: the stake grows by (1 + d) / (1 + m), the rest is kept. If the mean
of d is at most m, the expected growth is at most 1, for any share of episodes that only one policy solves. Then the
wealth, which begins with 1, ever reaches 1 / alpha with a probability of at most alpha (Ville 1939). This holds at
every number of episodes, so stopping at a decision costs no error. The shares SHARES begin with equal parts of the
wealth.

Source: I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86 (2024); for
the mixture of constant shares F. Orabona and K.-S. Jun, "Tight concentrations and confidence sequences from the regret
of universal portfolio", IEEE Transactions on Information Theory 70 (2024).
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARES = 1 / (1 + np.exp(-np.linspace(-3.5, 3.0, 9)))
"""Staked shares c, from 0.03 to 0.95. The best one is about (mean - m) / (variance of d) for small differences."""
STEPS = 40  # of a bisection of [-1, 1]
POWER = 0.95  # of the fixed number of episodes that a comparison's saving is counted against
NOT_WORSE, WORSE, UNDECIDED = "not worse", "worse", "undecided"


def wealth(difference: NDArray[Any], mean: float) -> NDArray[np.float64]:
    """Return the wealth against "the mean is at most ``mean``" after each of T episodes, inf if too large, [..., T].

    difference: d of the episodes, integers in {-1, 0, 1}, [..., T]. mean: m, above -1.
    """
    returns = np.array([0.0, 1.0, 2.0]) / (1 + mean)  # of the stake, for d = -1, 0, 1
    total = np.zeros(difference.shape)
    with np.errstate(over="ignore"):
        for share in SHARES:
            total += np.exp(np.cumsum(np.log1p(share * (returns - 1))[difference + 1], axis=-1))
    return np.asarray(total / len(SHARES))


def first_shown(difference: NDArray[Any], mean: float, alpha: float) -> NDArray[np.int64]:
    """Return after how many episodes it is shown that the mean of d is above ``mean``, 0 for never, [...].

    alpha: largest probability of an error. For "below ``mean``" give the negatives of both.
    """
    shown = wealth(difference, mean) >= 1 / alpha
    return np.asarray(np.where(shown.any(-1), shown.argmax(-1) + 1, 0))


def confidence_interval(difference: NDArray[Any], alpha: float) -> tuple[float, float]:
    """Return the interval of the mean of d after T episodes, from the confidence sequence with error ``alpha``.

    It may be read after any number of episodes: the sequence has the mean in all of its intervals with a probability of
    at least 1 - alpha. difference: [T].
    """
    ends = []
    for d in (difference, -difference):
        low, high = -1.0, 1.0
        for _ in range(STEPS):  # the wealth falls as m grows
            middle = (low + high) / 2
            low, high = (middle, high) if first_shown(d, middle, alpha / 2) else (low, middle)
        ends.append(low)
    return ends[0], -ends[1]


def fixed_episodes(difference: float, discordant: float, mean: float, alpha: float, power: float) -> int:
    """Return how many episodes a test with a fixed number needs to show that the mean of d is not ``mean``.

    difference, discordant: true mean of d, and true share of episodes with d other than 0. The test is the one-sided
    score test of paired proportions with error ``alpha`` (T. Tango, Statistics in Medicine 17, 1998), in its normal
    approximation: the standard deviation under the hypothesis has the same share, or the smallest that can be.
    """
    assumed = math.sqrt(max(discordant, abs(mean)) - mean**2)
    true = math.sqrt(max(0.0, discordant - difference**2))
    size = NormalDist().inv_cdf(1 - alpha) * assumed + NormalDist().inv_cdf(power) * true
    return max(1, math.ceil((size / (difference - mean)) ** 2))


def decide(difference: NDArray[Any], min_difference: float, alpha: float) -> str:
    """Return whether it is shown that the mean of d [T] is above -min_difference (NOT_WORSE) or below it (WORSE)."""
    if first_shown(difference, -min_difference, alpha):
        return NOT_WORSE
    return WORSE if first_shown(-difference, min_difference, alpha) else UNDECIDED


def comparison(a: NDArray[Any], b: NDArray[Any], min_difference: float, alpha: float) -> dict[str, Any]:
    """Return what T episodes show of candidate b against a. a, b: 1 for each episode that was solved, else 0, [T].

    ``better`` is "b" or "a" if the interval has no 0. ``fixed_episodes`` is ``fixed_episodes`` with the power POWER at
    the shares that were seen, None if undecided.
    """
    difference = b.astype(np.int64) - a
    mean, discordant = float(difference.mean()), float(np.abs(difference).mean())
    low, high = confidence_interval(difference, alpha)
    decision = decide(difference, min_difference, alpha)
    fixed = None if decision == UNDECIDED else fixed_episodes(mean, discordant, -min_difference, alpha, POWER)
    return {
        "episodes": len(a), "success_at_end": [float(a.mean()), float(b.mean())], "difference": mean,
        "difference_ci95": [low, high], "solved_by_one": [int((difference < 0).sum()), int((difference > 0).sum())],
        "min_difference": min_difference, "decision": decision, "better": "b" if low > 0 else "a" if high < 0 else None,
        "fixed_episodes": fixed, "saved_episodes": None if fixed is None else fixed - len(a),
    }  # fmt: skip
