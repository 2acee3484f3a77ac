"""Environments: batched MuJoCo tasks behind one VecEnv. Importing this fills ``TASKS`` and gymnasium's registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from embodied.core.options import from_mapping
from envs.mujoco.pool import MujocoPool, SimConfig
from envs.registry import TASKS
from envs.rendering.cameras import Camera
from envs.tasks import lift, pick_place, push, reach, stack, tabletop
from envs.views.gymnasium_api import register_tasks

__all__ = ["TASKS", "MujocoPool", "SimConfig", "lift", "make_pool", "pick_place", "push", "reach", "stack", "tabletop"]


register_tasks()


def make_pool(
    task: str,
    task_config: Mapping[str, Any],
    *,
    num_envs: int,
    num_threads: int = 0,
    seed: int = 0,
    sim: Mapping[str, Any] | None = None,
    stagger: bool = False,
    held_starts: float = 0.0,
    group_size: int = 1,
    splits: Sequence[str] | None = None,
    cameras: Sequence[Camera] = (),
) -> MujocoPool:
    """The pool of a registered task. UserError for an unknown task or option; see MujocoPool for the rest."""
    entry = TASKS[task]
    config = from_mapping(entry.config, task_config, f"task.{task}")
    options = from_mapping(SimConfig, sim or {}, "sim")
    return MujocoPool(
        entry.build(config), num_envs=num_envs, num_threads=num_threads, seed=seed, sim=options, stagger=stagger,
        held_starts=held_starts, group_size=group_size, splits=splits, cameras=cameras,
    )  # fmt: skip
