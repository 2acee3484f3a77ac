"""Environments: batched MuJoCo tasks and other simulators as ``VecEnv``. Importing this fills the registries."""

from collections.abc import Mapping, Sequence
from typing import Any

from embodied.core.options import from_mapping
from embodied.core.spec import CameraSpec
from embodied.envs.adapters.envpool import family as envpool  # noqa: F401  # registers itself
from embodied.envs.adapters.gym import family as gym  # noqa: F401  # registers itself
from embodied.envs.adapters.maniskill import family as maniskill  # noqa: F401  # registers itself
from embodied.envs.episodes.sampler import SAMPLERS, SamplerSetup, UniformConfig, UniformSampler, first_episodes
from embodied.envs.mujoco import family
from embodied.envs.mujoco.pool import MujocoPool, SimConfig
from embodied.envs.registry import FAMILIES, TASKS
from embodied.envs.rendering.cameras import Camera
from embodied.envs.tasks import detour, lift, pick_place, push, reach, stack, tabletop
from embodied.envs.views.gymnasium_api import register_tasks

__all__ = [
    "FAMILIES", "SAMPLERS", "TASKS", "MujocoPool", "SamplerSetup", "SimConfig", "UniformConfig", "UniformSampler",
    "detour", "family", "first_episodes", "lift", "make_pool", "make_sampler", "pick_place",
    "push", "reach", "stack", "tabletop",
]  # fmt: skip


register_tasks()


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
    entry, placed = TASKS[task], [family.find(camera) for camera in cameras]
    config = from_mapping(entry.config, task_config, f"task.{task}")
    options = from_mapping(SimConfig, sim or {}, "sim")
    return MujocoPool(entry.build(config), num_envs=num_envs, num_threads=num_threads, sim=options, cameras=placed)


def make_sampler(env: MujocoPool, seed: int = 0, **setup: Any) -> UniformSampler:
    """Return a uniform sampler for an env. setup: further fields of ``SamplerSetup``."""
    return UniformSampler(env.spec, UniformConfig(), SamplerSetup(env.num_envs, seed, **setup))
