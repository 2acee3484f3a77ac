"""Messages of openpi's protocol: msgpack with numpy arrays, never a pickle.

array      {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
number     {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}

``decode`` trusts nothing. It walks over the headers of a message before anything is built, so size, depth and number
of elements are bounded whatever a message claims.
"""

from __future__ import annotations

import importlib
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line

ARRAY, NUMBER = b"__ndarray__", b"__npgeneric__"
DTYPES = {
    np.dtype(order + code).str: np.dtype(order + code)
    for order in "<>"
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
"""Types of arrays and numbers, by numpy's name: booleans, integers and floats."""
MAX_DEPTH = 8
MAX_DIMENSIONS = 8
MAX_SIZE = 2**24  # of one dimension
MAX_TEXT_BYTES = 65536
MAX_ELEMENTS = 1024
"""Values in a request or reply; an array is four of them."""

_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes that hold the length of bytes (0xC4 on) and texts (0xD9 on), by tag."""
_COUNTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes that hold the count of a list or map, and values for each of them, by tag."""
_SCALARS = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {0xCC + i: 2 ** (i % 4) for i in range(8)}
_SCALARS |= dict.fromkeys([*range(0x80), *range(0xE0, 0x100)], 0) | {0xA0 + i: i for i in range(32)}
"""Bytes after the tag of a value whose tag says all."""
_CHILDREN = {0x80 + i: 2 * i for i in range(16)} | {0x90 + i: i for i in range(16)}
"""Values in a list or map whose tag says their count."""


def require_packages(key: str) -> None:
    """Raise UserError, with the command that installs them, unless the packages of the protocol are here.

    key: the option or command that needs them.
    """
    try:
        for name in ("websockets", "msgpack"):
            importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{key}: {one_line(error)}; pip install websockets msgpack") from error


def encode(message: Any) -> bytes:
    """Return a message of dicts, lists, text, numbers and numpy arrays as bytes. UserError for an array of objects."""
    import msgpack

    packed: bytes = msgpack.packb(message, default=_pack)
    return packed


def decode(data: bytes, max_bytes: int, max_elements: int = MAX_ELEMENTS) -> Any:
    """Return the message of ``data``; its arrays are read-only views of it. UserError for anything malformed.

    max_bytes: largest size of the message. max_elements: largest number of values in it.
    """
    import msgpack

    if len(data) > max_bytes:
        raise UserError(f"message: got {len(data)} bytes, allowed: at most {max_bytes}")
    check_structure(data, max_elements)
    try:
        return msgpack.unpackb(
            data,
            object_hook=_unpack,
            strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=max_bytes,
            max_array_len=max_elements,
            max_map_len=max_elements,
            max_ext_len=0,
        )
    except UserError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise UserError(f"message: {one_line(error)[:200]}") from None


def check_structure(data: bytes, max_elements: int) -> None:
    """Check lengths, depth and number of values of a msgpack message without building it. UserError if one is wrong."""
    size, position, elements, left = len(data), 0, 0, 1
    outer: list[int] = []  # values that are still to come in the levels above
    while left or outer:
        if not left:
            left = outer.pop()
            continue
        left, elements = left - 1, elements + 1
        if elements > max_elements:
            raise UserError(f"message: has more than {max_elements} values")
        if position >= size:
            raise UserError("message: is incomplete")
        tag = data[position]
        length = _SCALARS.get(tag)
        if length is not None:
            position += 1 + length
        elif tag in _LENGTHS:
            begin = position + 1 + _LENGTHS[tag]
            length = int.from_bytes(data[position + 1 : begin], "big")
            if tag >= 0xD9 and length > MAX_TEXT_BYTES:
                raise UserError(f"message: has a text of {length} bytes, allowed: at most {MAX_TEXT_BYTES}")
            position = begin + length
        else:
            children, position = _container(data, position, tag)
            if len(outer) >= MAX_DEPTH:
                raise UserError(f"message: is nested deeper than {MAX_DEPTH}")
            outer.append(left)
            left = children
    if position != size:
        raise UserError(f"message: ends at byte {size}, its content at {position}")


def _container(data: bytes, position: int, tag: int) -> tuple[int, int]:
    """Return the number of values in a list or map, keys included, and where they begin. UserError for other tags."""
    if tag in _CHILDREN:
        return _CHILDREN[tag], position + 1
    if tag not in _COUNTS:
        raise UserError(f"message: has a value of type 0x{tag:02x}, which is no number, text, bytes, list or map")
    width, factor = _COUNTS[tag]
    begin = position + 1 + width
    return factor * int.from_bytes(data[position + 1 : begin], "big"), begin


def _pack(value: Any) -> dict[bytes, Any]:
    """Return an array or a number of numpy as openpi's clients write it."""
    if not isinstance(value, (np.ndarray, np.generic)):
        raise UserError(f"message: got {type(value).__name__}, allowed: numbers, text, lists, dicts and numpy arrays")
    if value.dtype.str not in DTYPES:
        raise UserError(f"message: got an array of {value.dtype}, allowed: booleans, integers and floats")
    if isinstance(value, np.ndarray):
        return {ARRAY: True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return {NUMBER: True, b"data": value.item(), b"dtype": value.dtype.str}


def _unpack(found: dict[Any, Any]) -> Any:
    """Return the array or number that a map of the message describes; other maps as they are."""
    if ARRAY in found:
        if found.keys() != {ARRAY, b"data", b"dtype", b"shape"}:
            raise UserError("message: an array has dtype, shape and data, and nothing else")
        return _array(found[b"data"], _dtype(found[b"dtype"]), found[b"shape"])
    if NUMBER in found:
        if found.keys() != {NUMBER, b"data", b"dtype"} or not isinstance(found[b"data"], (bool, int, float)):
            raise UserError("message: a number has dtype and data, and nothing else")
        with np.errstate(all="ignore"):
            return _dtype(found[b"dtype"]).type(found[b"data"])
    return found


def _dtype(name: Any) -> np.dtype[Any]:
    """Return the type of a name from DTYPES. numpy's parser, which also knows objects and structures, is not asked."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UserError(f"message: got dtype {str(name)[:20]!r}, allowed: {', '.join(sorted(DTYPES))}")
    return DTYPES[name]


def _array(data: Any, dtype: np.dtype[Any], shape: Any) -> NDArray[Any]:
    """Return the array of ``data`` without a copy, once its size is right."""
    if not isinstance(data, bytes) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise UserError(f"message: an array has bytes, and a shape of at most {MAX_DIMENSIONS} sizes")
    known = all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape)
    if not known or prod(shape) * dtype.itemsize != len(data):
        raise UserError(f"message: got shape {str(shape)[:80]} of {dtype} for {len(data)} bytes")
    return np.ndarray(tuple(shape), dtype, data)
