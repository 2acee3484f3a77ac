"""Values of ``masks.<camera>`` that grounding teaches. A task that labels its images must use the same values."""

from __future__ import annotations

from enum import IntEnum


class Role(IntEnum):
    """Role that a pixel's body has in the instruction."""

    NONE = 0
    """Neither an object nor a place."""
    OBJECT = 1
    """The object that the instruction names."""
    OTHER_OBJECT = 2
    """Any other object."""
    PLACE = 3
    """The place that the instruction names."""
    OTHER_PLACE = 4
    """Any other place."""


ROLE_NAMES = tuple(role.name.lower() for role in Role)
