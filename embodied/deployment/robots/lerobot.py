"""Robots of LeRobot, or of anybody who follows its ``Robot``: ``robot=<module>:<Class>``. Imports them on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from embodied.core.errors import UserError
from embodied.deployment.robots.base import Robot


def load_robot(name: str, options: Mapping[str, Any]) -> Robot:
    """Build the robot ``<module>:<Class>``.

    options: keyword arguments of its ``config_class``, as LeRobot's robots have one, or else of the class itself.
    UserError if it cannot be imported or built, or lacks a method of ``Robot``.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"robot={name}: {error}") from error
    try:
        config_class = getattr(found, "config_class", None)
        robot = found(**options) if config_class is None else found(config_class(**options))
    except TypeError as error:
        raise UserError(f"robot_options of {name}: {error}") from error
    if not isinstance(robot, Robot):
        needed = [part for part in dir(Robot) if not part.startswith("_") and not hasattr(robot, part)]
        raise UserError(f"robot={name} is no robot: it lacks {', '.join(needed)}")
    return robot
