"""Robots of LeRobot, or of anybody who follows its ``Robot``: ``robot=<module>:<Class>``. Imports them on demand."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def connected(name: str, options: str) -> Iterator[Robot]:
    """Yield the robot ``<module>:<Class>``, connected. An error inside is raised, not one of disconnecting after it.

    options: those of ``load_robot`` as a JSON object. UserError if they are none.
    """
    robot = load_robot(name, _parse_options(options))
    robot.connect()
    try:
        yield robot
    except BaseException:
        try:
            robot.disconnect()
        except Exception as error:
            print(f"the robot did not disconnect: {error}", file=sys.stderr)
        raise
    robot.disconnect()


def _parse_options(text: str) -> dict[str, Any]:
    """Return the JSON object of ``robot_options``; UserError if it is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"robot_options: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"robot_options: got {text}, needed a JSON object")
    return found
