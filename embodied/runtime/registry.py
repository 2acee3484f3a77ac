"""Registry of the runtimes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodied.core.errors import UserError
from embodied.core.registry import Registry
from embodied.runtime.config import LocalConfig, RuntimeConfig
from embodied.runtime.ray.config import RayConfig

if TYPE_CHECKING:
    from embodied.runtime.loop import Runtime
    from embodied.runtime.recipe import Recipe

RUNTIMES: Registry[type[Runtime]] = Registry("runtime")
RUNTIMES.declare("sync", "embodied.runtime.sync:SyncRuntime", RuntimeConfig)
RUNTIMES.declare("local", "embodied.runtime.local:LocalRuntime", LocalConfig)
RUNTIMES.declare("ray", "embodied.runtime.ray.runtime:RayRuntime", RayConfig)


def build_runtime(recipe: Recipe) -> Runtime:
    """Build the runtime that ``recipe.config`` names. UserError if the config is not of its options' class."""
    entry, given = RUNTIMES[recipe.config.name], type(recipe.config)
    if not issubclass(given, entry.config):
        raise UserError(
            f"runtime={entry.name} needs options of the class {entry.config.__name__}, got {given.__name__}"
        )
    return entry.build(recipe)
