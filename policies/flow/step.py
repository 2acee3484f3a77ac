"""A denoise step of a flow over action chunks. Sampler, likelihood and tests all use these functions.

Flow time t runs from 1 (noise) to 0 (action): ``x_t = t * noise + (1 - t) * action``, velocity ``noise - action``.
The K inference steps start at t = 1 and are ``delta = 1 / K`` long. Times are floats or tensors that broadcast with x.
"""

import torch
from torch import Tensor

Time = Tensor | float


def time_grid(steps: int) -> Tensor:
    """Return the flow times at which the K steps begin, [K]: 1, 1 - 1/K, ..., 1/K."""
    return 1.0 - torch.arange(steps, dtype=torch.float64) / steps


def interpolate(action: Tensor, noise: Tensor, t: Time) -> Tensor:
    """Return x_t on the straight path from action (t = 0) to noise (t = 1)."""
    return t * noise + (1.0 - t) * action


def initial_noise(x: Tensor, velocity: Tensor, t: Time) -> Tensor:
    """Return the noise that x at time t comes from: ``x + (1 - t) * v``."""
    return x + (1.0 - t) * velocity


def velocity_to(clean: Tensor, x: Tensor, t: Time) -> Tensor:
    """Return the velocity at x if it points to the action ``clean``, which is ``x - t * v``, for t > 0."""
    return (x - clean) / t


def euler(x: Tensor, velocity: Tensor, delta: float) -> Tensor:
    """Return x after a deterministic step of the flow's ODE, from t to t - delta."""
    return x - delta * velocity


def flow_noise(x: Tensor, velocity: Tensor, sigma: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of x at t - delta given x at t, under Flow-Noise exploration.

    Flow-Noise (π_RL, Chen et al. 2025) is a Gaussian around the Euler step with a learned standard deviation ``sigma``.
    """
    return euler(x, velocity, delta), sigma


def flow_sde(x: Tensor, velocity: Tensor, t: Tensor, sigma: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of x at t - delta given x at t, under Flow-SDE exploration.

    Flow-SDE is an Euler-Maruyama step of the SDE with the marginals of the ODE (Flow-GRPO, Liu et al. 2025; π_RL). A
    drift along the score, ``-initial_noise / t``, balances the diffusion ``sigma``. All arguments broadcast with x.
    """
    drift = sigma.square() * delta / (2.0 * t) * initial_noise(x, velocity, t)
    return euler(x, velocity, delta) - drift, (sigma * delta**0.5).expand_as(x)


def sde_sigma(steps: int, noise_level: float) -> Tensor:
    """Return the diffusion of Flow-SDE at each of the K grid times, ``a * sqrt(t / (1 - t))``, [K].

    noise_level: a. At t = 1, where this is infinite, the denominator of the next grid point is used.
    """
    t = time_grid(steps)
    rest = torch.where(t < 1.0, 1.0 - t, 1.0 / steps)
    return noise_level * (t / rest).sqrt()
