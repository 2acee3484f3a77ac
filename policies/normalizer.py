"""Running standardisation of observations, kept inside the policy so that its weights are complete."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningNormalizer(nn.Module):
    """Standardises vectors [..., D] by the mean and variance of all that ``update`` has seen.

    Batches are merged as Chan, Golub and LeVeque (1979) do: stable for any batch size, exact up to rounding. The
    arithmetic of a merge is float64, the buffers float32. Before the first update it is the identity (clipped).

    ``fit`` replaces all that by the statistics of one data set, which no later update changes: what was learned by
    imitation would otherwise see its inputs move.

    clip: bound of the standardised values. epsilon: added to the variance; a constant feature maps to 0.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    fixed: Tensor

    def __init__(self, dim: int, clip: float = 10.0, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("fixed", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * torch.rsqrt(self.var + self.epsilon)).clamp(-self.clip, self.clip)

    def inverse(self, standardised: Tensor) -> Tensor:
        """The x [..., D] that ``forward`` standardises to this, unless it clips."""
        return standardised * torch.sqrt(self.var + self.epsilon) + self.mean

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Fold x [..., D] into the statistics; an empty x changes nothing, nor does any after ``fit``."""
        batch = x.reshape(-1, self.mean.shape[0])
        if batch.shape[0] == 0 or bool(self.fixed):
            return
        batch_var, batch_mean = torch.var_mean(batch.double(), dim=0, correction=0)
        total = self.count + batch.shape[0]
        fraction = batch.shape[0] / total.double()
        shift = batch_mean - self.mean.double()
        var = (1.0 - fraction) * self.var.double() + fraction * batch_var + fraction * (1.0 - fraction) * shift.square()
        self.mean.copy_(self.mean.double() + fraction * shift)
        self.var.copy_(var)
        self.count.copy_(total)

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Take the statistics of x [..., D] alone, for good."""
        self.fixed.fill_(False)
        self.count.zero_()
        self.update(x)
        self.fixed.fill_(True)
