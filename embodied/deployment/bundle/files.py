"""Read files that may be damaged or hostile: JSON as dataclasses, arrays, hashes. Whatever they hold, the answer is a
value of the right type or a UserError of one line, and memory is bounded. numpy alone.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
import zipfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar, Union

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line

MAX_ARRAYS_BYTES = 2**33
"""Largest size of the arrays of a file."""
MAX_MESSAGE = 600
"""Characters of a message about a file."""
MAX_INTEGER = 2**63
NUMBERS = "biuf"
"""Kinds of numpy's types that are numbers; texts are U."""

T = TypeVar("T")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, max_bytes: int) -> Any:
    """Return the content of a JSON file. UserError if it cannot be read or has more than ``max_bytes``."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise UserError(f"{path} is larger than {max_bytes} bytes")
        return json.loads(data)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)[:MAX_MESSAGE]}") from error


def load_arrays(path: Path, max_bytes: int = MAX_ARRAYS_BYTES) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file, by name, without loading pickles.

    UserError for another file, for arrays of objects, and for more than ``max_bytes`` of numbers. Nothing is allocated
    before the headers of all arrays have passed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            left = max_bytes if path.stat().st_size <= max_bytes else -1
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    if npy.read_magic(file) != (1, 0):
                        raise ValueError(f"{entry.filename} is no array of version 1.0")
                    shape, _, dtype = npy.read_array_header_1_0(file)
                    if dtype.kind not in NUMBERS + "U" or any(size < 0 for size in shape):
                        raise ValueError(f"{entry.filename} has {dtype} {list(shape)}")
                    left -= prod(shape) * dtype.itemsize
            if left < 0:
                raise ValueError(f"its arrays have more than {max_bytes} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # zipfile and numpy raise many kinds for damaged files
        raise UserError(f"cannot read {path}: {one_line(error)[:MAX_MESSAGE]}") from error


def from_json(cls: type[T], content: Any, where: str) -> T:
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
        if not isinstance(content, list) or (inner[-1] is not Ellipsis and len(content) != len(inner)):
            raise UserError(f"{where}: got {_short(content)}, needed a list of {len(inner)} values")
        kinds = [inner[0]] * len(content) if inner[-1] is Ellipsis else inner
        return tuple(_value(of, item, f"{where}[{i}]") for i, (of, item) in enumerate(zip(kinds, content, strict=True)))
    if origin is dict:
        if not isinstance(content, dict):
            raise UserError(f"{where}: got {_short(content)}, needed an object")
        return {str(key): _value(inner[1], item, f"{where}.{key}") for key, item in content.items()}
    if origin is typing.Literal:
        if content not in inner:
            raise UserError(f"{where}: got {_short(content)}, allowed: {', '.join(map(str, inner))}")
        return content
    if is_dataclass(kind):
        return _dataclass(typing.cast(type[Any], kind), content, where)
    if isinstance(content, int) and abs(content) >= MAX_INTEGER:
        raise UserError(f"{where}: got an integer of {content.bit_length()} bits, allowed: below 2^63")
    if kind is float and isinstance(content, int) and not isinstance(content, bool):
        content = float(content)
    if not isinstance(content, kind) or (isinstance(content, bool) and kind is not bool):
        raise UserError(f"{where}: got {_short(content)}, needed {kind.__name__}")
    if isinstance(content, float) and not np.isfinite(content):
        raise UserError(f"{where}: got {content}, needed a finite number")
    return content


def _dataclass(cls: type[Any], content: Any, where: str) -> Any:
    """Return an instance of ``cls`` with the fields of an object; every field must be there, and no other."""
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: got {_short(content)}, needed an object")
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    names = [field.name for field in fields(cls)]
    missing, unknown = [name for name in names if name not in content], [key for key in content if key not in names]
    if missing or unknown:
        raise UserError(
            f"{where}: lacks {', '.join(missing) or 'nothing'}; has unknown {', '.join(unknown) or 'nothing'}"
        )
    return cls(**{name: _value(hints[name], content[name], f"{where}.{name}") for name in names})


_hints = cache(typing.get_type_hints)


def _short(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 60 else f"{text[:57]}..."
