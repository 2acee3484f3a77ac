"""Images for policies: of all simulations of a pool, thousands per second, without OpenGL or a GPU.

    Lens: pose of the camera ─► ground: table, floor and sky ─► still layer ─► moving layer ─► translucent layer
        in each layer   outlines: tiles that may show a geom ─► solids: ray hits ─► shading of the nearest

Suffixes: n simulations, b bodies, g geoms, h and w pixels.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.errors import UserError, unknown_name
from embodied.core.spec import CameraSpec
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.rendering.appearance import Lens, Scenery, Twin
from embodied.envs.rendering.cameras import CHECKER_M, EXTENT_M, SKY, Array, Array32, Camera, Ids, geom_colors
from embodied.envs.rendering.coarse import GROUND, ROBOT, coarse_scene
from embodied.envs.rendering.config import CameraRandomization
from embodied.envs.rendering.layers import AMBIENT, FACING, FROM_ABOVE, FROM_SUN, Frame, Layer, RenderTarget, to_uint8

CAMERAS = {
    "front": Camera("front", fovy_deg=32.0, pos=(1.2, -0.15, 0.8), lookat=(0.5, 0.0, 0.05)),
    "wrist": Camera("wrist", mount="wrist"),
}
MIN_SIMS_PER_THREAD = 64
BLOCK = 128  # simulations that are rendered together
SKY_LOW, SKY_HIGH = 255 * SKY.astype(np.float32)
TILE_M = np.float32(CHECKER_M)


def find_camera(name: str) -> Camera:
    """Return the camera of that name in ``CAMERAS``; UserError that lists the names for an unknown one."""
    if name not in CAMERAS:
        raise unknown_name("camera", name, CAMERAS)
    return CAMERAS[name]


def find_cameras(cameras: Sequence[Camera | CameraSpec], reach: float) -> list[Camera]:
    """Return each Camera as it is, and for a spec the one that it names, with the spec's image size.

    reach: length of the robot's tasks relative to the Panda's, for which the named cameras are placed.
    """
    named = {one.name: find_camera(one.name).scaled(reach) for one in cameras if isinstance(one, CameraSpec)}
    return [
        one if isinstance(one, Camera) else replace(named[one.name], width=one.width, height=one.height)
        for one in cameras
    ]


class Rig:
    """Cameras, and looks of geoms, in all simulations of ``batch``; a subclass renders. spec: of the batch's model.

    looks: the few geoms to show of robot, table and floor (``Robot.coarse``). UserError for cameras or ranges of
    randomisation that cannot be.
    """

    model: mujoco.MjModel
    """The twin's model; ``segmentation`` has ids of its geoms."""

    def __init__(
        self,
        batch: Batch,
        spec: mujoco.MjSpec,
        looks: mujoco.MjModel,
        cameras: Sequence[Camera],
        randomization: CameraRandomization | None = None,
    ) -> None:
        names = [camera.name for camera in cameras]
        if not names or len(set(names)) < len(names):
            raise UserError(f"cameras: got the names {names}, allowed: one at least, each once")
        self.randomization = randomization or CameraRandomization()
        self.coarse = coarse_scene(spec, looks)
        self.batch, self.cameras, self.model = batch, cameras, self.coarse.compile()
        self.lenses = [Lens(camera, batch, self.randomization) for camera in cameras]
        group = self.model.geom_group
        self.scenery = Scenery(self.model, batch.nsim, self.randomization, np.isin(group, ROBOT), group == GROUND)

    def start(self, ids: Ids, rng: EpisodeRng | None) -> None:
        """Prepare for the episodes that begin in simulations ``ids`` [n] (sorted and unique).

        Copy the geoms' shapes and colours from the simulations, and draw the randomisation (none if ``rng`` is None).
        """
        if self.randomization == CameraRandomization():  # all is off: draws would change nothing
            rng = None
        for lens in self.lenses:
            lens.start(ids, rng)
        self.scenery.start(ids, rng, self.copy_geoms(ids))

    def copy_geoms(self, ids: Ids) -> Array:
        """Copy the geoms' looks and places in simulations ``ids``; return the colours of all, [n, g, 4]."""
        raise NotImplementedError


