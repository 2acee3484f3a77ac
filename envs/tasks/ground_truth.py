"""The capability of a task to say what its bodies are, from which pictures are labelled for grounding."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, runtime_checkable

from torch import Tensor


class Role(IntEnum):
    """What a body is to the instruction. A policy that learns from the labels must use the same values."""

    NONE = 0
    OBJECT = 1
    """The object that the instruction names."""
    OTHER_OBJECT = 2
    PLACE = 3
    """The place that the instruction names."""
    OTHER_PLACE = 4


ROLE_NAMES = tuple(role.name.lower() for role in Role)


@runtime_checkable
class GroundTruth(Protocol):
    """A task that says what its bodies are to the instruction of each env, and where the named ones are."""

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Everything that a body can be, in words, such as "red cube", whatever the instruction."""
        ...

    def body_descriptions(self) -> dict[str, Tensor]:
        """Index into ``descriptions`` of the one that fits each body, int64 [N], by the body's name."""
        ...

    def body_roles(self) -> dict[str, Tensor]:
        """``Role`` of each body, uint8 [N], by the body's name; bodies missing from the dict have none."""
        ...

    def target_positions(self) -> tuple[Tensor, Tensor]:
        """Positions of the object and of the place that the instruction names, [N, 3] each, m, in the base frame."""
        ...
