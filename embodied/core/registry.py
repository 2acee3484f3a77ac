"""Registries: from a name that users write in configurations to a class and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from embodied.core.errors import unknown_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A registered class or builder with the dataclass of its options."""

    name: str
    """Name in configurations."""
    build: T
    """The class or builder."""
    config: type[Any]
    """Dataclass of its options."""


class Registry(Generic[T]):
    """A map from names to classes (or builders) and their config dataclasses.

    kind: what the names stand for, such as "policy"; used in messages.

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
        """Return a decorator that registers a class under ``name``. ValueError if the name is taken."""

        def add(thing: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._entries[name] = Entry(name, thing, config)
            return thing

        return add

    def __getitem__(self, name: str) -> Entry[T]:
        """Return the entry of a name; UserError with the nearest name if there is none."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._entries)
