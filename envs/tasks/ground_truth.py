"""Roles of a task's bodies, with which images are labelled for grounding (``Task.body_roles``)."""

from enum import IntEnum


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
