"""Running standardisation of observations, whose statistics are buffers of the policy and travel with its weights.

A feature x with mean m and biased variance v is standardised as

    z = clip((x - m) / sqrt(v), -10, 10)        0 if v is 0 or the rounding of float32: there is no scale yet

N vectors are merged with a batch of n, mean b and variance u, as in Chan, Golub and LeVeque (1979), with weight w:

    w = n / (N + n)        m' = m + w (b - m)        v' = (1 - w) v + w u + w (1 - w) (b - m)^2

A feature outgrows its statistics if it has no scale, or if more than half of the batch is clipped. Then w is at least
1/2, also in frozen statistics, whose other features have w = 0. That bounds the mean square of the batch's new z, which
is (u + (1 - w)^2 (b - m)^2) / v' before it is clipped, by 1 / w.

No constant here has a unit: a feature times c has m and sqrt(v) times c, the same outliers and the same z.
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

OUTLIER_SHARE = 0.01  # largest share of a batch that can be outliers
OUTLIER_FACTOR = 10.0  # distance of an outlier from the median, in units of the distance of all but that share
OUTGROWN_SHARE = 0.5  # share of a batch that is clipped when a feature has outgrown its statistics
OUTGROWN_WEIGHT = 0.5  # least weight of that batch
ROUNDING = 2.0**-20  # deviation that may be rounding, in units of the value: 8 times the precision of float32


def bound_outliers(x: Tensor) -> Tensor:
    """Move the outliers of each feature of x [F, D] to the largest distance from the median that is no outlier, [F, D].

    A feature that is far from its median in less than OUTLIER_SHARE of all observations has a standardised value above
    1 / sqrt(OUTLIER_SHARE) = 10 there. The normaliser clips it with or without this bound.

    A flag that is set more rarely is no outlier: the distance is at least the median of those that are not 0.
    """
    center = x.median(0).values
    distance = (x - center).abs()
    rank = ceil((1 - OUTLIER_SHARE) * len(x))
    usual, still = distance.kthvalue(rank, dim=0).values, distance <= ROUNDING * center.abs()
    rare = (~still).sum(0) // 2 < len(x) - rank  # elsewhere the median of those that are not 0 is no larger
    if bool(rare.any()):
        moved = distance[:, rare].masked_fill(still[:, rare], torch.nan).nanmedian(0).values
        usual[rare] = torch.maximum(usual[rare], moved.nan_to_num(0.0))
    reach = OUTLIER_FACTOR * usual
    return x.clamp(center - reach, center + reach)


class RunningNormalizer(nn.Module):
    """Standardisation of vectors [..., D] by the mean and variance of all vectors given to ``update``.

    Outliers are bounded before they enter the statistics (``bound_outliers``): one observation of a simulation that
    is about to diverge would otherwise flatten all others permanently.

    ``fit`` replaces the statistics by those of one data set and freezes them. Otherwise reinforcement learning would
    shift the inputs of a network that imitation trained. Only features that outgrow them still learn.

    Before the first update the normaliser only clips. Statistics are float64, because steps of a mean that is 1e4
    deviations from 0 vanish in float32. ``forward`` computes in float32 and subtracts the mean in two parts.
    """

    clip = 10.0
    """Bound of the standardised values."""
    count: Tensor
    """int64 [], number of vectors in the statistics."""
    mean: Tensor
    var: Tensor
    """float64 [D], mean and biased variance."""
    fixed: Tensor
    """bool [], whether the statistics are frozen."""
    center: Tensor
    """float32 [D], the mean rounded."""
    rate: Tensor
    """float32 [D], 1 / standard deviation; 0 for a feature without a scale."""
    bias: Tensor
    """float32 [D], standardised value of ``center``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("var", torch.ones(dim, dtype=torch.float64))
        self.register_buffer("fixed", torch.zeros((), dtype=torch.bool))
        for name in ("center", "rate", "bias"):
            self.register_buffer(name, torch.empty(dim), persistent=False)
        self._prepare()

    def forward(self, x: Tensor) -> Tensor:
        """Standardise and clip x [..., D], float32."""
        return torch.addcmul(self.bias, x - self.center, self.rate).clamp(-self.clip, self.clip)

    def inverse(self, standardised: Tensor) -> Tensor:
        """Return the x [..., D], float32, that ``forward`` maps to ``standardised``, if it does not clip x."""
        return (standardised * self.var.sqrt() + self.mean).float()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Fold x [..., D] into the statistics; of frozen ones only those of features that outgrow them change."""
        batch = x.reshape(-1, self.mean.shape[0]).double()
        if batch.shape[0] == 0:
            return
        frozen = bool(self.fixed)
        clipped = ((batch - self.mean).abs() > self.clip * self.var.sqrt()).double().mean(0)
        outgrown = (self.rate == 0) | (clipped > OUTGROWN_SHARE)
        if frozen and not bool(outgrown.any()):
            return
        var, mean = torch.var_mean(bound_outliers(batch), dim=0, correction=0)
        total = self.count + batch.shape[0]
        share = batch.shape[0] / total.double()
        weight = torch.where(outgrown, share.clamp_min(OUTGROWN_WEIGHT), 0.0 if frozen else share)
        shift = mean - self.mean
        self.var.copy_((1 - weight) * self.var + weight * var + weight * (1 - weight) * shift.square())
        self.mean.add_(weight * shift)
        if not frozen:
            self.count.copy_(total)
        self._prepare()

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Replace the statistics by those of x [..., D] and freeze them."""
        self.fixed.fill_(False)
        self.count.zero_()
        self.update(x)
        self.fixed.fill_(True)

    def _prepare(self) -> None:
        """Compute what ``forward`` needs from the statistics."""
        std = self.var.sqrt()
        known = std > ROUNDING * self.mean.abs() + torch.finfo(torch.float32).tiny
        self.center.copy_(self.mean)
        self.rate.copy_(torch.where(known, 1 / std, 0.0))
        self.bias.copy_((self.center - self.mean) * self.rate)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the statistics and prepare ``forward``."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._prepare()
