"""RunningNormalizer against numpy on all that it has seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.policies.normalizer import RunningNormalizer


def batches(offset=0.0):
    rng = np.random.default_rng(0)
    scale = np.array([1e-2, 1.0, 50.0])
    return [(rng.normal(size=(n, 3)) * scale + offset + n).astype(np.float32) for n in (1, 7, 300, 2, 1000)]


def test_matches_numpy_after_several_batches():
    normalizer = RunningNormalizer(3)
    for batch in batches():
        normalizer.update(torch.from_numpy(batch))
    seen = np.concatenate(batches()).astype(np.float64)
    np.testing.assert_allclose(normalizer.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(normalizer.var, seen.var(0), rtol=1e-5)
    assert int(normalizer.count) == len(seen)
    expected = (seen - seen.mean(0)) / seen.std(0)
    np.testing.assert_allclose(normalizer(torch.from_numpy(seen).float()), expected.clip(-10, 10), atol=1e-3)


def test_a_small_spread_far_from_zero_survives_float32():
    rng = np.random.default_rng(0)
    normalizer = RunningNormalizer(1)
    for _ in range(50):
        normalizer.update(torch.from_numpy((rng.normal(size=(256, 1)) * 0.1 + 1000.0).astype(np.float32)))
    assert abs(float(normalizer.var) / 0.01 - 1.0) < 0.03


def test_identity_before_the_first_update_and_unchanged_by_an_empty_batch():
    normalizer = RunningNormalizer(3)
    normalizer.update(torch.zeros(0, 3))
    x = torch.randn(4, 3)
    torch.testing.assert_close(normalizer(x), x)


def test_inverse_gives_back_what_was_standardised():
    normalizer = RunningNormalizer(3)
    x = torch.from_numpy(np.concatenate(batches()))
    normalizer.update(x)
    torch.testing.assert_close(normalizer.inverse(normalizer(x)), x, rtol=1e-4, atol=1e-3)


def test_leading_dimensions_are_all_batch():
    flat, nested = RunningNormalizer(3), RunningNormalizer(3)
    x = torch.randn(5, 4, 3)
    flat.update(x.flatten(0, 1))
    nested.update(x)
    torch.testing.assert_close(flat.state_dict(), nested.state_dict())


def test_constant_features_and_outliers_stay_bounded():
    normalizer = RunningNormalizer(2)
    normalizer.update(torch.tensor([[2.0, 0.0], [2.0, 1.0]]))
    assert normalizer(torch.tensor([2.0, 0.5])).abs().max() == 0.0
    assert normalizer(torch.tensor([1e6, -1e6])).abs().max() == 10.0


def test_one_outlier_among_many_observations_does_not_flatten_the_others():
    """A simulation that is about to diverge gives an observation of 3e5 among 800,000 of the size of 1."""
    for first in (True, False):
        normalizer = RunningNormalizer(2)
        for batch in range(40):
            x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(batch))
            if batch == (0 if first else 20):
                x[7, 0] = 3e5
            normalizer.update(x)
        torch.testing.assert_close(normalizer.var.float(), torch.ones(2), rtol=0.05, atol=0)


def test_fitting_ignores_an_outlier_too():
    x = torch.randn(5000, 1, generator=torch.Generator().manual_seed(0))
    x[3] = -1e6
    normalizer = RunningNormalizer(1)
    normalizer.fit(x)
    assert 0.9 < float(normalizer.var) < 1.3


def test_rare_flags_enter_the_statistics():
    """A contact that is set once in a thousand steps, at any size, beside one that a diverging simulation reports."""
    for size in (1e-6, 1.0, 1e6):
        normalizer, seen = RunningNormalizer(2), []
        for batch in range(20):
            x = torch.zeros(1000, 2)
            x[batch, 0] = size
            x[:3, 1] = torch.tensor([1.0, 1.0, 1e9]) * size
            normalizer.update(x)
            seen.append(x[:, :1])
        expected = torch.cat(seen).double()
        torch.testing.assert_close(normalizer.mean[:1], expected.mean(0))
        torch.testing.assert_close(normalizer.var[:1], expected.var(0, correction=0))
        assert float(normalizer.var[1].sqrt()) < size


def test_a_rare_large_feature_is_clipped_as_it_would_be_without_the_bound():
    x = torch.zeros(10_000, 1)
    x[:50] = 200.0
    normalizer = RunningNormalizer(1)
    normalizer.update(x)
    assert float(normalizer(torch.tensor([[200.0]]))) == normalizer.clip
    assert (200.0 - float(x.mean())) / float(x.std()) > normalizer.clip


SIZES = [1e-6, 1.0, 1e6]


def difficult(batch: int) -> Tensor:
    """One batch of features that are normal, heavy-tailed, with outliers, flags, far from 0, and constant at first."""
    g = torch.Generator().manual_seed(batch)
    x = torch.randn(1000, 8, generator=g)
    x[:, 1] = x[:, 1] ** 5
    x[batch, 2] = 3e5
    x[:, 3] = (x[:, 3] > 2.5).float()
    x[:, 4] += 1000.0
    x[:, 5] *= batch >= 3
    x[:, 6] = 5.0 + (batch >= 3) * x[:, 6]
    x[:, 7] = 0.7
    return x


def normalised(factor: float, fitted: bool) -> Tensor:
    """All values of a stream of batches times a factor, each batch after it has entered the statistics."""
    normalizer, found = RunningNormalizer(8), []
    if fitted:
        normalizer.fit(difficult(0) * factor)
    for batch in range(6):
        normalizer.update(difficult(batch) * factor)
        found.append(normalizer(difficult(batch) * factor))
    return torch.stack(found)


@pytest.mark.parametrize("fitted", [False, True])
def test_the_unit_of_a_feature_changes_no_normalised_value(fitted):
    expected = normalised(1.0, fitted)
    for factor in (2.0**20, 2.0**-20):  # float32 rounds nothing
        assert torch.equal(normalised(factor, fitted), expected)
    for factor in (1e6, 1e-6):
        torch.testing.assert_close(normalised(factor, fitted), expected, rtol=1e-5, atol=2e-4)
    assert expected[0, :, :5].std(0).min() > 0.1


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("constant", [0.0, 5.0, "rounding"])
def test_a_constant_feature_is_0_until_it_varies_and_then_has_the_scale_of_the_variation(constant, size, fitted):
    rows = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)) * size
    before = torch.full((1000, 1), 5.0) + 1e-6 * torch.rand(1000, 1) if constant == "rounding" else constant + 0 * rows
    before = before * size
    normalizer = RunningNormalizer(1)
    if fitted:
        normalizer.fit(before)
    for _ in range(50):
        normalizer.update(before)
    assert normalizer(before + rows).abs().max() == 0.0
    normalizer.update(before + rows)
    z = normalizer(before + rows)
    assert 0.7 < float(z.square().mean().sqrt()) < 1.5
    assert z.abs().max() < normalizer.clip


def test_a_flag_that_no_demonstration_had_is_seen_from_its_first_update_on():
    normalizer = RunningNormalizer(1)
    normalizer.fit(torch.zeros(1000, 1))
    x = torch.zeros(1000, 1)
    x[3] = 1.0
    normalizer.update(x)
    assert normalizer(x).unique().tolist() == pytest.approx([-float(normalizer.mean / normalizer.var.sqrt()), 10.0])


def test_a_feature_that_is_nearly_constant_in_demonstrations_does_not_saturate_for_ever():
    """One feature leaves what was demonstrated, the other has a tail that does; the latter's statistics stay."""
    g = torch.Generator().manual_seed(0)
    shown, later = (torch.randn(1000, 2, generator=g) for _ in range(2))
    normalizer = RunningNormalizer(2)
    normalizer.fit(shown * torch.tensor([1e-4, 1.0]))
    later[:300, 1] *= 100
    assert (normalizer(later)[:, 0].abs() == normalizer.clip).float().mean() > 0.9
    kept = normalizer(shown)[:, 1]
    for _ in range(3):
        normalizer.update(later)
    assert 0.5 < float(normalizer(later)[:, 0].square().mean()) < 2.5
    assert torch.equal(normalizer(shown)[:, 1], kept)


