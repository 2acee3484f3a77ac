"""Images of a pool's simulations for people: videos and ``render()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from envs.rendering.appearance import Twin, add_visuals
from envs.rendering.cameras import VIDEO, Camera, RenderStyle, render

if TYPE_CHECKING:
    from envs.mujoco.pool import MujocoPool

SOLVED = np.array([46, 160, 67], np.uint8)  # colour of the border of solved envs
FRONT = Camera("front", width=640, height=480, fovy_deg=36.0, pos=(1.75, -1.1, 0.85), lookat=(0.3, 0.0, 0.22))


class Viewer:
    """Render the simulations of a pool with their visual geoms. The pool's own simulations are only read.

    mark_solved: put a green frame around the image of an env where the task is solved now.
    """

    def __init__(
        self, pool: MujocoPool, camera: Camera = FRONT, style: RenderStyle = VIDEO, mark_solved: bool = True
    ) -> None:
        self.pool, self.camera, self.style, self.mark_solved = pool, camera, style, mark_solved
        model = add_visuals(pool.task.scene(), pool.task.robot.visual)
        self.twin = Twin(pool.batch, model, np.arange(pool.num_envs), pool.batch.nthread)

    def render(self, ids: Sequence[int] | None = None) -> NDArray[np.uint8]:
        """Return colour images, uint8 [n, h, w, 3] of envs ``ids`` (None: all)."""
        self.twin.copy_positions()
        self.twin.copy_geoms()
        rgb: NDArray[np.uint8] = render(self.twin.batch, self.camera, ids, self.style)["rgb"]
        if not self.mark_solved:
            return rgb
        solved = self.pool.task.success().numpy()
        solved = solved if ids is None else solved[np.asarray(ids)]
        border = max(2, self.camera.height // 80)
        inner = (slice(None), slice(border, -border), slice(border, -border))
        framed = np.broadcast_to(SOLVED, rgb.shape).copy()
        framed[inner] = rgb[inner]
        return np.where(solved[:, None, None, None], framed, rgb)
