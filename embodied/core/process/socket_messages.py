"""Messages between two processes over a stream socket: a JSON object and arrays. Never a pickle.

8 bytes length of the JSON | JSON {"message": ..., "arrays": [[name, dtype, shape], ...]} | the arrays' bytes
"""

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
    data = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    connection.sendall(b"".join([struct.pack("<Q", len(header)), header, *data]))


def receive(connection: socket.socket) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return the next message and its arrays; None if the other side closed. ConnectionError if it is malformed."""
    length = _read(connection, 8, first=True)
    if not length:
        return None
    (size,) = struct.unpack("<Q", length)
    if size > MAX_BYTES:
        raise ConnectionError(f"a message of {size} bytes is larger than {MAX_BYTES}")
    header = json.loads(_read(connection, size))
    arrays = {}
    for name, kind, shape in header["arrays"]:
        if kind not in TYPES or prod(shape) > MAX_BYTES:
            raise ConnectionError(f"an array of {kind} {shape} is not allowed")
        data = _read(connection, prod(shape) * np.dtype(kind).itemsize)
        arrays[name] = np.frombuffer(data, kind).reshape(shape)
    return header["message"], arrays


def _read(connection: socket.socket, size: int, first: bool = False) -> bytes:
    """Read ``size`` bytes; none if the other side closed before the ``first`` bytes of a message."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 2**20))
        if not part and first and not data:
            return b""
        if not part:
            raise ConnectionError("the connection ended within a message")
        data += part
    return bytes(data)
