"""The prefix of a chunk: its first d actions, which are decided before the decision is computed.

While the policy computes a chunk, the robot executes what is left of the one before. Observations name these actions:
``prefix`` [N, D, A], of which the first ``delay`` [N] rows count. Source: training-time action conditioning (Black et
al. 2025).

    noise ─► put_prefix ─► x: d rows of the prefix, H - d rows of noise ─► K steps; ``hold`` keeps the d rows ─► chunk

``fixed`` is the mask of the rows that the prefix gives, bool [N, H, 1]. It is None for a policy without delays, and the
functions then do nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied.core.types import Obs
from embodied.policies.flow.sampler import Transition
from embodied.policies.flow.step import interpolate


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
def draw_prefix(obs: Obs, action_NHA: Tensor, valid_NH: Tensor, max_delay: int, generator: torch.Generator) -> Obs:
    """Add ``delay`` and ``prefix`` of demonstrated chunks to observations; not if D is 0.

    The delay is uniform from 0 to D, or to one less than the valid rows if these are fewer, so that one is learned.
    """
    if not max_delay:
        return obs
    longest_N = (valid_NH.sum(1) - 1).clamp_max(max_delay)
    uniform_N = torch.rand(len(action_NHA), generator=generator).to(action_NHA.device)
    delay_N = (uniform_N * (longest_N + 1)).long()
    given = fixed_rows({"delay": delay_N}, max_delay)
    return {**obs, "delay": delay_N, "prefix": action_NHA[:, :max_delay].masked_fill(~given, 0.0)}


def noisy_chunk(action: Tensor, noise: Tensor, t: Tensor, valid_NH: Tensor, fixed: Tensor | None) -> Tensor:
    """Return the interpolation at times t [N, 1, 1] of actions and noise [N, H, W], without noise in fixed rows.

    Rows that are not valid are noise at any time: what pads the chunk would show the network the actions to learn.
    """
    x = torch.where(valid_NH.unsqueeze(-1), interpolate(action, noise, t), noise)
    return x if fixed is None else torch.where(fixed, action, x)


def learned_rows(valid_NH: Tensor, fixed: Tensor | None) -> Tensor:
    """Return the rows that a chunk is learned in, bool [N, H]: the valid ones that are not fixed."""
    return valid_NH if fixed is None else valid_NH & ~fixed.squeeze(-1)
