"""Paired comparison: errors, intervals and savings over simulated studies."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.core.comparison import (
    NOT_WORSE,
    UNDECIDED,
    WORSE,
    comparison,
    confidence_interval,
    decide,
    first_shown,
    fixed_episodes,
    wealth,
)


def differences(studies: int, episodes: int, discordant: float, mean: float) -> np.ndarray:
    shares = [(discordant - mean) / 2, 1 - discordant, (discordant + mean) / 2]
    return np.random.default_rng(0).choice([-1, 0, 1], size=(studies, episodes), p=shares)


@pytest.mark.parametrize(("discordant", "threshold"), [(0.02, 0.0), (0.05, 0.05), (0.2, 0.05), (0.4, 0.05)])
def test_at_the_threshold_each_decision_is_made_in_at_most_five_percent_of_the_studies(
    discordant: float, threshold: float
) -> None:
    d = differences(400, 1000, discordant, -threshold)
    assert (first_shown(d, -threshold, 0.05) > 0).mean() <= 0.05
    assert (first_shown(-d, threshold, 0.05) > 0).mean() <= 0.05


def test_the_wealth_is_that_of_bets_made_one_by_one() -> None:
    d, mean = differences(1, 30, 0.5, 0.1)[0], -0.05
    stakes = 1 / (1 + np.exp(-np.linspace(-3.5, 3.0, 9)))
    kept = np.ones(9)
    for t, value in enumerate(d):
        kept *= 1 + stakes / (1 + mean) * (value - mean)
        assert wealth(d, mean)[t] == pytest.approx(kept.mean())


def test_a_difference_of_ten_points_takes_thirty_percent_fewer_episodes_than_a_fixed_number_of_equal_power() -> None:
    ends = first_shown(differences(300, 1000, 0.2, 0.1), -0.05, 0.05)
    assert (ends > 0).all()
    assert ends.mean() < 0.7 * fixed_episodes(0.1, 0.2, -0.05, 0.05, 0.99)


def test_the_interval_holds_the_mean_at_every_number_of_episodes() -> None:
    held = [
        all(low <= 0.1 <= high for low, high in (confidence_interval(d[:n], 0.05) for n in (50, 200, 400)))
        for d in differences(60, 400, 0.3, 0.1)
    ]
    assert np.mean(held) >= 0.95


def test_it_ends_where_it_is_decided() -> None:
    same = np.zeros(110, np.int64)
    assert [decide(same[:n], 0.05, 0.05) for n in (60, 110)] == [UNDECIDED, NOT_WORSE]
    solved = np.arange(200) % 2
    found = comparison(solved, solved * (np.arange(200) % 3 == 0), 0.05, 0.05)
    assert (found["decision"], found["better"], found["solved_by_one"][1]) == (WORSE, "a", 0)
    low, high = found["difference_ci95"]
    assert found["difference"] == pytest.approx(found["success_at_end"][1] - found["success_at_end"][0])
    assert low < found["difference"] < high < 0
    assert comparison(solved, solved, 0.0, 0.05)["saved_episodes"] is None


@pytest.mark.parametrize(
    ("difference", "discordant", "mean", "episodes"), [(0.0, 0.2, -0.05, 861), (0.1, 0.2, -0.05, 94)]
)
def test_a_fixed_number_has_its_power(difference: float, discordant: float, mean: float, episodes: int) -> None:
    assert fixed_episodes(difference, discordant, mean, 0.05, 0.95) == episodes
    d = differences(2000, episodes, discordant, difference)
    z = (d.mean(-1) - mean) / np.sqrt((discordant - mean**2) / episodes)
    assert (z > 1.645).mean() == pytest.approx(0.95, abs=0.02)