class CameraRig(Rig):
    """Render the images of several cameras in all simulations of ``batch``, whose kinematics must be current.

    A new rig can render only after the batch's next call, which fills what it binds. num_threads: 0 is the batch's
    number. Further arguments: see ``Rig``.
    """

    def __init__(
        self,
        batch: Batch,
        spec: mujoco.MjSpec,
        looks: mujoco.MjModel,
        cameras: Sequence[Camera],
        randomization: CameraRandomization | None = None,
        num_threads: int = 0,
    ) -> None:
        super().__init__(batch, spec, looks, cameras, randomization)
        count = min(num_threads or batch.nthread, -(-batch.nsim // MIN_SIMS_PER_THREAD))
        shares = np.array_split(np.arange(batch.nsim), count)
        self._painters = [_Painter(batch, self.coarse, self.model, share, self.scenery) for share in shares]
        self._threads = ThreadPoolExecutor(len(shares), "camera")
        self.start(np.arange(batch.nsim), None)

    def copy_geoms(self, ids: Ids) -> Array:
        return np.concatenate([painter.copy_geoms(ids) for painter in self._painters])

    def render(self, ids: Ids | None = None, depth: bool = False, segmentation: bool = False) -> dict[str, Tensor]:
        """Render simulations ``ids`` (sorted and unique; None: all) with every camera.

        Returns ``images.<name>`` uint8 [n, h, w, 3]; on request ``depth.<name>`` float32 [n, h, w] in metres along the
        optical axis (inf: the sky) and ``segmentation.<name>`` int32 [n, h, w], ids of ``model``'s geoms (-1: the sky).
        """
        sims = np.arange(self.batch.nsim) if ids is None else ids
        frames = [Frame.empty(len(sims), lens.camera, geoms=segmentation) for lens in self.lenses]

        def render_share(painter: _Painter) -> None:
            for lens, frame in zip(self.lenses, frames, strict=True):
                painter.paint(lens, sims, frame)

        list((self._threads.map if len(self._painters) > 1 else map)(render_share, self._painters))
        outputs: dict[str, Tensor] = {}
        for lens, frame in zip(self.lenses, frames, strict=True):
            name, shape = lens.camera.name, (len(sims), lens.camera.height, lens.camera.width)
            outputs[f"images.{name}"] = torch.from_numpy(frame.rgb.reshape(*shape, 3))
            if depth:
                outputs[f"depth.{name}"] = torch.from_numpy(frame.depth.reshape(shape))
            if frame.geom is not None:
                outputs[f"segmentation.{name}"] = torch.from_numpy(frame.geom.reshape(shape))
        return outputs


class _Backdrop(NamedTuple):
    """Cached images of the ground and the still layer from one camera that does not move, for n simulations."""

    frame: Frame
    current_n: NDArray[np.bool_]
    """Whether the image was drawn since the episode began."""
    pose_nb12: Array
    """Poses of the bodies when the image was drawn, see ``Layer.poses``."""


class _Painter:
    """One thread's share: render simulations ``sims`` (consecutive) of ``batch``. spec, model: the twin's."""

    def __init__(self, batch: Batch, spec: mujoco.MjSpec, model: mujoco.MjModel, sims: Ids, scenery: Scenery) -> None:
        self.sims, self.scenery = sims, scenery
        self.ground, self.twin = _Ground(model), Twin(batch, model, sims, nthread=1)
        drawn = model.geom_group != GROUND
        opaque, body = geom_colors(self.twin.batch, np.zeros(1, int))[0, :, 3] == 1, model.geom_bodyid
        fixed = (model.body_weldid[body] == 0) | (model.body_mocapid[body] >= 0)
        self.still, self.moving, self.translucent = self.layers = tuple(
            Layer(self.twin, spec, np.flatnonzero(drawn & some), scenery, batch.bind("xpos"), batch.bind("xmat"))
            for some in (opaque & fixed, opaque & ~fixed, ~opaque)
        )
        self._backdrops: dict[str, _Backdrop] = {}  # by camera

    def copy_geoms(self, ids: Ids) -> Array:
        """Copy types, sizes, positions and colours of geoms from simulations ``ids`` that this painter renders.

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
            target = RenderTarget.of(lens, ids[rows], frame.view(rows))
            if lens.mount is None:
                self._copy_backdrop(lens, target)
            else:
                self._paint_still(target)
            self.moving.draw(target)
            self.translucent.draw(target, translucent=True)

    def _own(self, ids: Ids) -> slice:
        """Return the places in ``ids`` (sorted) of simulations that this painter renders."""
        first, last = np.searchsorted(ids, [self.sims[0], self.sims[-1] + 1])
        return slice(int(first), int(last))

    def _copy_backdrop(self, lens: Lens, target: RenderTarget) -> None:
        """Start the images with the camera's cached backdrop; redraw it where an episode began or a body was moved."""
        name, rows, count = lens.camera.name, target.sims - self.sims[0], len(self.sims)
        if name not in self._backdrops:
            pose = np.zeros((count, len(self.still.bodies), 12))
            self._backdrops[name] = _Backdrop(Frame.empty(count, lens.camera), np.zeros(count, bool), pose)
        backdrop, pose = self._backdrops[name], self.still.poses(target.sims)
        stale = ~backdrop.current_n[rows] | (backdrop.pose_nb12[rows] != pose).any((1, 2))
        if stale.any():
            fresh = Frame.empty(int(stale.sum()), lens.camera)
            self._paint_still(RenderTarget.of(lens, target.sims[stale], fresh))
            backdrop.frame.put(rows[stale], fresh)
            backdrop.pose_nb12[rows], backdrop.current_n[rows] = pose, True
        for source, copy in zip(backdrop.frame, target.frame, strict=True):
            if source is not None and copy is not None:
                source.take(rows, axis=0, out=copy, mode="clip")  # clip needs no buffer

    def _paint_still(self, target: RenderTarget) -> None:
        """Start the images with the ground and the still layer."""
        self.ground.paint(target, self.scenery)
        self.still.draw(target)


class _Ground:
    """Table top and tiled floor (two horizontal planes) and sky, drawn without testing rays against geoms."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self.table, self.floor = model.geom("table_top").id, model.geom("floor").id
        self.table_pos = model.geom_pos[self.table].astype(np.float32)
        self.table_half = model.geom_size[self.table].astype(np.float32)
        self.floor_z = np.float32(model.geom_pos[self.floor, 2])

    def paint(self, target: RenderTarget, scenery: Scenery) -> None:
        """Draw colour, depth (inf: sky) and geom (-1: sky) of all pixels of ``target``."""
        sims, frame, origin_n3 = target.sims, target.frame, target.origin_n3.astype(np.float32)
        rgba_ng4, brightness_n = scenery.rgba_Ng4[sims], scenery.brightness_N[sims]
        (x, y, z), length = _frame_rays(target)
        lit_n = AMBIENT + FROM_ABOVE + FROM_SUN * np.maximum(scenery.sun_N3[sims, 2], np.float32(0))
        light = (lit_n[:, None] + FACING * (-z / length)) * brightness_n[:, None]
        for k in range(3):
            frame.rgb[..., k] = to_uint8(light * rgba_ng4[:, self.table, k, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            frame.depth[:] = depth = (self.table_pos[2] - origin_n3[:, 2:]) / z
            on_table = (z < 0) & (depth > 0)
            for k, way in enumerate((x, y)):
                on_table &= np.abs(origin_n3[:, k, None] + depth * way - self.table_pos[k]) <= self.table_half[k]
        rest = np.flatnonzero(~on_table)  # rays that reach the floor or the sky
        row_m, x, y, z, length, light = rest // length.shape[1], *(a.ravel()[rest] for a in (x, y, z, length, light))
        origin_m3 = origin_n3[row_m]
        sky = SKY_LOW + np.sqrt(np.maximum(z / length, np.float32(0)))[:, None] * (SKY_HIGH - SKY_LOW)
        sky *= brightness_n[row_m, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = (self.floor_z - origin_m3[:, 2]) / z
            depth = np.where((z < 0) & (depth > 0), depth, np.float32(np.inf))
            column, line = (np.floor((origin_m3[:, k] + depth * way) / TILE_M) for k, way in enumerate((x, y)))
            odd = np.abs(column + line - 2 * np.floor((column + line) / 2))
        near = 1 - np.minimum(depth * length / np.float32(EXTENT_M), np.float32(1)) ** 2
        share = np.where(near > 0, near, np.float32(0))[:, None]
        tile = np.where(near > 0, light * (np.float32(0.92) + np.float32(0.08) * odd), np.float32(0))
        color = share * tile[:, None] * rgba_ng4[row_m, self.floor, :3] + (1 - share) * sky
        frame.rgb.reshape(-1, 3)[rest], frame.depth.reshape(-1)[rest] = to_uint8(color), depth
        if frame.geom is not None:
            frame.geom[:] = self.table
            frame.geom.reshape(-1)[rest] = np.where(depth < np.inf, self.floor, -1)


def _frame_rays(target: RenderTarget) -> tuple[list[Array32], Array32]:
    """Return the rays through all pixels in world coordinates (three arrays [n, h*w]) and their lengths [n, h*w]."""
    turn, grid, step_n1 = target.rotation_n33.astype(np.float32)[..., None], target.grid, target.step_n[:, None]
    x_nw = (step_n1 * grid.x_c.ravel()[: grid.width]).astype(np.float32)
    y_nh = (step_n1 * grid.y_r.ravel()[: grid.height]).astype(np.float32)
    across = [turn[:, k, 0] * x_nw for k in range(3)]
    along = [turn[:, k, 1] * y_nh - turn[:, k, 2] for k in range(3)]
    ray = [(a[:, None, :] + b[:, :, None]).reshape(len(a), -1) for a, b in zip(across, along, strict=True)]
    length = np.sqrt((1 + x_nw * x_nw)[:, None, :] + (y_nh * y_nh)[:, :, None])
    return ray, length.reshape(len(length), -1)
