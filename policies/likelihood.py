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


def sum_by_action(per_element: Tensor, execute: int) -> Tensor:
    """[B, steps, H, A] -> [B, E]: what each of the first E = ``execute`` actions has in all steps and dimensions."""
    return per_element[..., :execute, :].sum((1, 3))


def sum_executed(per_element: Tensor, execute: int) -> Tensor:
    """[B, steps, H, A] -> [B], over steps, the first ``execute`` of H actions and all A.

    These two turn element-wise densities (or entropies) into those of a decision; nothing else does.
    """
    return sum_by_action(per_element, execute).sum(-1)
