"""Share of a batch that one of several learner processes has, and what it must know of the others' shares.

    fragments of a process ── merge ──► observations, chains: its own, [T, n, ...]
          └── sum over the processes ──► numbers of all decisions (rewards, values, versions, …): [T, N]

Every process computes advantages, masks, minibatches and statistics from the numbers of all, exactly as one learner
would. It evaluates the policy on its own decisions alone, with the denominators of all: so the sum of the gradients is
the gradient of the whole minibatch. Values are joined by a sum of tensors that are 0 but for the own rows, which rounds
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embodied.core.learners import ALONE, Learners
from embodied.core.types import Obs

NORMALIZED = ("state", "privileged")
"""Observations of which policies keep statistics."""


class Share:
    """Which of the B decisions of a batch this process has. mine_B: bool, on any device; None: all of them."""

    def __init__(self, learners: Learners = ALONE, mine_B: Tensor | None = None) -> None:
        self.learners = learners
        self.mine_B = mine_B

    @property
    def whole(self) -> bool:
        """Whether this process has all."""
        return self.mine_B is None

    def to(self, device: torch.device) -> Share:
        """Return the share for tensors on a device."""
        return Share(self.learners, None if self.mine_B is None else self.mine_B.to(device))

    def own(self, values: Tensor) -> Tensor:
        """Return the own of all B values [B, ...], in order."""
        return values if self.mine_B is None else values[self.mine_B]

    def join(self, own: Tensor) -> Tensor:
        """Return all B values [B, ...] from the own ones, in all processes. Without own ones, ``own`` is ignored."""
        if self.mine_B is None:
            return own
        numbers = own.to(torch.uint8) if own.dtype == torch.bool else own
        values = numbers.new_zeros(len(self.mine_B), *own.shape[1:])
        values[self.mine_B] = numbers[: int(self.mine_B.sum())]
        return self.learners.sum(values).to(own.dtype)

    def select(self, index: Tensor) -> tuple[Tensor, Share]:
        """Return which of the own rows are in a selection of all rows, int64 [m], and the share of the selection.

        The own rows are row 0 if none of them is selected, so that no process evaluates an empty batch.
        """
        if self.mine_B is None:
            return index, self
        selected = self.mine_B[index]
        own = (self.mine_B.cumsum(0) - 1)[index][selected]
        return own if len(own) else own.new_zeros(1), Share(self.learners, selected)


def join_normalized(obs: Obs, share: Share) -> Obs:
    """Return the observations of which policies keep statistics, of all decisions; all keys if all rows are own."""
    if share.whole:
        return obs
    return {key: share.join(obs[key]) for key in NORMALIZED if key in obs}


def sum_gradients(learners: Learners, parameters: Sequence[nn.Parameter], statistics: Tensor) -> Tensor:
    """Replace the gradients, and return the statistics, by their sums over all processes, in one sum.

    A parameter without a gradient has none in any process, because all make the same computation.
    """
    if learners.size == 1:
        return statistics
    gradients = [p.grad for p in parameters if p.grad is not None]
    tensors = [*gradients, statistics]
    total = learners.sum(torch.cat([tensor.flatten() for tensor in tensors]))
    *sums, statistics = (
        part.view_as(like) for part, like in zip(total.split([t.numel() for t in tensors]), tensors, strict=True)
    )
    for gradient, found in zip(gradients, sums, strict=True):
        gradient.copy_(found)
    return statistics
