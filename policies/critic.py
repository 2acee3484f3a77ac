"""The value function. It may observe privileged simulator state; a deployed policy does not need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embodied.policies.networks import mlp
from embodied.policies.normalizer import RunningNormalizer


class Critic(nn.Module):
    """V(inputs, privileged) with hidden layers of its own (Pinto et al. 2018, asymmetric actor critic).

    It contains the normaliser of the privileged observation, so that a deployed policy does not need that either.
    """

    def __init__(self, inputs: int, privileged_dim: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.normalizer = RunningNormalizer(privileged_dim) if privileged_dim else None
        self.network = mlp(inputs + privileged_dim, hidden, 1, activation, gain=1.0)

    def forward(self, inputs: Tensor, privileged: Tensor | None) -> Tensor:
        """Return the value [...] of inputs [..., I] (a normalised state) and a raw privileged observation [..., P].

        privileged: None if P is 0. ValueError if it is None otherwise.
        """
        if self.normalizer is not None:
            if privileged is None:
                raise ValueError("the critic needs obs['privileged'], which this observation lacks")
            inputs = torch.cat((inputs, self.normalizer(privileged)), dim=-1)
        value: Tensor = self.network(inputs).squeeze(-1)
        return value
