"""``key=value`` words to a plain dataclass, without the libraries that a robot's computer lacks."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar

from embodied.core.errors import UserError, unknown_name
from embodied.deployment.bundle import from_json

T = TypeVar("T")


def parse_words(cls: type[T], words: Sequence[str]) -> T:
    """Build a dataclass from ``key=value`` words by its annotations: text, numbers, true, false and null.

    UserError for an unknown or missing key, or a value of another type.
    """
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"'{word}' is not key=value: write for instance episodes=10, without spaces around '='")
        if key not in names:
            raise unknown_name("key", key, names)
        is_text = str in (hints[key], *typing.get_args(hints[key]))
        given[key] = text if is_text and text != "null" else _value(text)
    defaults = {field.name: field.default for field in fields(cls) if field.default is not MISSING}  # type: ignore[arg-type]
    missing = [name for name in names if name not in given and name not in defaults]
    if missing:
        raise UserError(f"{missing[0]}= is missing")
    made = from_json(cls, defaults | given, "options")
    check = getattr(made, "check", None)
    if check is not None:
        check()
    return made


def as_mapping(options: Any) -> dict[str, Any]:
    """Return the options as a mapping."""
    return asdict(options)


def _value(text: str) -> Any:
    """Return a number, true, false or null; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
