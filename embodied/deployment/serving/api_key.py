"""The key that a policy server asks for. It is never an option of a command: others can read these."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from embodied.core.errors import UserError

VARIABLE = "EMBODIED_API_KEY"
"""Environment variable that is read if no file is named."""
SCHEME = "Api-Key"


def read_api_key(file: str | None) -> str | None:
    """Return the key from a file or, without one, from the environment; None if neither has one.

    UserError for a file that cannot be read, and for a key that does not fit into a header.
    """
    if file is None:
        where, key = VARIABLE, os.environ.get(VARIABLE)
        if key is None:
            return None
    else:
        where = f"api_key_file={file}"
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read: {getattr(error, 'strerror', 'it is no text')}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
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
