"""Messages between env workers and the actor server."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.types import Obs, PolicySample


@dataclass(frozen=True, slots=True)
class ActRequest:
    """Request of one env group for its next decision, or at the end of a fragment for values alone."""

    worker: int
    """Index of the env worker."""
    group: int
    """Index of the worker's env group."""
    obs: Obs
    """Observations [N, ...] to act on."""
    noise: Tensor | None
    """Noise of ``Policy.act``, [N, ...]; None requests values alone."""
    final_obs: Obs | None = None
    """Last observations [M, ...] of the episodes that ended at the previous decision, if any did."""


@dataclass(frozen=True, slots=True)
class ActReply:
    """Reply to a request: its actions, chain and observations on the device of the request's, all else on the CPU."""

    worker: int
    """Index of the env worker."""
    group: int
    """Index of the worker's env group."""
    sample: PolicySample | None
    """The decision; None if values alone were requested."""
    obs: Obs | None
    """Observations for the learner in place of the request's, if the policy precomputes in the actor."""
    value_N: Tensor | None
    """Values of the request's ``obs``; None with a sample, whose ``value_N`` has them."""
    final_value_M: Tensor | None
    """Values of the request's ``final_obs``, if it has any."""
    final_obs: Obs | None = None
    """Last observations for the learner in place of the request's, if the policy precomputes in the actor."""
