"""Integration of a flow from noise to action, stochastic and deterministic, on the grid of ``step.time_grid``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from policies.flow.step import euler, transition


def sample_chain(
    denoise: Callable[[Tensor, int], tuple[Tensor, Tensor]], noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw chains; ``denoise(x, k)`` gives the velocity and sigma of step k at x [N, H, A].

    noise: standard normals [N, K+1, H, A]; the first is where the chain starts, the others are the steps' noise.
    Returns the chain [N, K+1, H, A] and the mean and standard deviation [N, K, H, A] of its K transitions.
    """
    steps = noise.shape[1] - 1
    chain, means, stds = [noise[:, 0]], [], []
    for k in range(steps):
        velocity, sigma = denoise(chain[k], k)
        mean, std = transition(chain[k], velocity, sigma, 1.0 / steps)
        means.append(mean)
        stds.append(std)
        chain.append(torch.addcmul(mean, std, noise[:, k + 1]))
    return torch.stack(chain, 1), torch.stack(means, 1), torch.stack(stds, 1)


def integrate(velocity: Callable[[Tensor, int], Tensor], start: Tensor, steps: int) -> Tensor:
    """Follow the ODE from ``start`` [N, H, A] at t = 1; ``velocity(x, k)``. Returns the chain [N, K+1, H, A]."""
    chain = [start]
    for k in range(steps):
        chain.append(euler(chain[k], velocity(chain[k], k), 1.0 / steps))
    return torch.stack(chain, 1)
