"""openpi's protocol: messages of msgpack with numpy arrays (never a pickle), requests, and the header with the key.

array      {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
number     {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}
request    state, images.<camera>, prompt, noise, prefix, delay (docs/sim_to_real.md)

``decode`` trusts nothing: the size of a message is bounded, that of each text, list and map before it is built, and the
number of lists and maps. Any type of number in a request is converted to float32. A camera's images are never resized
or converted.
"""

import hashlib
import hmac
import importlib
import itertools
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line, unknown_name
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.runner import InputSpec

ARRAY, NUMBER = b"__ndarray__", b"__npgeneric__"
DTYPES = {
    np.dtype(order + code).str: np.dtype(order + code)
    for order in "<>"
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
"""Types of arrays and numbers, by numpy's name: booleans, integers and floats."""
MAX_DIMENSIONS = 8
MAX_SIZE = 2**24  # of one dimension
MAX_TEXT_BYTES = 65536
MAX_LENGTH = 4096  # of a list or map
MAX_CONTAINERS = 16384  # lists and maps in a message

VARIABLE = "EMBODIED_API_KEY"
"""Environment variable with the key, if no file is named. The key is no option of a command: others can read these."""
SCHEME = "Api-Key"
MAX_NAME = 100  # characters of a key that a message repeats
MAX_PROMPT = 1000  # characters of a prompt
ANY_IMAGE_BYTES = 480 * 640 * 3  # of an image, whatever size is needed
ALLOWANCE_BYTES = 65536  # bytes of a message besides its arrays


def require_packages(key: str) -> None:
    """Raise UserError unless the packages of the protocol are here. key: option or command that needs them."""
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


def decode(data: bytes, max_bytes: int) -> Any:
    """Return the message of ``data``; arrays are read-only views. UserError if it is malformed, or beyond a limit."""
    import msgpack

    if len(data) > max_bytes:
        raise UserError(f"message: got {len(data)} bytes, allowed: at most {max_bytes}")
    limits, numbers = dict.fromkeys(("max_array_len", "max_map_len"), MAX_LENGTH), itertools.count(1)

    def counted(found: Any) -> Any:
        if next(numbers) > MAX_CONTAINERS:
            raise UserError(f"message: has more than {MAX_CONTAINERS} lists and maps")
        return found

    try:
        return msgpack.unpackb(
            data, object_hook=lambda found: _unpack(counted(found)), list_hook=counted, strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES, max_ext_len=0, **limits,
        )  # fmt: skip
    except UserError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise UserError(f"message: {one_line(error)[:200] or type(error).__name__}") from None


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


def read_api_key(file: str | None) -> str | None:
    """Return the key from a file, else of the environment, else None. UserError for one that fits no header."""
    where, key = VARIABLE, os.environ.get(VARIABLE)
    if file is not None:
        where = f"api_key_file={file}"
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read: {getattr(error, 'strerror', 'it is no text')}") from None
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise UserError(f"{where}: got an empty key or one with spaces, allowed: printable ASCII letters")
    return key


def is_authorized(headers: list[str], key: str) -> bool:
    """Return whether ``headers``, all of that name, are one with the key. The time does not depend on the key."""
    if len(headers) != 1:
        return False
    got, needed = (hashlib.sha256(text.encode()).digest() for text in (headers[0], f"{SCHEME} {key}"))
    return hmac.compare_digest(got, needed)


class RequestReader:
    """Inputs of a bundle's policy from the requests of one connection. seed: of noise that is ``seeded``."""

    def __init__(self, bundle: Bundle, seed: int = 0) -> None:
        self.bundle, self.spec = bundle, InputSpec(bundle)
        self._random = np.random.Generator(np.random.Philox(key=seed))
        self._names = {name: name for name in self.spec.shapes if name != "instruction"}
        self._names["observation/state"] = "state"
        for camera in bundle.cameras:
            self._names[f"observation/images/{camera.name}"] = f"images.{camera.name}"
        if bundle.instructions:
            self._names["prompt"] = "instruction"

    def inputs(self, message: Any) -> dict[str, NDArray[Any]]:
        """Return the inputs of one decision, one row each. UserError for a wrong key, type, shape or value."""
        if not isinstance(message, dict):
            raise UserError(f"request: got {type(message).__name__}, allowed: a map with {', '.join(self._names)}")
        shapes, found = self.spec.shapes, dict[str, NDArray[Any]]()
        for key, value in message.items():
            name = self._names.get(key)
            if name is None:
                raise unknown_name("key of a request", str(key)[:MAX_NAME], self._names)
            if name in found:
                raise UserError(f"request: has two keys for {name}, allowed: one")
            found[name] = self._index(value) if name == "instruction" else self._convert(name, value)
        if "instruction" not in shapes:
            found.pop("instruction", None)
        elif "instruction" not in found:
            found["instruction"] = self._index(None)
        if int(found.get("delay", 0)) and "prefix" not in found:
            raise UserError(
                f"request: a delay of {found['delay']} needs a prefix, the actions that are decided already"
            )
        for name in {"noise", "prefix", "delay"} & shapes.keys() - found.keys():
            found[name] = np.zeros(shapes[name], self.spec.types[name])
            if name == "noise" and self.bundle.noise == "seeded":
                found[name] = self._random.standard_normal(shapes[name], np.float32)
        return self.spec.check({name: value[None] for name, value in found.items()})

    def _index(self, prompt: Any) -> NDArray[np.int64]:
        """Return the index of an instruction, which the bundle has to know even if the policy reads none."""
        if prompt is not None and (not isinstance(prompt, str) or len(prompt) > MAX_PROMPT):
            raise UserError(f"prompt: got {str(prompt)[:MAX_NAME]!r}, allowed: a text of at most {MAX_PROMPT} letters")
        return np.array(self.bundle.instruction_index(prompt), np.int64)

    def _convert(self, name: str, value: Any) -> NDArray[Any]:
        """Return an entry with the type of the input, if it has its shape and a type that may be converted."""
        shape, kind = self.spec.shapes[name], np.dtype(self.spec.types[name])
        if name == "delay" and type(value) is int and abs(value) < 2**31:
            return np.array(value, kind)
        allowed, needed = {"u": ("u", "uint8"), "i": ("iu", "an integer"), "f": ("fiu", "numbers")}[kind.kind]
        fits = isinstance(value, (np.ndarray, np.generic)) and value.shape == shape and value.dtype.kind in allowed
        if not fits or (kind == np.uint8 and value.dtype != kind):
            got = f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
            raise UserError(f"{name}: got {got}, needed {needed} {list(shape)}")
        with np.errstate(over="ignore"):  # a float64 too large for float32 becomes inf, which is refused
            return np.asarray(value, kind)


def request_of(bundle: Bundle, inputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the request for the only row of a policy's inputs."""
    request: dict[str, Any] = {name: value[0] for name, value in inputs.items() if name != "instruction"}
    if "instruction" in inputs:
        request["prompt"] = bundle.instructions[int(inputs["instruction"][0])].text
    return request


def max_request_bytes(bundle: Bundle) -> int:
    """Return the size of the largest request that is read, with numbers of eight bytes and too large images.

    A larger one closes the connection; an image of a wrong size should get an error that says so.
    """
    spec = InputSpec(bundle)
    sizes = (max(prod(shape), ANY_IMAGE_BYTES) if spec.types[name] == np.uint8 else 8 * prod(shape)
             for name, shape in spec.shapes.items())  # fmt: skip
    return ALLOWANCE_BYTES + sum(sizes)
