"""Registries: from a name that users write in configurations to a class and its options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from embodied.core.errors import UserError, one_line, unknown_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A registered class or builder with the dataclass of its options."""

    name: str
    thing: T | str
    """Itself, or ``module:name``."""
    options: type[Any] | str
    """The dataclass, or its name in the same module."""

    @property
    def build(self) -> T:
        """The class or builder. Its module is imported when this is first read."""
        found: T = resolve_name(self.thing) if isinstance(self.thing, str) else self.thing
        return found

    @property
    def config(self) -> type[Any]:
        """Dataclass of its options."""
        module, options = str(self.thing).partition(":")[0], self.options
        found: type[Any] = resolve_name(f"{module}:{options}") if isinstance(options, str) else options
        return found


class Registry(Generic[T]):
    """A map from names to classes (or builders) and their config dataclasses.

    kind: what the names stand for, for messages. group: entry points of installed distributions in this group are names
    too. The object of an entry point is imported when its name is first looked up, and registers the name.

    >>> POLICIES = Registry("policy")
    >>> @POLICIES.register("gaussian", config=GaussianConfig)
    ... class GaussianPolicy: ...
    >>> POLICIES["gaussian"].build is GaussianPolicy
    True

    Parts of this project are declared, so that options are read and checked before torch and simulators are imported:

    >>> POLICIES.declare("gaussian", "embodied.policies.gaussian:GaussianPolicy", GaussianConfig)
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind, self.group = kind, group
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, config: type[Any]) -> Callable[[T], T]:
        """Return a decorator that registers a class under ``name``. ValueError if the name is taken."""

        def add(thing: T) -> T:
            self.declare(name, thing, config)
            return thing

        return add

    def declare(self, name: str, thing: T | str, config: type[Any] | str) -> None:
        """Register a class, or ``module:name`` of one that is imported when it is first asked for.

        config: dataclass of its options, or its name in that module. ValueError if the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is registered twice")
        self._entries[name] = Entry(name, thing, config)

    def __getitem__(self, name: str) -> Entry[T]:
        """Return the entry of a name.

        UserError with the nearest name if there is none, and for an entry point that cannot be imported.
        """
        if name not in self._entries:
            if name not in self.names():
                raise unknown_name(self.kind, name, self.names())
            self._load(self._offered()[name])
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted({*self._entries, *self._offered()})

    def registered(self) -> list[str]:
        """Return the names that are registered already, sorted: all but those of entry points not yet looked up."""
        return sorted(self._entries)

    def _offered(self) -> Mapping[str, EntryPoint]:
        """Return the entry points of installed distributions by name. A registered name has precedence."""
        return {} if self.group is None else {point.name: point for point in entry_points(group=self.group)}

    def _load(self, point: EntryPoint) -> None:
        """Import the object of an entry point. UserError if that fails or does not register the name."""
        distribution = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
        where = f"{self.kind} '{point.name}', entry point {point.value}{distribution}"
        try:
            point.load()
        except Exception as error:  # third-party code may raise anything
            raise UserError(f"{where}: cannot be imported: {type(error).__name__}: {one_line(error)}") from error
        if point.name not in self._entries:
            raise UserError(f"{where}: importing it registered no {self.kind} '{point.name}'")
