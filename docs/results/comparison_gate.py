"""Errors of ``embodied.compare``'s gate, and the episodes that it takes next to tests of a fixed number of episodes.

python docs/results/comparison_gate.py docs/results/comparison_gate.json

``errors``: the difference is exactly at the threshold, so either decision is an error. ``episodes``: the difference is
the given one and the threshold is 5 points. The gate looks after every 20 episodes, up to 6,000. A fixed number is that
of the score test (Tango 1998) with the power that the gate had within its limit, or its lower 95% bound if that is 1;
and with 95% power, for which ``power_of_fixed_95`` is what the test really had.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.comparison import first_shown, fixed_episodes
from embodied.core.statistics import wilson_interval
from embodied.report.metrics import write_json

ALPHA, LIMIT, BATCH, CHUNK = 0.05, 6000, 20, 100
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of the episodes that one policy alone solves
THRESHOLDS = (0.0, 0.01, 0.05)
DIFFERENCES = (-0.1, 0.0, 0.1)


def shares(discordant: float, difference: float) -> list[float]:
    """Probabilities of d = -1, 0, 1."""
    return [(discordant - difference) / 2, 1 - discordant, (discordant + difference) / 2]


def gate(studies: int, discordant: float, difference: float, threshold: float) -> dict[str, Any]:
    """Simulate studies; return the share of both decisions, and the episodes that they took."""
    rng = np.random.Generator(
        np.random.Philox(key=[round(1e4 * discordant), round(1e4 * (1 + difference - threshold))])
    )
    ends, below = [], []
    for _ in range(0, studies, CHUNK):
        d = (rng.random((CHUNK, LIMIT, 1)) > np.cumsum(shares(discordant, difference))[:2]).sum(-1) - 1
        shown = np.stack([first_shown(d, -threshold, ALPHA), first_shown(-d, threshold, ALPHA)])
        shown[shown == 0] = LIMIT + 1
        below.append(shown[1] < shown[0])
        ends.append(shown.min(0))
    end, worse = np.concatenate(ends), np.concatenate(below)
    decided = end <= LIMIT
    episodes = np.minimum(LIMIT, -(-end // BATCH) * BATCH)
    return {
        "not_worse": float((decided & ~worse).mean()), "worse": float((decided & worse).mean()),
        "episodes_mean": round(float(episodes.mean()), 1),
        "episodes_p50_p90": np.quantile(episodes, [0.5, 0.9]).tolist(),
    }  # fmt: skip


def power_of_fixed(studies: int, discordant: float, difference: float, threshold: float, episodes: int) -> float:
    """Simulate the one-sided score test with a fixed number of episodes; return the share of right decisions."""
    sign = 1 if difference > -threshold else -1
    rng = np.random.Generator(np.random.Philox(key=[episodes, round(1e4 * discordant)]))
    counts = rng.multinomial(episodes, shares(discordant, difference), size=studies)
    down, up = counts[:, 0], counts[:, 2]
    m = -threshold
    linear = up * (1 + m) + down * (1 - m) - 2 * m * episodes  # p(d = -1) under the threshold solves a quadratic
    p = (linear + np.sqrt(np.maximum(0, linear**2 + 8 * episodes * down * m * (1 - m)))) / (4 * episodes)
    variance = np.maximum(1e-12, 2 * p + m - m**2) / episodes
    z = sign * ((up - down) / episodes - m) / np.sqrt(variance)
    return float((z > 1.6449).mean())


def measure(studies: int) -> dict[str, Any]:
    errors, episodes = [], []
    for threshold in THRESHOLDS:
        for discordant in (share for share in SHARES if share >= threshold):
            found = gate(studies, discordant, -threshold, threshold)
            row = {"min_difference": threshold, "discordant": discordant, "difference": -threshold}
            errors.append(row | {key: found[key] for key in ("not_worse", "worse")})
            print(errors[-1], flush=True)
    for difference in DIFFERENCES:
        for discordant in (share for share in SHARES if share >= abs(difference)):
            found = gate(studies, discordant, difference, 0.05)
            power = found["worse" if difference < -0.05 else "not_worse"]
            bound = power if power < 1 else wilson_interval(studies, studies)[0]
            equal, usual = (fixed_episodes(difference, discordant, -0.05, ALPHA, p) for p in (bound, 0.95))
            row = {"min_difference": 0.05, "discordant": discordant, "difference": difference, **found}
            row |= {"fixed_equal_power": equal, "fewer": round(1 - found["episodes_mean"] / equal, 3)}
            row |= {"fixed_power_95": usual, "fewer_than_95": round(1 - found["episodes_mean"] / usual, 3)}
            row["power_of_fixed_95"] = power_of_fixed(studies, discordant, difference, 0.05, usual)
            episodes.append(row)
            print(row, flush=True)
    return {"studies": studies, "limit": LIMIT, "batch": BATCH, "alpha": ALPHA, "errors": errors, "episodes": episodes}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_json(Path(sys.argv[1]), measure(10_000))
