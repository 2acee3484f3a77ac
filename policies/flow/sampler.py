"""Integration of a flow from noise to action, stochastic and deterministic, on the grid of ``step.time_grid``."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from embodied.policies.flow.step import euler


class Transition(NamedTuple):
    """One denoise step at x: its velocity, and the Gaussian of the next x if the step is stochastic."""

    velocity: Tensor
    """Velocity at x, [N, H, A]."""
    mean: Tensor
    std: Tensor
    """Mean and standard deviation of the next x, [N, H, A]."""


def sample_chain(denoise: Callable[[Tensor, int], Transition], noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw chains in which every step is stochastic; ``denoise(x, k)`` is step k at x [N, H, A].

    noise: standard normals [N, K+1, H, A]: the initial noise, then the noise of each step. Returns the chain
    [N, K+1, H, A], and mean and standard deviation [N, K, H, A] of its K transitions.
    """
    chain, steps = [noise[:, 0]], []
    for k in range(noise.shape[1] - 1):
        steps.append(denoise(chain[k], k))
        chain.append(torch.addcmul(steps[k].mean, steps[k].std, noise[:, k + 1]))
    means, stds = [step.mean for step in steps], [step.std for step in steps]
    return torch.stack(chain, 1), torch.stack(means, 1), torch.stack(stds, 1)


class OneStep(NamedTuple):
    """A decision with one stochastic step; all [N, H, A]."""

    action: Tensor
    """End of the chain."""
    before: Tensor
    after: Tensor
    """States at which the stochastic step begins and ends; ``after`` is drawn from N(mean, std^2)."""
    mean: Tensor
    std: Tensor


def sample_one_step(
    denoise: Callable[[Tensor, int], Transition], start: Tensor, noise: Tensor, index_N: Tensor, steps: int
) -> OneStep:
    """Follow the ODE from ``start`` [N, H, A], except that step ``index_N`` of each row is stochastic.

    noise: standard normals of that step, [N, H, A]. steps: K.
    """
    x = start
    result = OneStep(x, x, x, x, x)
    for k in range(steps):
        step = denoise(x, k)
        drawn = torch.addcmul(step.mean, step.std, noise)
        now = OneStep(x, x, drawn, step.mean, step.std)
        chosen = (index_N == k)[:, None, None]
        result = OneStep(*(torch.where(chosen, new, old) for new, old in zip(now, result, strict=True)))
        x = torch.where(chosen, drawn, euler(x, step.velocity, 1.0 / steps))
    return result._replace(action=x)


def integrate(velocity: Callable[[Tensor, int], Tensor], start: Tensor, steps: int) -> Tensor:
    """Follow the ODE from ``start`` [N, H, A] at t = 1 and return its states [N, K+1, H, A].

    velocity: called as ``velocity(x, k)`` for step k at x.
    """
    chain = [start]
    for k in range(steps):
        chain.append(euler(chain[k], velocity(chain[k], k), 1.0 / steps))
    return torch.stack(chain, 1)
