"""The import names ``envs``, ``policies`` and ``algos`` of version 0.1, answered for one more version with a warning.

They are ``embodied.envs``, ``embodied.policies`` and ``embodied.algos`` now. After ``import embodied`` the old names
and their submodules are the same module objects, so every registry exists once. A module or package that a user calls
``envs`` is found first.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

ROOMS = ("envs", "policies", "algos")


def answer_old_names() -> None:
    """Let the old names be found where nothing else has them."""
    sys.meta_path.append(_Rooms())


class _Rooms(MetaPathFinder):
    """Find the three packages, last of all finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, _Alias()) if fullname in ROOMS else None


class _Submodules(MetaPathFinder):
    """Find the submodules of one of the three, before Python's own finder loads their files a second time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        room, _, submodule = fullname.partition(".")
        if not submodule or room not in ROOMS or sys.modules[room].__name__ != f"embodied.{room}":
            return None
        return spec_from_loader(fullname, _Alias()) if find_spec(f"embodied.{fullname}") else None


class _Alias(Loader):
    """Put the module of the new name under the old name as well."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in ROOMS:
            warnings.warn(f"'{name}' is called 'embodied.{name}' now", FutureWarning, stacklevel=2)
            if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
                sys.meta_path.insert(0, _Submodules())
        sys.modules[name] = import_module(f"embodied.{name}")
