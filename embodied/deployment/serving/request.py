"""Requests of openpi's protocol: the header with the key, and the inputs of a policy.

    state, observation/state                        numbers [S], in the units of the bundle
    images.<camera>, observation/images/<camera>    uint8 [height, width, 3], RGB
    prompt                                          text of an instruction of the bundle
    noise                                           numbers of the bundle's noise_shape; by default what the bundle says
    prefix, delay                                   numbers [D, A] and an integer; by default zeros and 0

Any type of number is converted to float32. A camera's images are never resized or converted.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError, unknown_name
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.runner import InputSpec

VARIABLE = "EMBODIED_API_KEY"
"""Environment variable with the key, if no file is named. The key is no option of a command: others can read these."""
SCHEME = "Api-Key"
MAX_NAME = 100
"""Characters of a key that a message repeats."""
MAX_PROMPT = 1000
"""Characters of a prompt."""
ALLOWANCE_BYTES = 65536
"""Bytes of a message besides its arrays."""


def read_api_key(file: str | None) -> str | None:
    """Return the key from a file or, without one, from the environment; None if neither has one.

    UserError for a file that cannot be read, and for a key that does not fit into a header.
    """
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


def authorization(key: str) -> dict[str, str]:
    """Return the header that carries a key."""
    return {"Authorization": f"{SCHEME} {key}"}


def is_authorized(headers: list[str], key: str) -> bool:
    """Return whether ``headers``, all of that name, are one with the key. The time does not depend on the key."""
    if len(headers) != 1:
        return False
    got, needed = (hashlib.sha256(text.encode()).digest() for text in (headers[0], f"{SCHEME} {key}"))
    return hmac.compare_digest(got, needed)


class RequestReader:
    """Inputs of a bundle's policy from the requests of one connection.

    seed: of the noise for requests that bring none, if the bundle's noise is ``seeded``.
    """

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
    """Return the size of the largest request, with numbers of eight bytes."""
    spec = InputSpec(bundle)
    return ALLOWANCE_BYTES + sum(
        int(np.prod(shape)) * (1 if spec.types[name] == np.uint8 else 8) for name, shape in spec.shapes.items()
    )
