"""The result of one control step of a simulator."""

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
    """Ids of envs whose simulation diverged, int64 [n]. Their episodes are truncated and their decisions count for
    nothing (``Timestep.num_steps_N`` is 0), because no episode has the state that they lead to."""

    def of_stepped(self, alive_N: Tensor) -> Advance:
        """Return the result in which only envs that were stepped have rewards, outcomes and ends. alive: bool [N]."""
        return Advance(
            torch.where(alive_N, self.reward_N, 0.0),
            {name: outcome_N & alive_N for name, outcome_N in self.outcomes.items()},
            None if self.failed_N is None else self.failed_N & alive_N,
            None if self.broken_n is None else self.broken_n[alive_N[self.broken_n]],
        )

    def without_results_of_broken(self) -> Advance:
        """Return the result in which broken envs have neither reward nor outcome: their state is of no episode."""
        whole_N = torch.ones_like(self.reward_N, dtype=torch.bool)
        whole_N[self.broken_n] = False
        outcomes = {name: outcome_N & whole_N for name, outcome_N in self.outcomes.items()}
        return replace(self, reward_N=torch.where(whole_N, self.reward_N, 0.0), outcomes=outcomes)
