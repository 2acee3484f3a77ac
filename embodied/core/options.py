"""Typed options: dataclasses whose annotations state the type, the range or the names that a field allows.

    @config_dataclass
    class NetworkConfig:
        hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128, 128)
        activation: Literal["elu", "relu"] = "relu"

    from_mapping(NetworkConfig, {"hidden": [64]}, "policy")     from YAML and the command line
    NetworkConfig(hidden=(64,))                                 from Python, checked in the same way

A ``__post_init__`` checks relations between fields and raises UserError. Nothing here imports torch or hydra.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

import pydantic
from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, PydanticKnownError, core_schema

from embodied.core.errors import TYPES, UserError, missing_key, nearest, wrong_value

T = TypeVar("T")

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""Seed of a run, an evaluation or a data set."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
Widths = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
"""Widths of one or more hidden layers."""

Text = Annotated[str, Field(pattern=r"\S")]
"""Text with at least one character that is not a space."""


def _device_name(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise PydanticKnownError("literal_error", {"expected": "'auto', 'cpu', 'cuda' or 'cuda:<index>'"})
    return name


DeviceName = Annotated[str, AfterValidator(_device_name)]
"""Name of a device, for ``resolve_device``."""


def one_of(names: Collection[str] | Callable[[], Collection[str]]) -> AfterValidator:
    """Allow only the names in a table: ``Annotated[str, one_of(TABLE)]``. ``Literal`` is for names without a table.

    A function that returns the names is called when a value is checked.
    """

    def check(name: str) -> str:
        allowed = names() if callable(names) else names
        if name not in allowed:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(sorted(allowed))})
        return name

    return AfterValidator(check)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def config_dataclass(cls: type[T]) -> type[T]:
    """Turn a class into a frozen dataclass of options, whose constructor raises UserError for a bad value."""
    cls.__get_pydantic_core_schema__ = classmethod(_schema)  # type: ignore[attr-defined]
    made = pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
    init: Callable[..., None] = made.__init__

    @wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise _user_error(error, cls, "") from None

    made.__init__ = checked  # type: ignore[method-assign, assignment]
    return cast(type[T], made)


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: str = "", *, file: str = "") -> T:
    """Build options from a mapping. ``path``: prefix of the keys in messages. ``file``: where they are, if in a file.

    Whole floats (``1e6``) are accepted as integers, integers as floats and lists as tuples. Any other value that does
    not fit raises UserError with the key, the value, what is allowed and the nearest name.
    """
    assert hasattr(cls, "__pydantic_config__"), f"{cls.__name__} must be a config_dataclass"
    try:
        return TypeAdapter(cls).validate_python(dict(mapping))
    except ValidationError as error:
        found = _user_error(error, cls, path)
        raise UserError(f"{file}: {str(found).partition(': give ')[0]}") if file else found from None


def _schema(cls: type[Any], source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Return pydantic's schema of a dataclass, with every field made strict."""
    schema = cast(dict[str, Any], handler(source))
    for field in schema["schema"]["fields"]:
        field["schema"] = _exact(field["schema"])
    return cast(CoreSchema, schema)


