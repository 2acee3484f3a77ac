"""Import names of version 0.1, answered for one more version with a warning.

``envs``, ``policies`` and ``algos`` are ``embodied.envs``, ``embodied.policies`` and ``embodied.algos`` now. After
``import embodied`` the old names and their submodules are the same module objects, so every registry exists once. A
module or package that a user calls ``envs`` is found first.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

ROOMS = ("envs", "policies", "algos")
MOVED = {
    "embodied.deployment.control.controller": "embodied.deployment.control.arm",
    "embodied.deployment.control.observation": "embodied.deployment.control.arm",
    "embodied.deployment.controller": "embodied.deployment.control.arm",
    "embodied.deployment.observation": "embodied.deployment.control.arm",
    "embodied.deployment.runner": "embodied.deployment.bundle.runner",
    "embodied.envs.common": "embodied.envs.base",
    "embodied.envs.common.conformance": "embodied.envs.checks.conformance",
    "embodied.envs.common.episodic": "embodied.envs.base.episodic",
    "embodied.envs.common.sampler": "embodied.envs.episodes.sampler",
    "embodied.envs.common.seeding": "embodied.envs.episodes.seeding",
    "embodied.run": "embodied.session",
    "embodied.run.torch_runner": "embodied.session.torch_runner",
}
"""Modules of version 0.1 that documents and bundles told users to import, and where each is now."""


def answer_old_names() -> None:
    """Let the old names be found: the three packages by the last of all finders, the rest by the first."""
    sys.meta_path.append(_Finder(ROOMS.__contains__))
    sys.meta_path.insert(0, _Finder(_is_moved))


def _is_moved(name: str) -> bool:
    """Return whether a module moved, or is in one of the three packages, whose files must not be loaded twice."""
    room, _, submodule = name.partition(".")
    if not submodule or room not in ROOMS or sys.modules[room].__name__ != f"embodied.{room}":
        return name in MOVED
    return find_spec(f"embodied.{name}") is not None


class _Finder(MetaPathFinder):
    """Find modules under the names that ``is_old`` accepts."""

    def __init__(self, is_old: Callable[[str], bool]) -> None:
        self.is_old = is_old

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, _Alias()) if self.is_old(fullname) else None


class _Alias(Loader):
    """Put the module of the new name under the old name as well."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        new = MOVED.get(name, f"embodied.{name}")
        if name in MOVED or name in ROOMS:
            warnings.warn(f"'{name}' is called '{new}' now", FutureWarning, stacklevel=2)
        sys.modules[name] = import_module(new)
