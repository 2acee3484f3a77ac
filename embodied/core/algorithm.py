"""Base class of the algorithms of reinforcement learning: all that the runtime calls on one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.types import Fragment

Metrics = dict[str, float]
"""Values of one update by the name under which they are logged."""


class ProcessGroup:
    """Learner processes that make each update together. Every process has its own fragments of the batch.

    This class is a group of one, which has the whole batch.
    """

    rank = 0
    """Number of this process, from 0."""
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor of numbers over all processes, the same bits in each. All must call it.

        Shape, type and device are those of ``tensor``, which must have the same shape and type in all processes.
        """
        return tensor


SINGLE_PROCESS = ProcessGroup()


class Algorithm(ABC):
    """Reinforcement learning on fragments. Owns the policy's optimiser."""

    trainer: ClassVar[str] = "reinforcement"
    """Name of its trainer in ``embodied.trainers.TRAINERS``."""
    explores: ClassVar[bool] = True
    """Whether it learns from the policy's own exploration."""

    policy: Policy
    """Policy being trained; the actors get its weights."""
    deployed: Policy
    """Policy that is evaluated and kept: ``policy`` itself or an average of its weights over updates."""
    total_updates: int | None = None
    """Updates that ``total_steps`` of the run allows, for schedules; the trainer sets it. None: unknown."""
    learners: ProcessGroup | None = None
    """The learner processes that make each update together; None: the algorithm runs in one process only.

    An algorithm that can share updates sets ``SINGLE_PROCESS``, which the runtime replaces. Each process then calls
    ``update`` with its own fragments of the batch, at least one. All must end with the same weights and metrics, bit
    for bit."""

    @abstractmethod
    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        """Train on one batch; ``version`` counts the batches consumed before it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain numbers: optimiser, schedules, random generators.

        The weights of ``policy`` are in it unless ``policy`` is ``deployed``.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from what ``state_dict`` returned."""
