"""Read files that may be damaged or hostile: JSON, arrays, hashes. Whatever they hold, the answer is a value or a
UserError of one line, and memory is bounded. numpy alone.
"""

import hashlib
import json
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line

MAX_ARRAYS_BYTES = 2**33
"""Largest size of the arrays of a file."""
MAX_MESSAGE = 600
"""Characters of a message about a file."""
KINDS = "biufU"
"""Kinds of numpy's types that are numbers or texts."""


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
            raise ValueError(f"it is larger than {max_bytes} bytes")
        return json.loads(data)
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
                    if dtype.kind not in KINDS or any(size < 0 for size in shape):
                        raise ValueError(f"{entry.filename} has {dtype} {list(shape)}")
                    left -= prod(shape) * dtype.itemsize
            if left < 0:
                raise ValueError(f"its arrays have more than {max_bytes} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # zipfile and numpy raise many kinds for damaged files
        raise UserError(f"cannot read {path}: {one_line(error)[:MAX_MESSAGE]}") from error
