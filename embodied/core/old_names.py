"""Import names of version 0.1, answered for one more version with a warning.

``envs``, ``policies`` and ``algos`` are ``embodied.envs``, ``embodied.policies`` and ``embodied.algos`` now. After
``import embodied`` the old names and their submodules are the same module objects, so every registry exists once. A
module or package that a user calls ``envs`` is found first.
"""

import sys
import warnings
from collections.abc import Container, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

ROOMS = ("envs", "policies", "algos")
MOVED = {
    "embodied.algos.ppo_config": "embodied.algos.config",
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
    """Let the old names be found where nothing else has them."""
    sys.meta_path.append(_Names(ROOMS))
    sys.meta_path.insert(0, _Names(MOVED))


class _Names(MetaPathFinder):
    """Find modules by their old names: the three packages last of all finders, modules that moved first."""

    def __init__(self, names: Container[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, _Alias()) if fullname in self.names else None


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
        if name in MOVED:
            warnings.warn(f"'{name}' is called '{MOVED[name]}' now", FutureWarning, stacklevel=2)
            sys.modules[name] = import_module(MOVED[name])
            return
        if name in ROOMS:
            warnings.warn(f"'{name}' is called 'embodied.{name}' now", FutureWarning, stacklevel=2)
            if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
                sys.meta_path.insert(0, _Submodules())
        sys.modules[name] = import_module(f"embodied.{name}")
