"""The registries of environments. Import ``envs`` to fill them.

A family is a simulator with its environments; ``task=<family>/<id>`` names one of them. A name without ``/`` is one of
our own tasks, in the family ``mujoco``. Other distributions add families and tasks by entry points in the groups
``embodied.families`` and ``embodied.tasks`` (docs/simulators.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from embodied.core.protocols import VecEnv
from embodied.core.registry import Registry
from embodied.core.spec import CameraSpec, EnvSpec
from envs.tasks.base import Task

TASKS: Registry[type[Task]] = Registry("task", group="embodied.tasks")
DEFAULT_FAMILY = "mujoco"


class Family(Protocol):
    """Environments of one simulator: a class without arguments, registered with the dataclass of ``sim`` options."""

    def ids(self) -> Sequence[str]:
        """Return the names of the environments, as users write them."""
        ...

    def task_config(self, id: str) -> type[Any]:
        """Return the dataclass of the environment's options. UserError with the nearest name for an unknown ``id``."""
        ...

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        """Return the spec of the environment with options ``task``, without building it.

        UserError for cameras that it cannot have.
        """
        ...

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> VecEnv:
        """Return ``num_envs`` copies of the environment, stepped by ``num_threads`` threads (0: all cores)."""
        ...


FAMILIES: Registry[type[Family]] = Registry("family of environments", group="embodied.families")


def split_name(task: str) -> tuple[str, str]:
    """Return family and id of a name: ``lift`` → ``("mujoco", "lift")``, ``mine/cart`` → ``("mine", "cart")``."""
    family, slash, id = task.partition("/")
    return (family, id) if slash else (DEFAULT_FAMILY, task)
