"""Messages of openpi's protocol: msgpack with numpy arrays, never a pickle.

array      {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
number     {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}

``decode`` trusts nothing. It walks over the headers of a message before anything is built, so size, depth and number
of elements are bounded whatever a message claims.
"""

import importlib
from math import prod
from typing import Any

import numpy as np

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

_HEADS = dict.fromkeys([*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)], (0, 0, 1, 0))
_HEADS |= {0xCA: (0, 4, 1, 0), 0xCB: (0, 8, 1, 0)} | {0xCC + i: (0, 2 ** (i % 4), 1, 0) for i in range(8)}
_HEADS |= {0xA0 + i: (0, i, 1, 0) for i in range(32)}
_HEADS |= {first + i: (2**i, 0, 1, 0) for first in (0xC4, 0xD9) for i in range(3)}
_HEADS |= {0x80 + i: (0, i, 0, 2) for i in range(16)} | {0x90 + i: (0, i, 0, 1) for i in range(16)}
_HEADS |= {0xDC: (2, 0, 0, 1), 0xDD: (4, 0, 0, 1), 0xDE: (2, 0, 0, 2), 0xDF: (4, 0, 0, 2)}
"""By tag of msgpack: bytes that hold a count, the count if there are none, bytes and values that follow per count."""
_TEXTS = (0xD9, 0xDA, 0xDB)
"""Tags of texts whose length is not in the tag."""


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
        return msgpack.unpackb(data, object_hook=_unpack, strict_map_key=True, max_ext_len=0)
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
        if tag not in _HEADS:
            raise UserError(f"message: has a value of type 0x{tag:02x}, which is no number, text, bytes, list or map")
        width, count, bytes_each, values_each = _HEADS[tag]
        begin = position + 1 + width
        if width:
            count = int.from_bytes(data[position + 1 : begin], "big")
        if tag in _TEXTS and count > MAX_TEXT_BYTES:
            raise UserError(f"message: has a text of {count} bytes, allowed: at most {MAX_TEXT_BYTES}")
        position = begin + count * bytes_each
        if values_each:
            if len(outer) >= MAX_DEPTH:
                raise UserError(f"message: is nested deeper than {MAX_DEPTH}")
            outer.append(left)
            left = count * values_each
    if position != size:
        raise UserError(f"message: ends at byte {size}, its content at {position}")


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
    """Return the array or number that a map of the message describes; other maps as they are.

    An array is a view of its bytes. numpy's parser of types, which also knows objects and structures, is not asked.
    """
    if ARRAY not in found and NUMBER not in found:
        return found
    data, name, shape = found.get(b"data"), found.get(b"dtype"), found.get(b"shape")
    if ARRAY in found and found.keys() != {ARRAY, b"data", b"dtype", b"shape"}:
        raise UserError("message: an array has dtype, shape and data, and nothing else")
    if NUMBER in found and (found.keys() != {NUMBER, b"data", b"dtype"} or not isinstance(data, (bool, int, float))):
        raise UserError("message: a number has dtype and data, and nothing else")
    if not isinstance(name, str) or name not in DTYPES:
        raise UserError(f"message: got dtype {str(name)[:20]!r}, allowed: {', '.join(sorted(DTYPES))}")
    dtype = DTYPES[name]
    if NUMBER in found:
        with np.errstate(all="ignore"):
            return dtype.type(data)
    if not isinstance(data, bytes) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise UserError(f"message: an array has bytes, and a shape of at most {MAX_DIMENSIONS} sizes")
    known = all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape)
    if not known or prod(shape) * dtype.itemsize != len(data):
        raise UserError(f"message: got shape {str(shape)[:80]} of {dtype} for {len(data)} bytes")
    return np.ndarray(tuple(shape), dtype, data)