def _exact(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value without conversions between text, booleans and numbers.

    pydantic's strict mode would also refuse whole floats as integers, lists as tuples and mappings as dataclasses.
    """
    assert schema["type"] != "union", "an option has one type, or one type and None"
    if schema["type"] == "dataclass":
        assert hasattr(schema["cls"], "__pydantic_config__"), f"{schema['cls'].__name__} must be a config_dataclass"
        return schema
    schema = dict(schema)
    for key in schema.keys() & {"schema", "values_schema", "items_schema"}:
        inner = schema[key]
        schema[key] = [_exact(item) for item in inner] if isinstance(inner, list) else _exact(inner)
    if schema["type"] in ("bool", "int", "float"):
        schema["strict"] = True
    if schema["type"] == "int":

        def whole_to_int(value: Any) -> Any:
            return int(value) if isinstance(value, float) and value.is_integer() else value

        return dict(core_schema.no_info_before_validator_function(whole_to_int, cast(CoreSchema, schema)))
    return schema


ALLOWED = {
    "bool_type": TYPES[bool],
    "int_type": TYPES[int],
    "float_type": TYPES[float],
    "finite_number": "a finite number",
    "string_type": TYPES[str],
    "string_pattern_mismatch": "text that is not blank",
    "tuple_type": "a list",
    "dict_type": TYPES[dict],
    "dataclass_type": TYPES[dict],
    "literal_error": "{expected}",
    "too_short": "{min_length} or more entries",
    "too_long": "at most {max_length} entries",
}
"""Allowed values in the words of a YAML user, by pydantic's type of error."""
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _user_error(error: ValidationError, cls: type[Any], path: str) -> UserError:
    """Convert the first of pydantic's errors. cls: options that could not be built. path: their place.

    An unknown key comes before a missing one of the same mapping, of which it may be a misspelling.
    """
    first, *others = error.errors(include_url=False)
    if first["type"] == "missing":
        unknown = (
            e for e in others if (e["type"], e["loc"][:-1]) == ("unexpected_keyword_argument", first["loc"][:-1])
        )
        first = next(unknown, first)
    loc, kind = first["loc"], first["type"]
    if loc and isinstance(loc[0], int):  # an argument without its name
        loc = (dataclasses.fields(cls)[loc[0]].name, *loc[1:])
    if kind == "value_error":  # from __post_init__
        section = _without_null(_annotation(cls, loc))
        return UserError(_with_path(str(first["ctx"]["error"]), section, _join(path, *loc)))
    if kind == "unexpected_keyword_argument":
        section, place = _without_null(_annotation(cls, loc[:-1])), _join(path, *loc[:-1])
        names = {name: _join(place, name) for name in sorted(field.name for field in dataclasses.fields(section))}
        suggestion = nearest(str(loc[-1]), names)
        hint = f" Did you mean '{names[suggestion]}'?" if suggestion else ""
        allowed = ", ".join(names.values()) or "none, it has no options"
        return UserError(f"unknown key '{_join(path, *loc)}'.{hint} Allowed: {allowed}")
    if kind == "missing" and isinstance(loc[-1], str):
        return missing_key(_join(path, *loc))
    if kind == "missing":  # an item of a tuple, whose input is the whole tuple
        loc = loc[:-1]
    return _wrong_value(first, _annotation(cls, loc), _join(path, *loc))


def _wrong_value(error: ErrorDetails, annotation: Any, path: str) -> UserError:
    got = "null" if error["input"] is None else repr(error["input"])
    context = error.get("ctx", {})
    inner = _without_null(annotation)
    allowed = ALLOWED.get(error["type"], error["msg"]).format_map(context)
    if context.keys() & BOUNDS.keys():  # ``Annotated[float, Field(ge=0, lt=1)]`` → "at least 0 and below 1"
        marks = [mark for field in inner.__metadata__ for mark in field.metadata]
        bounds = [(words, getattr(mark, name, None)) for mark in marks for name, words in BOUNDS.items()]
        allowed = " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)
    if typing.get_origin(inner) is tuple and Ellipsis not in typing.get_args(inner):
        allowed = f"a list of {len(typing.get_args(inner))}"
    elif error["type"] == "tuple_type" and isinstance(error["input"], str):
        allowed = f"a list, such as [{error['input']}]"
    if inner is not annotation:
        allowed += " or null"
    suggestion = nearest(str(error["input"]), re.findall(r"\w+", context.get("expected", "")))
    return wrong_value(path, got, allowed, suggestion)


def _with_path(message: str, cls: Any, path: str) -> str:
    """Return the message of a ``__post_init__`` with the path of its section in front of it."""
    names = "|".join(field.name for field in dataclasses.fields(cls))
    if re.match(rf"({names})\b", message):
        return _join(path, message)
    if path and re.match(rf"unknown key '({names})\.", message):  # in a section that one of the fields holds
        return re.sub(rf"(?<![\w.])(?=({names})\.)", f"{path}.", message)
    return f"{path}: {message}" if path else message


def _annotation(cls: Any, loc: tuple[int | str, ...]) -> Any:
    hint = cls
    for part in loc:
        hint = _without_null(hint)
        if dataclasses.is_dataclass(hint):
            hint = typing.get_type_hints(hint, include_extras=True)[str(part)]
        else:
            item = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
            hint = next(arg for arg in reversed(typing.get_args(item)) if arg is not Ellipsis)
    return hint


def _without_null(hint: Any) -> Any:
    """Return ``X`` for ``X | None``, any other annotation unchanged."""
    args = typing.get_args(hint)
    return args[0] if types.NoneType in args else hint


def _join(path: str, *parts: int | str) -> str:
    """Join the parts of a key: ``"task", "sizes", 2`` → ``task.sizes[2]``."""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
