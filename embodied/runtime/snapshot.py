"""States of all env groups, each saved between two of its fragments, while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

Key = tuple[int, int]
"""Worker and group."""


class Snapshot:
    """One state per group. keys: the groups to be saved; by default none."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.states: dict[Key, dict[str, Any] | None] = {}
        self.complete = threading.Event()
        self._keys = set(keys)

    def lacks(self, key: Key) -> bool:
        """Return whether a group is still to be saved."""
        return key in self._keys and key not in self.states

    def put(self, key: Key, state: dict[str, Any] | None) -> None:
        """Keep the state of a group; None if its worker is not there."""
        self.states[key] = state
        if self.states.keys() == self._keys:
            self.complete.set()
