"""What an algorithm knows of the learner processes that make one update together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Learners(Protocol):
    """Learner processes that make each update together. Every one of them has a share of the batch."""

    rank: int
    """Number of this process, from 0."""
    size: int
    """How many there are."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor of numbers over all processes, the same bits in each. All must call it.

        Shape, type and device are those of ``tensor``, which must have the same shape and type in all processes.
        """
        ...


class Alone:
    """One learner process, which has the whole batch."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor


ALONE = Alone()
