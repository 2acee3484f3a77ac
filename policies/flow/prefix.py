"""The prefix of a chunk: its first d actions, which are decided before the decision is computed.

While the policy computes a chunk, the robot executes what is left of the one before. Observations name these actions:
``prefix`` [N, D, A], of which the first ``delay`` [N] rows count. Source: training-time action conditioning (Black et
al. 2025).

    noise ─► put_prefix ─► x: d rows of the prefix, H - d rows of noise ─► K steps; ``hold`` keeps the d rows ─► chunk

``fixed`` is the mask of the rows that the prefix gives, bool [N, H, 1]. It is None for a policy without delays, and the
functions then do nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied.core.types import Obs
from embodied.policies.flow.sampler import Transition


def fixed_rows(obs: Obs, rows: int) -> Tensor:
    """Return which of the first ``rows`` rows of the chunk the prefix gives, bool [N, rows, 1]."""
    delay_N = obs["delay"]
    return (torch.arange(rows, device=delay_N.device) < delay_N[:, None]).unsqueeze(-1)


def put_prefix(noise: Tensor, obs: Obs, fixed: Tensor | None) -> Tensor:
    """Replace the noise of fixed rows: by the prefix in the initial noise, by 0 in the noise of every later step.

    noise: [N, S, H, W], the initial noise first.
    """
    if fixed is None:
        return noise
    prefix = obs["prefix"].to(noise)
    held = torch.zeros_like(noise)
    held[:, 0] = F.pad(prefix, (0, noise.shape[3] - prefix.shape[2], 0, noise.shape[2] - prefix.shape[1]))
    return torch.where(fixed.unsqueeze(1), held, noise)


def hold(step: Transition, x: Tensor, fixed: Tensor | None) -> Transition:
    """Return a step that keeps the fixed rows of x [..., H, W]: velocity 0, mean x and standard deviation 1.

    The standard deviation is arbitrary, as fixed rows get no noise and no density. Two such Gaussians have no KL.
    """
    if fixed is None:
        return step
    fixed = _like(fixed, x)
    mean, std = torch.where(fixed, x, step.mean), step.std.masked_fill(fixed, 1.0)
    return Transition(step.velocity.masked_fill(fixed, 0.0), mean, std)


def free(per_element: Tensor, fixed: Tensor | None) -> Tensor:
    """Return densities, entropies, velocities or errors [..., H, W] with 0 in the fixed rows."""
    return per_element if fixed is None else per_element.masked_fill(_like(fixed, per_element), 0.0)


def _like(fixed: Tensor, x: Tensor) -> Tensor:
    """Return the mask with a dimension for the steps if x [..., H, W] has one and the mask has not."""
    return fixed if fixed.ndim == x.ndim else fixed.unsqueeze(1)


def prefix_features(obs: Obs, like: Tensor) -> Tensor:
    """Return the prefix and, for each of its rows, whether it is given, [N, D * (A + 1)], in the type of ``like``."""
    prefix = obs["prefix"].to(like)
    return torch.cat((prefix.flatten(1), fixed_rows(obs, prefix.shape[1]).squeeze(-1).to(like)), 1)


# -- imitation ---------------------------------------------------------------------------------------------------------
def draw_prefix(obs: Obs, action_NHA: Tensor, max_delay: int, generator: torch.Generator) -> Obs:
    """Add ``delay``, uniform from 0 to D, and ``prefix`` of demonstrated chunks to observations; not if D is 0."""
    if not max_delay:
        return obs
    delay_N = torch.randint(max_delay + 1, (len(action_NHA),), generator=generator).to(action_NHA.device)
    given = fixed_rows({"delay": delay_N}, max_delay)
    return {**obs, "delay": delay_N, "prefix": action_NHA[:, :max_delay].masked_fill(~given, 0.0)}


def clean_rows(x: Tensor, action: Tensor, fixed: Tensor | None) -> Tensor:
    """Return x [N, H, W] with the fixed rows of ``action`` [N, H, W]."""
    return x if fixed is None else torch.where(fixed, action, x)


def mean_of_free(error: Tensor, fixed: Tensor | None) -> Tensor:
    """Return the mean of errors [N, H, W] over the rows that are not fixed, a scalar."""
    return error.mean() if fixed is None else free(error, fixed).sum() / ((~fixed).sum() * error.shape[-1])
