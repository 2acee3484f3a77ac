"""Words of a command line, as a message prints them for a shell."""

import json
import re
import shlex
from typing import Any


def word(key: str, value: Any) -> str:
    """Return ``key=value`` for a shell, as ``embodied.core.config.parse_overrides`` reads it back."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]+", value):
        text = '"' + re.sub(r'(\\*)("|$)', lambda at: 2 * at[1] + (at[2] and '\\"'), value) + '"'
    return shlex.quote(f"{key}={text}")
