"""RunningNormalizer against numpy on all that it has seen."""

from __future__ import annotations

import numpy as np
import torch

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
        torch.testing.assert_close(normalizer.var, torch.ones(2), rtol=0.05, atol=0)


def test_fitting_ignores_an_outlier_too():
    x = torch.randn(5000, 1, generator=torch.Generator().manual_seed(0))
    x[3] = -1e6
    normalizer = RunningNormalizer(1)
    normalizer.fit(x)
    assert 0.9 < float(normalizer.var) < 1.3


def test_rare_flags_and_features_that_begin_to_vary_enter_the_statistics():
    """A contact that is set once in a thousand steps, and a feature that is constant at first."""
    normalizer, seen = RunningNormalizer(2), []
    for batch in range(20):
        x = torch.zeros(1000, 2)
        x[batch, 0] = 1.0
        if batch >= 10:
            x[:, 1] = 50 * torch.randn(1000, generator=torch.Generator().manual_seed(batch))
        normalizer.update(x)
        seen.append(x)
    expected = torch.cat(seen)
    torch.testing.assert_close(normalizer.mean, expected.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalizer.var, expected.var(0, correction=0), rtol=1e-4, atol=1e-6)


def test_a_rare_large_feature_is_clipped_as_it_would_be_without_the_bound():
    x = torch.zeros(10_000, 1)
    x[:50] = 200.0
    normalizer = RunningNormalizer(1)
    normalizer.update(x)
    assert float(normalizer(torch.tensor([[200.0]]))) == normalizer.clip
    assert (200.0 - float(x.mean())) / float(x.std()) > normalizer.clip
