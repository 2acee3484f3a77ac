"""Diagonal Gaussians over action chunks, and which of their dimensions count."""

from __future__ import annotations

from math import log, pi

from torch import Tensor

_HALF_LOG_2PI = 0.5 * log(2.0 * pi)


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of every element of x under N(mean, std^2); shapes broadcast, nothing is summed."""
    return -0.5 * ((x - mean) / std).square() - std.log() - _HALF_LOG_2PI


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy (nats) of every element's Gaussian."""
    return std.log() + (0.5 + _HALF_LOG_2PI)


def sum_executed(per_element: Tensor, execute: int) -> Tensor:
    """The ``sum`` reduction: [B, steps, H, A] -> [B], over steps, the first ``execute`` of H actions and all A.

    The one place that turns element-wise densities (or entropies) into the log-probability of a decision. The clip
    range of a PPO ratio is meaningful only together with this reduction.
    """
    return per_element[..., :execute, :].flatten(1).sum(-1)
