"""Group of processes that make one update together, as an algorithm sees it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ProcessGroup(Protocol):
    """Learner processes that make each update together. Every process has its own fragments of the batch."""

    rank: int
    """Number of this process, from 0."""
    size: int
    """Number of processes."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor of numbers over all processes, the same bits in each. All must call it.

        Shape, type and device are those of ``tensor``, which must have the same shape and type in all processes.
        """
        ...


class SingleProcess:
    """One learner process, which has the whole batch."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor


SINGLE_PROCESS = SingleProcess()