def test_a_mean_far_from_0_is_learned_from_many_samples():
    """After 2e7 samples around 1e4 deviations: in float32 the steps of the mean would vanish."""
    normalizer = RunningNormalizer(1)
    normalizer.update(torch.randn(1000, 1, dtype=torch.float64) + 10_001)
    normalizer.count.fill_(20_000_000)
    before = float(normalizer.mean)
    batch = torch.full((1000, 1), 10_000.0)
    for _ in range(100):
        normalizer.update(batch)
    moved = (before - 10_000) * (1 - 20_000_000 / 20_100_000)
    assert before - float(normalizer.mean) == pytest.approx(moved, rel=1e-6)


def test_a_value_far_from_0_is_standardised_as_exactly_as_float32_gives_it():
    x = (torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)) + 12_345.678).float()
    normalizer = RunningNormalizer(1)
    normalizer.update(x)
    exact = (x.double() - normalizer.mean) / normalizer.var.sqrt()
    torch.testing.assert_close(normalizer(x).double(), exact, rtol=1e-6, atol=1e-7)


def test_saved_weights_normalise_as_before():
    normalizer = RunningNormalizer(2)
    normalizer.update(torch.randn(100, 2))
    again = RunningNormalizer(2)
    again.load_state_dict(normalizer.state_dict())
    x = torch.randn(3, 2)
    assert torch.equal(again(x), normalizer(x))
    assert torch.equal(again.var, normalizer.var)
