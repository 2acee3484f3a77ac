"""One thread's share of rendering for policies' cameras: the ground, and then three layers of geoms.

    still        opaque geoms that do not move
    moving       opaque geoms that move
    translucent  geoms with an opacity below 1, drawn last

If the camera does not move, the image of the ground and the still layer is cached. It is drawn again when an episode
begins or one of its bodies was moved.

Suffixes: n simulations, b bodies, g geoms.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.envs.rendering.appearance import Twin
from embodied.envs.rendering.camera_randomization import Lens, Scenery
from embodied.envs.rendering.cameras import Array, Ids, geom_colors
from embodied.envs.rendering.frames import Frame, RenderTarget
from embodied.envs.rendering.layers import Layer
from embodied.envs.rendering.shading import Ground, frame_rays

GROUND = 5  # group of the twin's geoms that ``Ground`` computes, see assets/franka/coarse.xml
BLOCK = 128  # simulations that are rendered together


@dataclass(frozen=True, slots=True)
class _Backdrop:
    """Cached images of the ground and the still layer from one camera, for n simulations."""

    frame: Frame
    """Flat images."""
    current_n: NDArray[np.bool_]
    """Whether the image was drawn since the episode began."""
    pose_nb12: Array
    """Poses of the bodies when the image was drawn, see ``Layer.poses``."""


class Painter:
    """Render simulations ``sims`` (consecutive) of ``batch``.

    spec, model: the twin's. cull: cast only rays that can hit something.
    """

    def __init__(
        self, batch: Batch, spec: mujoco.MjSpec, model: mujoco.MjModel, sims: Ids, scenery: Scenery, cull: bool
    ) -> None:
        self.sims, self.scenery, self.cull = sims, scenery, cull
        self.ground, self.twin = Ground(model), Twin(batch, model, sims, nthread=1)
        drawn = model.geom_group != GROUND
        opaque, body = geom_colors(self.twin.batch, np.zeros(1, int))[0, :, 3] == 1, model.geom_bodyid
        fixed = (model.body_weldid[body] == 0) | (model.body_mocapid[body] >= 0)
        self.still, self.moving, self.translucent = self.layers = tuple(
            Layer(self.twin, spec, np.flatnonzero(drawn & some), scenery, batch.bind("xpos"), batch.bind("xmat"))
            for some in (opaque & fixed, opaque & ~fixed, ~opaque)
        )
        self._backdrops: dict[str, _Backdrop] = {}  # by camera

    def copy_geoms(self, ids: Ids) -> Array:
        """Copy types, sizes and colours of geoms from those of simulations ``ids`` that this painter renders.

        Returns the colours of all geoms in them, [n, g, 4].
        """
        rows = ids[self._own(ids)] - self.sims[0]
        for backdrop in self._backdrops.values():
            backdrop.current_n[rows] = False
        self.twin.copy_geoms(rows)
        for layer in self.layers:
            layer.copy_geoms(rows)
        return geom_colors(self.twin.batch, rows)

    def paint(self, lens: Lens, ids: Ids, frame: Frame) -> None:
        """Render those of simulations ``ids`` that this painter renders into their rows of ``frame``."""
        own = self._own(ids)
        for start in range(own.start, own.stop, BLOCK):
            rows = slice(start, min(start + BLOCK, own.stop))
            target = RenderTarget.of(lens, ids[rows], frame.flat(rows))
            if lens.mounted:
                self._paint_still(target)
            else:
                self._copy_backdrop(lens, target)
            self.moving.draw(target, self.cull)
            self.translucent.draw(target, self.cull, translucent=True)

    def _own(self, ids: Ids) -> slice:
        """Return the places in ``ids`` (sorted) of simulations that this painter renders."""
        first, last = np.searchsorted(ids, [self.sims[0], self.sims[-1] + 1])
        return slice(int(first), int(last))

    def _copy_backdrop(self, lens: Lens, target: RenderTarget) -> None:
        """Start the images with the camera's cached backdrop; redraw it where it is out of date."""
        name, rows = lens.camera.name, target.sims - self.sims[0]
        if name not in self._backdrops:
            count = len(self.sims)
            blank = Frame.empty(count, lens.camera.height, lens.camera.width).flat(slice(None))
            pose = np.zeros((count, len(self.still.bodies), 12))
            self._backdrops[name] = _Backdrop(blank, np.zeros(count, bool), pose)
        backdrop, pose = self._backdrops[name], self.still.poses(target.sims)
        stale = ~backdrop.current_n[rows] | (backdrop.pose_nb12[rows] != pose).any((1, 2))
        if stale.any():
            fresh = Frame.empty(int(stale.sum()), lens.camera.height, lens.camera.width).flat(slice(None))
            self._paint_still(RenderTarget.of(lens, target.sims[stale], fresh))
            backdrop.frame.put(rows[stale], fresh)
            backdrop.pose_nb12[rows], backdrop.current_n[rows] = pose, True
        backdrop.frame.take(rows, out=target.frame)

    def _paint_still(self, target: RenderTarget) -> None:
        """Start the images with the ground and the still layer."""
        ray, length = frame_rays(target.grid, target.step_n, target.rotation_n33)
        scenery, sims = self.scenery, target.sims
        target.frame.put(slice(None), Frame(*self.ground.paint(
            ray, length, target.origin_n3, scenery.rgba_Ng4[sims], scenery.sun_N3[sims], scenery.brightness_N[sims]
        )))  # fmt: skip
        self.still.draw(target, self.cull)
