"""The validator of a robot's computer, for options, files and messages. Standard library alone.

    key=value words ── parse_words ──► Options
    JSON            ── from_json ────► dataclass

A dataclass's annotations say which types are allowed. The platform's validator, embodied.core.options, needs pydantic.
"""

import json
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from math import inf, isfinite
from typing import Any, ClassVar, TypeVar, Union

from embodied.core.errors import TYPES, UserError, missing_key, nearest, one_line, unknown_name, wrong_value
from embodied.core.spec import ADDED

MAX_MESSAGE = 600  # characters of a message
MAX_INTEGER = 2**63

T = TypeVar("T")
Ranges = Mapping[str, tuple[float, float]]  # lowest and highest value of numbers, by name


@dataclass(frozen=True)
class Options:
    """Options of a command, which check themselves; a subclass adds the fields."""

    RANGES: ClassVar[Ranges] = {}

    def __post_init__(self) -> None:
        for name, (low, high) in self.RANGES.items():
            check_range(name, getattr(self, name), low, high)
        self.check()

    def check(self) -> None:
        """Raise UserError for values that do not fit each other."""


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_words(cls: type[OptionsT], words: Sequence[str]) -> OptionsT:
    """Build options from ``key=value`` words. UserError for an unknown or missing key, or a value not allowed."""
    hints = {field.name: typing.get_type_hints(cls)[field.name] for field in fields(cls)}
    content: dict[str, Any] = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"'{word}' is not key=value: write for instance episodes=10, without spaces around '='")
        if key not in hints:
            raise unknown_name("key", key, hints)
        content[key] = text
        if text == "null" or str not in (hints[key], *typing.get_args(hints[key])):
            with suppress(ValueError):  # other text stays as it is
                content[key] = json.loads(text)
    for name in hints:
        if name not in content:
            raise missing_key(name)
    return from_json(cls, content)


def check_range(key: str, value: float, low: float, high: float) -> None:
    """Raise UserError for a number outside of its range."""
    if not low <= value <= high:
        raise wrong_value(key, f"{value:g}", f"at least {low:g}" if high == inf else f"{low:g} to {high:g}")


def from_json(cls: type[T], content: Any, where: str = "") -> T:
    """Build a dataclass from JSON values by its annotations. UserError that names the key that does not fit."""
    try:
        return typing.cast(T, _value(cls, content, where))
    except UserError as error:  # names of keys are content, too
        raise UserError(one_line(error)[:MAX_MESSAGE]) from None


def _value(kind: Any, content: Any, where: str) -> Any:
    """Return ``content`` as ``kind``: a dataclass, tuple, dict, literal, union with None, or plain value."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return None if content is None else _value(inner[0], content, where)
    if origin is tuple:
        any_length = inner[-1] is Ellipsis
        if not isinstance(content, list) or (not any_length and len(content) != len(inner)):
            raise wrong_value(where, _short(content), "a list" if any_length else f"a list of {len(inner)}")
        kinds = [inner[0]] * len(content) if any_length else inner
        items = zip(kinds, content, strict=True)
        return tuple(_value(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(items))
    if origin is dict:
        if not isinstance(content, dict):
            raise wrong_value(where, _short(content), TYPES[dict])
        return {str(key): _value(inner[1], item, f"{where}.{key}") for key, item in content.items()}
    if origin is typing.Literal:
        if content not in inner:
            raise wrong_value(where, _short(content), ", ".join(map(str, inner)), nearest(str(content), inner))
        return content
    return _dataclass(kind, content, where) if is_dataclass(kind) else _plain(kind, content, where)


def _plain(kind: type[Any], content: Any, where: str) -> Any:
    """Return a number, text or boolean. Integers are taken for floats, nothing else is converted."""
    if isinstance(content, int) and abs(content) >= MAX_INTEGER:
        raise wrong_value(where, f"an integer of {content.bit_length()} bits", "below 2^63")
    if kind is float and type(content) is int:
        content = float(content)
    if not isinstance(content, kind) or (isinstance(content, bool) and kind is not bool):
        raise wrong_value(where, _short(content), TYPES[kind])
    if isinstance(content, float) and not isfinite(content):
        raise wrong_value(where, str(content), "a finite number")
    return content


def _dataclass(cls: Any, content: Any, where: str) -> Any:
    """Return an instance of ``cls`` with the fields of an object; every field but ``ADDED`` must be there, no other."""
    if not isinstance(content, Mapping):
        raise wrong_value(where, _short(content), TYPES[dict])
    hints, names = typing.get_type_hints(cls), [field.name for field in fields(cls)]
    content = {name: value for name, value in ADDED.items() if name in hints} | dict(content)
    lacks, unknown = [name for name in names if name not in content], [key for key in content if key not in names]
    if lacks or unknown:
        lists = ", ".join(lacks) or "nothing", ", ".join(unknown) or "nothing"
        raise UserError(f"{where}: lacks {lists[0]}; has unknown {lists[1]}")
    prefix = f"{where}." if where else ""
    return cls(**{name: _value(hints[name], content[name], f"{prefix}{name}") for name in names})


def _short(content: Any) -> str:
    text = "null" if content is None else repr(content)
    return text if len(text) <= 60 else f"{text[:57]}..."
