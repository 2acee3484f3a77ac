"""Images of a pool's simulations for people: videos and ``render()``."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.envs.rendering.appearance import Twin, add_visuals
from embodied.envs.rendering.cameras import Camera, render
from embodied.envs.rendering.vision import CameraRig
from embodied.envs.tasks.base import Task

SOLVED = np.array([46, 160, 67], np.uint8)  # colour of the border of solved envs
FRONT = Camera("front", width=640, height=480, fovy_deg=36.0, pos=(1.75, -1.1, 0.85), lookat=(0.3, 0.0, 0.22))


def front(task: Task, width: int, height: int) -> Camera:
    """Return the camera ``FRONT``, as near as the task's robot is small."""
    return replace(FRONT.scaled(task.scale.reach), width=width, height=height)


class Viewer:
    """Render a task's simulations with visual geoms, in a green frame where it is solved. The batch is only read."""

    def __init__(self, task: Task, batch: Batch, camera: Camera = FRONT) -> None:
        self.task, self.camera = task, camera
        model = add_visuals(task.scene(), task.robot.visual)
        self.twin = Twin(batch, model, np.arange(batch.nsim), batch.nthread)

    def render(self) -> NDArray[np.uint8]:
        """Return a colour image of every env, uint8 [N, h, w, 3]."""
        self.twin.copy_positions()
        self.twin.copy_geoms()
        rgb: NDArray[np.uint8] = render(self.twin.batch, self.camera, fine=True)["rgb"]
        return with_border(rgb, self.task.success().cpu().numpy())


def quick_viewer(task: Task, batch: Batch, camera: Camera) -> Callable[[], NDArray[np.uint8]]:
    """Return a function that renders the simulations of a task as policies' cameras do, uint8 [N, h, w, 3].

    It is a hundred times as fast as ``Viewer``, without shadows and with the robot's coarse geoms (``Robot.coarse``).
    It renders only after a later call of the batch.
    """
    rig = CameraRig(batch, task.scene(), task.robot.coarse, [camera])

    def draw() -> NDArray[np.uint8]:
        rig.start(np.arange(batch.nsim), None)  # shapes and colours may be those of a new episode
        return with_border(rig.render()[f"images.{camera.name}"].numpy(), task.success().numpy())

    return draw


def with_border(rgb_nhw3: NDArray[np.uint8], solved_n: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return images with a green frame around those of solved envs."""
    border = max(2, rgb_nhw3.shape[1] // 80)
    inner = (slice(None), slice(border, -border), slice(border, -border))
    framed = np.broadcast_to(SOLVED, rgb_nhw3.shape).copy()
    framed[inner] = rgb_nhw3[inner]
    return np.where(solved_n[:, None, None, None], framed, rgb_nhw3)
