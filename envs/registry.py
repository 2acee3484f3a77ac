"""The registries of tasks and of families of environments, and our own family.

A family is a simulator with its environments; ``task=<family>/<id>`` names one of them. A name without ``/`` is one of
our own tasks, in the family ``mujoco``; so is ``<file>.py:<class>``. Other distributions add families and tasks by
entry points in the groups ``embodied.families`` and ``embodied.tasks`` (docs/simulators.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from embodied.core import user_files
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import from_mapping
from embodied.core.registry import Entry, Registry
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.envs.adapters.config import EnvpoolConfig, GymSimConfig, ManiSkillConfig
from embodied.envs.mujoco.config import SimConfig, WarpConfig
from embodied.envs.tasks import config
from embodied.envs.tasks.config import TaskConfig

if TYPE_CHECKING:
    from embodied.core.env import VecEnv
    from embodied.envs.mujoco.pool import MujocoPool
    from embodied.envs.mujoco.warp.pool import WarpPool
    from embodied.envs.tasks.base import Task

PARTS = ("instruction", "observed", "observed_by_critic", "rewards", "success")  # what the class of a task must have


class Tasks(Registry["type[Task]"]):
    """Tasks by name; ``<file>.py:<class>`` is a task in a file of the user's."""

    def __getitem__(self, name: str) -> Entry[type[Task]]:
        if (found := user_files.reference(name)) is None:
            return super().__getitem__(name)
        from embodied.envs.tasks.base import Task

        (path, wanted), module = found, user_files.load(found[0])
        things = {key: thing for key, thing in vars(module).items() if isinstance(thing, type)}
        classes = {key: thing for key, thing in things.items() if thing.__module__ == module.__name__}
        tasks = {key: thing for key, thing in classes.items() if issubclass(thing, Task)}
        if wanted not in classes:
            raise unknown_name(f"class in {path}", wanted, tasks)
        if wanted not in tasks:
            needed = f"the class must inherit Task (from {Task.__module__} import Task)"
            raise UserError(f"task {name}: {needed}; an environment of gymnasium is gym/<module>:<id>")
        build: type[Task] = tasks[wanted]
        if lacking := [part for part in PARTS if getattr(build, part, None) is getattr(Task, part, None)]:
            raise UserError(f"task {name}: the class lacks {', '.join(lacking)}")
        build.name = user_files.short_name(name)
        config = get_type_hints(build)["config"]
        if not (isinstance(config, type) and issubclass(config, TaskConfig)):
            raise UserError(f"task {name}: config: its annotation must be a config_dataclass that inherits TaskConfig")
        options = [key for key, thing in classes.items() if issubclass(thing, config) and thing is not config]
        if len(tasks) == len(options) == 1:
            raise UserError(f"task {name}: the class lacks the annotation config: {options[0]}")
        if vars(config).get("__annotations__") and "__dataclass_fields__" not in vars(config):
            raise UserError(f"task {name}: write @config_dataclass above class {config.__name__}")
        return Entry(name, build, config)


TASKS = Tasks("task", group="embodied.tasks")
TASKS.declare("detour", "embodied.envs.tasks.detour:Detour", config.DetourConfig)
TASKS.declare("lift", "embodied.envs.tasks.lift:Lift", config.LiftConfig)
TASKS.declare("lift_bar", "embodied.envs.tasks.lift_bar:LiftBar", config.LiftBarConfig)
TASKS.declare("pick_place", "embodied.envs.tasks.pick_place:PickPlace", config.PickPlaceConfig)
TASKS.declare("push", "embodied.envs.tasks.push:Push", config.PushConfig)
TASKS.declare("reach", "embodied.envs.tasks.reach:Reach", config.ReachConfig)
TASKS.declare("stack", "embodied.envs.tasks.stack:Stack", config.StackConfig)
TASKS.declare("tabletop", "embodied.envs.tasks.tabletop:Tabletop", config.TabletopConfig)


class Family(Protocol):
    """Environments of one simulator: a class without arguments, registered with the dataclass of ``sim`` options.

    A family that more than one simulator can run has ``simulators``, the dataclasses of ``sim`` options by the name of
    the simulator, ``sim=``; the first one is the default. If copies of an environment may be large, or share what there
    is once per process, it has ``few_copies = True``: then evaluations have no more copies than training.
    """

    def ids(self) -> Sequence[str]:
        """Return the names of the environments, as users write them."""

    def task_config(self, id: str) -> type[Any]:
        """Return the dataclass of the environment's options. UserError with the nearest name for an unknown ``id``."""

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        """Return the spec of the environment, without building it. UserError for cameras that it cannot have."""

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> VecEnv:
        """Return ``num_envs`` copies of the environment, stepped by ``num_threads`` threads (0: all cores)."""


FAMILIES: Registry[type[Family]] = Registry("family of environments", group="embodied.families")
DEFAULT_FAMILY = "mujoco"
FAMILIES.declare("envpool", "embodied.envs.adapters.envpool.family:EnvpoolFamily", EnvpoolConfig)
FAMILIES.declare("gym", "embodied.envs.adapters.gym.family:Gym", GymSimConfig)
FAMILIES.declare("maniskill", "embodied.envs.adapters.maniskill.family:ManiSkill", ManiSkillConfig)


@FAMILIES.register(DEFAULT_FAMILY, config=SimConfig)
class MujocoFamily:
    """Our own tasks."""

    simulators: Mapping[str, type[Any]] = {DEFAULT_FAMILY: SimConfig, "warp": WarpConfig}

    def ids(self) -> Sequence[str]:
        return TASKS.names()

    def task_config(self, id: str) -> type[Any]:
        return TASKS[id].config

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        from embodied.envs.rendering.vision import find_cameras
        from embodied.envs.tasks.base import task_spec

        built = TASKS[id].build(task)
        return task_spec(built, find_cameras(cameras, built.scale.reach))

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> MujocoPool | WarpPool:
        if isinstance(sim, WarpConfig):
            from embodied.envs.mujoco.warp.pool import WarpPool

            return WarpPool(TASKS[id].build(task), num_envs=num_envs, sim=sim, cameras=cameras)
        from embodied.envs.mujoco.pool import MujocoPool

        return MujocoPool(TASKS[id].build(task), num_envs=num_envs, num_threads=num_threads, sim=sim, cameras=cameras)


def split_name(task: str) -> tuple[str, str]:
    """Return family and id of a name: ``lift`` → ``("mujoco", "lift")``, ``mine/cart`` → ``("mine", "cart")``."""
    family, slash, id = task.partition("/")
    if user_files.reference(task):
        return DEFAULT_FAMILY, task
    return (family, id) if slash else (DEFAULT_FAMILY, task)


def sim_options(task: str, options: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the checked options of the simulator of a task, which ``options["name"]`` may name.

    For a task of another simulator, ``mujoco``, the default of ``sim=``, is the first of its family. UserError for a
    simulator that does not run the task, and for an unknown option.
    """
    family, _ = split_name(task)
    entry, name = FAMILIES[family], options.get("name", DEFAULT_FAMILY)
    allowed: Mapping[str, type[Any]] = getattr(entry.build, "simulators", {family: entry.config})
    if name not in (*allowed, DEFAULT_FAMILY):
        raise UserError(f"sim={name} does not run task={task}: it needs {' or '.join(allowed)}")
    name = name if name in allowed else next(iter(allowed))
    return name, from_mapping(allowed[name], {key: value for key, value in options.items() if key != "name"}, "sim")
