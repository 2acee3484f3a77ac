"""Ground truth of a task's bodies, from which images are labelled for grounding."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, runtime_checkable

from torch import Tensor


class Role(IntEnum):
    """Role of a body in the instruction. A policy that learns from the labels must use the same values."""

    NONE = 0
    """A body without a role, such as the robot."""
    OBJECT = 1
    """The object that the instruction names."""
    OTHER_OBJECT = 2
    """An object that the instruction does not name."""
    PLACE = 3
    """The place that the instruction names."""
    OTHER_PLACE = 4
    """A place that the instruction does not name."""


ROLE_NAMES = tuple(role.name.lower() for role in Role)


@runtime_checkable
class GroundTruth(Protocol):
    """A task with labels for its bodies: descriptions, roles in the env's instruction, and target positions."""

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Descriptions of all possible bodies, such as "red cube", independent of the instruction."""
        ...

    def body_descriptions(self) -> dict[str, Tensor]:
        """Return the index into ``descriptions`` for each body, int64 [N], by the body's name."""
        ...

    def body_roles(self) -> dict[str, Tensor]:
        """Return the ``Role`` of each body, uint8 [N], by the body's name; a body missing from the dict has none."""
        ...

    def target_positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the object and of the place that the instruction names, [N, 3], m, base frame."""
        ...
