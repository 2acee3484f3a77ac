"""Names that users write in configs, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from embodied.core.errors import unknown_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A registered thing and the dataclass of its options."""

    name: str
    build: T
    config: type[Any]


class Registry(Generic[T]):
    """Maps a name to a class (or builder) and its config dataclass.

    >>> POLICIES = Registry("policy")
    >>> @POLICIES.register("gaussian", config=GaussianConfig)
    ... class GaussianPolicy: ...
    >>> POLICIES["gaussian"].build is GaussianPolicy
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, config: type[Any]) -> Callable[[T], T]:
        def add(thing: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._entries[name] = Entry(name, thing, config)
            return thing

        return add

    def __getitem__(self, name: str) -> Entry[T]:
        """The entry; UserError with the nearest name if there is none."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted(self._entries)
