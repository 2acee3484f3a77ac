"""The family ``mujoco``: our own tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from embodied.core.spec import CameraSpec, EnvSpec
from embodied.envs.mujoco.pool import MujocoPool, SimConfig, spec_of
from embodied.envs.mujoco.warp.pool import WarpConfig, WarpPool
from embodied.envs.registry import DEFAULT_FAMILY, FAMILIES, TASKS
from embodied.envs.rendering.cameras import Camera
from embodied.envs.rendering.vision import find_camera


@FAMILIES.register(DEFAULT_FAMILY, config=SimConfig)
class MujocoFamily:
    """See ``embodied.envs.registry.Family``."""

    simulators: Mapping[str, type[Any]] = {DEFAULT_FAMILY: SimConfig, "warp": WarpConfig}

    def ids(self) -> Sequence[str]:
        return TASKS.names()

    def task_config(self, id: str) -> type[Any]:
        return TASKS[id].config

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        return spec_of(TASKS[id].build(task), [find(camera) for camera in cameras])

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> MujocoPool | WarpPool:
        if isinstance(sim, WarpConfig):
            return WarpPool(TASKS[id].build(task), num_envs=num_envs, sim=sim, cameras=cameras)
        placed = [find(camera) for camera in cameras]
        return MujocoPool(TASKS[id].build(task), num_envs=num_envs, num_threads=num_threads, sim=sim, cameras=placed)


def find(camera: CameraSpec | Camera) -> Camera:
    """Return a Camera as it is, or the one that a spec names, with its image size. UserError for an unknown name."""
    if isinstance(camera, Camera):
        return camera
    return replace(find_camera(camera.name), width=camera.width, height=camera.height)
