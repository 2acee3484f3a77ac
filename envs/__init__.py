"""Environments: batched MuJoCo tasks and other simulators as ``VecEnv``.

Importing this registers our tasks with gymnasium, and imports neither a simulator nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium

from embodied.core import user_files
from embodied.core.options import from_mapping
from embodied.core.spec import CameraSpec
from embodied.envs.episodes.registry import SAMPLERS, SamplerSetup, UniformConfig
from embodied.envs.mujoco.config import SIDES, SimConfig
from embodied.envs.registry import FAMILIES, TASKS

if TYPE_CHECKING:
    from embodied.core.env import VecEnv
    from embodied.envs.episodes.sampler import UniformSampler
    from embodied.envs.mujoco.pool import MujocoPool
    from embodied.envs.rendering.cameras import Camera

__all__ = [
    "FAMILIES", "SAMPLERS", "TASKS", "SamplerSetup", "SimConfig", "UniformConfig", "gymnasium_id", "make_pool",
    "make_sampler", "register",
]  # fmt: skip


def gymnasium_id(task: str, robot: str = "") -> str:
    """Return the gymnasium id of a task: ``pick_place`` → ``embodied/PickPlace-v0``; a robot comes first."""
    return f"embodied/{robot}{''.join(word[:1].upper() + word[1:] for word in task.split('_'))}-v0"


def register(task: str, prefix: str = "", **options: Any) -> str:
    """Register a task with gymnasium, by its name or as ``<file>.py:<class>``; return its id.

    prefix: what the id begins with. options: of the task. UserError as for ``make_pool``.
    """
    task = user_files.absolute(task)
    id = gymnasium_id(user_files.short_name(task).rpartition(":")[2], prefix)
    gymnasium.register(
        id,
        entry_point="embodied.envs.views.gymnasium_api:TaskEnv",
        vector_entry_point="embodied.envs.views.gymnasium_api:TaskVectorEnv",
        max_episode_steps=TASKS[task].config(**options).max_episode_steps,
        kwargs={"task": task, **options},
    )
    return id


for _prefix, _name in {"": "", "SO101": "so101"}.items():
    for _task in TASKS.registered():
        _two = "robots" in TASKS[_task].config.__dataclass_fields__
        _robot = {} if not _name else {"robots": dict.fromkeys(SIDES, _name)} if _two else {"robot": _name}
        register(_task, _prefix, **_robot)


def make_pool(
    task: str,
    task_config: Mapping[str, Any],
    *,
    num_envs: int,
    num_threads: int = 0,
    sim: Mapping[str, Any] | None = None,
    cameras: Sequence[Camera | CameraSpec] = (),
) -> MujocoPool:
    """Return the pool of a registered task; see ``MujocoPool``. UserError for an unknown task, option or camera.

    task_config, sim: options of the task and of ``SimConfig``, with defaults for missing ones.
    """
    from embodied.envs.mujoco.pool import MujocoPool

    entry = TASKS[task]
    config = from_mapping(entry.config, task_config, f"task.{task}")
    options = from_mapping(SimConfig, sim or {}, "sim")
    return MujocoPool(entry.build(config), num_envs=num_envs, num_threads=num_threads, sim=options, cameras=cameras)


def make_sampler(env: VecEnv, seed: int = 0, **setup: Any) -> UniformSampler:
    """Return a uniform sampler for an env. setup: further fields of ``SamplerSetup``."""
    from embodied.envs.episodes.sampler import UniformSampler

    return UniformSampler(env.spec, UniformConfig(), SamplerSetup(env.num_envs, seed, **setup))
