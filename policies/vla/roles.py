"""Values of ``masks.<camera>`` that grounding teaches. A task that labels its pictures must use the same."""

from __future__ import annotations

from enum import IntEnum


class Role(IntEnum):
    """What a pixel shows, seen from the instruction."""

    NONE = 0
    OBJECT = 1
    """The object that the instruction names."""
    OTHER_OBJECT = 2
    PLACE = 3
    """The place that the instruction names."""
    OTHER_PLACE = 4


ROLE_NAMES = tuple(role.name.lower() for role in Role)
