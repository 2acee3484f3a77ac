"""Running standardisation of observations, whose statistics are buffers of the policy and travel with its weights."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn

OUTLIER_SHARE = 0.01  # largest share of a batch that can be outliers
OUTLIER_FACTOR = 10.0  # distance of an outlier from the median, in units of the distance of all but that share
MIN_REACH = 1.0  # distance that is never bounded, in the feature's unit: a flag may be set once in a million steps


def bound_outliers(x: Tensor) -> Tensor:
    """Move the outliers of each feature of x [F, D] to the largest distance from the median that is no outlier, [F, D].

    A feature that is far from its median in less than OUTLIER_SHARE of all observations has a standardised value above
    1 / sqrt(OUTLIER_SHARE) = 10 there. The normaliser clips it with or without this bound.
    """
    center = x.median(0).values
    usual = (x - center).abs().kthvalue(ceil((1 - OUTLIER_SHARE) * len(x)), dim=0).values
    reach = (OUTLIER_FACTOR * usual).clamp_min(MIN_REACH)
    return x.clamp(center - reach, center + reach)


class RunningNormalizer(nn.Module):
    """Standardisation of vectors [..., D] by the mean and variance of all vectors given to ``update``.

    Batches are merged as in Chan, Golub and LeVeque (1979): stable for any batch size, exact up to rounding. A merge
    computes in float64, the buffers are float32. Before the first update the normaliser only clips.

    Outliers are bounded before they enter the statistics (``bound_outliers``): one observation of a simulation that
    is about to diverge would otherwise flatten all others for ever.

    ``fit`` replaces the statistics by those of one data set and freezes them. Otherwise reinforcement learning would
    shift the inputs of a network that imitation trained.

    clip: bound of the standardised values. epsilon: added to the variance; a constant feature maps to 0.
    """

    count: Tensor
    """int64 [], number of vectors in the statistics."""
    mean: Tensor
    """float32 [D]."""
    var: Tensor
    """float32 [D], biased variance."""
    fixed: Tensor
    """bool [], whether the statistics are frozen."""

    def __init__(self, dim: int, clip: float = 10.0, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("fixed", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise and clip x [..., D]."""
        return ((x - self.mean) * torch.rsqrt(self.var + self.epsilon)).clamp(-self.clip, self.clip)

    def inverse(self, standardised: Tensor) -> Tensor:
        """Return the x [..., D] that ``forward`` maps to ``standardised``, if it does not clip x."""
        return standardised * torch.sqrt(self.var + self.epsilon) + self.mean

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Fold x [..., D] into the statistics; do nothing if x is empty or the statistics are frozen."""
        batch = x.reshape(-1, self.mean.shape[0])
        if batch.shape[0] == 0 or bool(self.fixed):
            return
        batch_var, batch_mean = torch.var_mean(bound_outliers(batch.double()), dim=0, correction=0)
        total = self.count + batch.shape[0]
        fraction = batch.shape[0] / total.double()
        shift = batch_mean - self.mean.double()
        var = (1.0 - fraction) * self.var.double() + fraction * batch_var + fraction * (1.0 - fraction) * shift.square()
        self.mean.copy_(self.mean.double() + fraction * shift)
        self.var.copy_(var)
        self.count.copy_(total)

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Replace the statistics by those of x [..., D] and freeze them."""
        self.fixed.fill_(False)
        self.count.zero_()
        self.update(x)
        self.fixed.fill_(True)
