"""Messages between two processes over a stream socket: a JSON object and arrays. Never a pickle.

8 bytes length of the JSON | JSON {"message": ..., "arrays": [[name, dtype, shape], ...]} | the arrays' bytes
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 512 * 2**20
TYPES = ("uint8", "float32", "float64", "int64")


def send(connection: socket.socket, message: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Send a message with arrays. ConnectionError if the other side is gone."""
    described = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"message": message, "arrays": described}).encode()
    parts = [
        struct.pack("<Q", len(header)),
        header,
        *(np.ascontiguousarray(array).tobytes() for array in arrays.values()),
    ]
    connection.sendall(b"".join(parts))


def receive(connection: socket.socket) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return the next message and its arrays; None if the other side closed. ConnectionError if it is malformed."""
    length = _read(connection, 8)
    if length is None:
        return None
    (size,) = struct.unpack("<Q", length)
    if size > MAX_BYTES:
        raise ConnectionError(f"a message of {size} bytes is larger than {MAX_BYTES}")
    header = json.loads(_whole(connection, size))
    arrays = {}
    for name, kind, shape in header["arrays"]:
        if kind not in TYPES or prod(shape) > MAX_BYTES:
            raise ConnectionError(f"an array of {kind} {shape} is not allowed")
        data = _whole(connection, prod(shape) * np.dtype(kind).itemsize)
        arrays[name] = np.frombuffer(data, kind).reshape(shape)
    return header["message"], arrays


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Read ``size`` bytes; None if the other side closed before the first."""
    parts: list[bytes] = []
    while size:
        part = connection.recv(min(size, 2**20))
        if not part:
            if parts:
                raise ConnectionError("the connection ended within a message")
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _whole(connection: socket.socket, size: int) -> bytes:
    data = _read(connection, size) if size else b""
    if data is None:
        raise ConnectionError("the connection ended within a message")
    return data
