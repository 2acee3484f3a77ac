"""Result of one control step of a simulator, and its parts that count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Advance:
    """Result of one control step of all N envs; rows of envs that were not stepped are ignored."""

    reward_N: Tensor
    """Reward of the step, float32 [N]."""
    outcomes: Mapping[str, Tensor] = field(default_factory=dict)
    """Whether each of ``EnvSpec.outcomes`` is true of the new state, bool [N], by name."""
    failed_N: Tensor | None = None
    """Whether the episode ends here as a termination, bool [N]; None: no episode does."""
    broken_n: Tensor | None = None
    """Ids of envs whose simulation diverged, int64 [n]; None: none. Their episodes are truncated and their decisions
    count for nothing (``Timestep.num_steps_N`` is 0), because no episode has the state that they lead to."""
    truncated_N: Tensor | None = None
    """Whether the simulator itself cuts the episode here, bool [N]; None: it cuts none. If the episode also failed, it
    ends as a termination. Time limits of plans need nothing here."""


def mask_to_stepped(result: Advance, alive_N: Tensor) -> Advance:
    """Return a result in which only envs that were stepped have rewards, outcomes and ends."""
    return Advance(
        torch.where(alive_N, result.reward_N, 0.0),
        {name: outcome_N & alive_N for name, outcome_N in result.outcomes.items()},
        None if result.failed_N is None else result.failed_N & alive_N,
        None if result.broken_n is None else result.broken_n[alive_N[result.broken_n]],
        None if result.truncated_N is None else result.truncated_N & alive_N,
    )


def zero_diverged(result: Advance) -> Advance:
    """Return a result in which broken envs have neither reward nor outcome: their state is not of the episode."""
    whole_N = torch.ones_like(result.reward_N, dtype=torch.bool)
    whole_N[result.broken_n] = False
    outcomes = {name: outcome_N & whole_N for name, outcome_N in result.outcomes.items()}
    return replace(result, reward_N=torch.where(whole_N, result.reward_N, 0.0), outcomes=outcomes)
