"""The family ``mujoco``: our own tasks. Importing this imports no simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embodied.core.spec import CameraSpec, EnvSpec
from embodied.envs.mujoco.config import SimConfig, WarpConfig
from embodied.envs.registry import DEFAULT_FAMILY, TASKS

if TYPE_CHECKING:
    from embodied.envs.mujoco.pool import MujocoPool
    from embodied.envs.mujoco.warp.pool import WarpPool


class MujocoFamily:
    """See ``embodied.envs.registry.Family``."""

    simulators: Mapping[str, type[Any]] = {DEFAULT_FAMILY: SimConfig, "warp": WarpConfig}

    def ids(self) -> Sequence[str]:
        return TASKS.names()

    def task_config(self, id: str) -> type[Any]:
        return TASKS[id].config

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        from embodied.envs.rendering.vision import find_cameras
        from embodied.envs.tasks.base import task_spec

        return task_spec(TASKS[id].build(task), find_cameras(cameras))

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> MujocoPool | WarpPool:
        if isinstance(sim, WarpConfig):
            from embodied.envs.mujoco.warp.pool import WarpPool

            return WarpPool(TASKS[id].build(task), num_envs=num_envs, sim=sim, cameras=cameras)
        from embodied.envs.mujoco.pool import MujocoPool
        from embodied.envs.rendering.vision import find_cameras

        return MujocoPool(
            TASKS[id].build(task), num_envs=num_envs, num_threads=num_threads, sim=sim, cameras=find_cameras(cameras)
        )
