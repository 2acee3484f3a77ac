"""Densities of diagonal Gaussians over action chunks, and their sums over the executed actions."""

from math import log, pi

from torch import Tensor

_HALF_LOG_2PI = 0.5 * log(2.0 * pi)


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of every element of x under N(mean, std^2); shapes broadcast, nothing is summed."""
    return -0.5 * ((x - mean) / std).square() - std.log() - _HALF_LOG_2PI


def gaussian_entropy(std: Tensor) -> Tensor:
    """Return the entropy (nats) of every element's Gaussian."""
    return std.log() + (0.5 + _HALF_LOG_2PI)


def gaussian_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of diagonal Gaussians, summed, [B]; p, q: means and standard deviations, [B, 2, ...]."""
    (mean_p, std_p), (mean_q, std_q) = p.unbind(1), q.unbind(1)
    ratio = std_p / std_q
    per_element = 0.5 * (ratio.square() + ((mean_p - mean_q) / std_q).square() - 1.0) - ratio.log()
    return per_element.flatten(1).sum(1)


def sum_by_action(per_element: Tensor, execute: int) -> Tensor:
    """Sum [B, steps, H, A] over steps and A for each of the first E = ``execute`` actions, [B, E]."""
    return per_element[..., :execute, :].sum((1, 3))


def sum_executed(per_element: Tensor, execute: int) -> Tensor:
    """Sum [B, steps, H, A] over steps, the first ``execute`` of H actions and A, [B].

    Only this function and ``sum_by_action`` turn densities or entropies of elements into those of a decision.
    """
    return sum_by_action(per_element, execute).sum(-1)
