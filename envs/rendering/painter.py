"""One thread's share of taking pictures: the ground, and then geoms, nearest in front.

    still        what stands still in front of a camera that does: kept until an episode begins or a body was moved
    moving       over it in every picture
    translucent  what is seen through, last

Suffixes: n simulations, h and w pixels, p pixels of a tile, t tiles of a picture, m tiles of all, g geoms, b bodies.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from envs.rendering.appearance import Twin
from envs.rendering.camera_randomization import Lens, Scenery
from envs.rendering.cameras import Array, Ids, field_values, geom_colors
from envs.rendering.culling import TILE, Array32, Grid, Outlines
from envs.rendering.mesh_rays import OtherShape
from envs.rendering.shading import Ground, frame_rays, shade, to_uint8
from envs.rendering.solids import SOLIDS, Meeting, Vector

GROUND = 5  # group of the twin's geoms that are computed, see assets/franka/coarse.xml
BLOCK = 128  # simulations that are painted together
_SHAPE = ("geom_type", "geom_size", "geom_rbound")


@dataclass(frozen=True, slots=True)
class Frame:
    """Pictures as they grow: rgb uint8 [n, h, w, 3], depth float32 [n, h, w], geom int32 [n, h, w] or None, which saves
    time."""

    rgb: NDArray[np.uint8]
    depth: NDArray[np.float32]
    geom: NDArray[np.int32] | None

    @staticmethod
    def empty(count: int, height: int, width: int, geoms: bool = True) -> Frame:
        shape = (count, height, width)
        geom = np.empty(shape, np.int32) if geoms else None
        return Frame(np.empty((*shape, 3), np.uint8), np.empty(shape, np.float32), geom)

    def flat(self, rows: slice) -> Frame:
        """A view of some rows, with one axis for all pixels."""
        rgb, depth = self.rgb[rows], self.depth[rows]
        n = len(depth)
        geom = None if self.geom is None else self.geom[rows].reshape(n, -1)
        return Frame(rgb.reshape(n, -1, 3), depth.reshape(n, -1), geom)

    def put(self, rows: Ids | slice, other: Frame) -> None:
        """Replace some rows by those of ``other``."""
        self.rgb[rows], self.depth[rows] = other.rgb, other.depth
        if self.geom is not None and other.geom is not None:
            self.geom[rows] = other.geom

    def take(self, rows: Ids, out: Frame) -> None:
        """Copy some rows to ``out``."""
        for kept, copy in ((self.rgb, out.rgb), (self.depth, out.depth), (self.geom, out.geom)):
            if kept is not None and copy is not None:
                kept.take(rows, axis=0, out=copy, mode="clip")  # clip needs no buffer


@dataclass(frozen=True, slots=True)
class _Shot:
    """Flat pictures of simulations ``sims`` [n] to be taken; from where: see ``Lens.pose``."""

    sims: Ids
    grid: Grid
    origin_n3: Array
    rotation_n33: Array
    step_n: Array
    frame: Frame

    @staticmethod
    def of(lens: Lens, sims: Ids, frame: Frame) -> _Shot:
        return _Shot(sims, Grid.of(lens.camera.width, lens.camera.height), *lens.pose(sims), frame)


class _Stage:
    """Geoms ``geoms`` of the twin's model, drawn together. xpos, xmat: poses of bodies, the batch's."""

    def __init__(self, twin: Twin, spec: mujoco.MjSpec, geoms: Ids, scenery: Scenery, xpos: Array, xmat: Array) -> None:
        model = twin.batch.model
        self.twin, self.geoms, self.scenery, self.xpos, self.xmat = twin, geoms, scenery, xpos, xmat
        self.bodies, self._body_g = np.unique(model.geom_bodyid[geoms], return_inverse=True)
        self._pos_g31 = model.geom_pos[geoms][..., None]
        rotation_g9 = np.empty((len(geoms), 9))
        for row, geom in zip(rotation_g9, geoms, strict=True):
            mujoco.mju_quat2Mat(row, model.geom_quat[geom])
        self._rotation_g33 = rotation_g9.reshape(-1, 3, 3)
        self._kind_Ng, self._size_Ng3, rbound_Ng = self._shapes(np.arange(len(twin.sims)))
        self._outlines = Outlines(self._kind_Ng, self._size_Ng3, rbound_Ng)
        others = [g for g, geom in enumerate(geoms) if model.geom_type[geom] not in SOLIDS]
        self._others = {g: OtherShape(twin, spec, int(geoms[g])) for g in others}

    def sync(self, rows: Ids) -> None:
        """Take over types and sizes that geoms have in twins ``rows``."""
        kind_ng, size_ng3, rbound_ng = self._shapes(rows)
        self._kind_Ng[rows], self._size_Ng3[rows] = kind_ng, size_ng3
        self._outlines.resize(rows, kind_ng, size_ng3, rbound_ng)

    def _shapes(self, rows: Ids) -> tuple[NDArray[np.int32], Array32, Array]:
        """Types [n, g], sizes [n, g, 3] and bounding radii [n, g] in twins ``rows``."""
        kind, size, rbound = (field_values(self.twin.batch, name, rows)[:, self.geoms] for name in _SHAPE)
        return kind.astype(np.int32), size.astype(np.float32), rbound

    def poses(self, sims: Ids) -> Array:
        """Where the bodies are, [n, b, 12]."""
        at = np.ix_(sims, self.bodies)
        return np.concatenate([self.xpos[at], self.xmat[at].reshape(len(sims), -1, 9)], axis=-1)

    def draw(self, shot: _Shot, cull: bool, translucent: bool = False) -> None:
        """Draw all geoms over what is in the pictures."""
        if not len(self.geoms):
            return
        rows, grid, n = shot.sims - self.twin.sims[0], shot.grid, len(shot.sims)
        center_3ng, axes_33ng = self._frames(shot)
        column_cng, line_rng = self._outlines.touched(rows, center_3ng, axes_33ng, shot.step_n, grid)
        where_gnrc = line_rng.T[..., None] & column_cng.T[:, :, None]
        place = np.flatnonzero(where_gnrc if cull else np.ones_like(where_gnrc))
        seen_m = place // len(grid.pixel_tp)  # which geom in which picture
        tile_m = place - seen_m * len(grid.pixel_tp)
        kind_m = self._kind_Ng[rows].T.ravel().take(seen_m)
        numbers = self._numbers(shot, center_3ng, axes_33ng)
        for kind in np.unique(kind_m):
            chosen = np.flatnonzero(kind_m == kind)
            seen, tile = seen_m.take(chosen), tile_m.take(chosen)
            geom = seen // n
            self._paint(shot, kind, _View.of(numbers, seen), geom, seen - geom * n, tile, translucent)

    def _paint(
        self, shot: _Shot, kind: int, view: _View, geom_m: Ids, row_m: Ids, tile_m: Ids, translucent: bool
    ) -> None:
        """Paint geoms of one kind, whose places in ``geoms`` are given, into tiles of pictures ``row``, where they are
        nearer than what was there."""
        ray, square = view.rays(shot.grid, tile_m)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if kind in SOLIDS:
                meeting = SOLIDS[kind](view.size, view.origin, ray, square)
            else:
                meeting = self._meet_others(shot, geom_m, row_m, ray)
            light = shade(meeting.normal, ray, np.sqrt(square), view.sun, view.up, view.brightness)
        frame, depth = shot.frame, meeting.depth.ravel()
        all_places = (shot.grid.pixel_tp.T.take(tile_m, axis=1) + row_m * frame.depth.shape[1]).ravel()
        nearer = _keep_nearest(frame.depth.reshape(-1), all_places, depth)
        place, picture = all_places.take(nearer), frame.rgb.reshape(-1, 3)
        if frame.geom is not None:
            frame.geom.reshape(-1)[place] = np.broadcast_to(self.geoms[geom_m], light.shape).ravel().take(nearer)
        for k in range(3):
            color = light * view.rgba_4m[k]
            if translucent:
                behind = picture[:, k].take(all_places).reshape(color.shape)
                color = view.rgba_4m[3] * np.minimum(color, np.float32(255)) + (1 - view.rgba_4m[3]) * behind
            picture[place, k] = to_uint8(color).ravel().take(nearer)

    def _meet_others(self, shot: _Shot, geom_m: Ids, row_m: Ids, ray: Vector) -> Meeting:
        """Where rays meet geoms that ``SOLIDS`` does not know, in world coordinates."""
        parts = []
        for g in np.unique(geom_m):
            some = geom_m == g
            way = (ray[0][:, some], ray[1][:, some], ray[2][:, some])
            parts.append(self._others[g].meet(shot.origin_n3, shot.sims, row_m[some], way))
        x, y, z = (np.concatenate([part.normal[k] for part in parts], -1) for k in range(3))
        return Meeting(np.concatenate([part.depth for part in parts], -1), (x, y, z))

    def _frames(self, shot: _Shot) -> tuple[Array32, Array32]:
        """Where geoms are, [3, n, g], and component i of their axis k, [i, k, n, g], in the camera's coordinates."""
        at = np.ix_(shot.sims, self.bodies)
        to_camera_n133 = shot.rotation_n33.transpose(0, 2, 1)[:, None]
        body_nb33 = to_camera_n133 @ self.xmat[at].reshape(len(shot.sims), -1, 3, 3)
        body_nb31 = to_camera_n133 @ (self.xpos[at] - shot.origin_n3[:, None])[..., None]
        turn_ng33 = body_nb33[:, self._body_g]
        center_ng3 = (body_nb31[:, self._body_g] + turn_ng33 @ self._pos_g31)[..., 0]
        axes_ng33 = turn_ng33 @ self._rotation_g33
        return (
            np.ascontiguousarray(center_ng3.transpose(2, 0, 1), np.float32),
            np.ascontiguousarray(axes_ng33.transpose(2, 3, 0, 1), np.float32),
        )

    def _numbers(self, shot: _Shot, center_3ng: Array32, axes_33ng: Array32) -> Array32:
        """What ``_View`` takes apart, of every geom in every picture, [numbers, g * n]."""
        n, g = center_3ng.shape[1:]
        if self._others:
            axes_33ng = axes_33ng.copy()
            axes_33ng[..., list(self._others)] = shot.rotation_n33.transpose(2, 1, 0)[..., None]
        scenery, sims = self.scenery, shot.sims
        sun_3n = (shot.rotation_n33 * scenery.sun_N3[sims][..., None]).sum(1).T
        up_3n = shot.rotation_n33[:, 2].T
        turned = [
            (vector[:, None] * axes_33ng).sum(0) for vector in (-center_3ng, sun_3n[..., None], up_3n[..., None])
        ]  # from the camera's coordinates to the geoms'
        alone = np.stack([shot.step_n, scenery.brightness_N[sims]])
        parts = [
            axes_33ng.reshape(9, n, g), *turned, self._size_Ng3[sims - self.twin.sims[0]].transpose(2, 0, 1),
            np.broadcast_to(alone[..., None], (2, n, g)), scenery.rgba_Ng4[sims][:, self.geoms].transpose(2, 0, 1),
        ]  # fmt: skip
        return np.concatenate(parts, dtype=np.float32).transpose(0, 2, 1).reshape(-1, g * n)


@dataclass(frozen=True, slots=True)
class _View:
    """How a camera sees a geom through tiles [m]. In the geom's frame (of a shape that MuJoCo casts: the world's): the
    camera's axes, itself, the directions to the sun and upwards. And: the geom's size, the size of a pixel at unit
    depth, the light's factor, the geom's colour."""

    axes_33m: Array32
    origin: Vector
    sun: Vector
    up: Vector
    size: Vector
    step: Array32
    brightness: Array32
    rgba_4m: Array32

    @staticmethod
    def of(numbers: Array32, seen_m: Ids) -> _View:
        numbers = numbers.take(seen_m, axis=1)
        origin, sun, up, size = ((numbers[k], numbers[k + 1], numbers[k + 2]) for k in (9, 12, 15, 18))
        axes_33m = numbers[:9].reshape(3, 3, -1)
        return _View(axes_33m, origin, sun, up, size, numbers[21], numbers[22], numbers[23:])

    def rays(self, grid: Grid, tile_m: Ids) -> tuple[Vector, Array32]:
        """Through the pixels of the tiles, of unit depth, three of [p, m]; and the squares of their lengths."""
        line = tile_m // len(grid.x_c)
        x_km = grid.x_c.T.take(tile_m - line * len(grid.x_c), axis=1).astype(np.float32) * self.step
        y_km = grid.y_r.T.take(line, axis=1).astype(np.float32) * self.step

        def all_of(across_km: Array32, along_km: Array32) -> Array32:
            return (along_km[:, None] + across_km[None]).reshape(TILE * TILE, -1)

        right, up, back = self.axes_33m
        x, y, z = (all_of(right[k] * x_km, up[k] * y_km - back[k]) for k in range(3))
        return (x, y, z), all_of(x_km * x_km, y_km * y_km + 1)


def _keep_nearest(depth_p: Array32, place_m: Ids, new_m: Array32) -> Ids:
    """Write the least of what is new for each place into ``depth``, where it is less than what is there. Returns which
    of the new ones are there now (of equal ones all, in order)."""
    nearer = np.flatnonzero(new_m < depth_p.take(place_m))
    new, place = new_m.take(nearer), place_m.take(nearer)
    rest = np.arange(len(nearer))
    while len(rest):  # of those that are written to one place the last one stays; then those that are nearer still
        depth_p[place.take(rest)] = new.take(rest)
        rest = rest[new.take(rest) < depth_p.take(place.take(rest))]
    kept: Ids = nearer[new == depth_p.take(place)]
    return kept


@dataclass(frozen=True, slots=True)
class _Backdrop:
    """What one camera sees that stands still, of each simulation: flat pictures, whether they are up to date [n], and
    where the bodies were [n, b, 12]."""

    frame: Frame
    known_n: NDArray[np.bool_]
    pose_nb12: Array


class Painter:
    """Paints pictures of simulations ``sims`` (consecutive) of ``batch``. spec, model: the twin's."""

    def __init__(
        self, batch: Batch, spec: mujoco.MjSpec, model: mujoco.MjModel, sims: Ids, scenery: Scenery, cull: bool
    ) -> None:
        self.sims, self.scenery, self.cull = sims, scenery, cull
        self.ground, self.twin = Ground(model), Twin(batch, model, sims, nthread=1)
        seen = model.geom_group != GROUND
        solid, body = geom_colors(self.twin.batch, np.zeros(1, int))[0, :, 3] == 1, model.geom_bodyid
        held = (model.body_weldid[body] == 0) | (model.body_mocapid[body] >= 0)
        self.still, self.moving, self.translucent = self.stages = tuple(
            _Stage(self.twin, spec, np.flatnonzero(seen & some), scenery, batch.bind("xpos"), batch.bind("xmat"))
            for some in (solid & held, solid & ~held, ~solid)
        )
        self._backdrops: dict[str, _Backdrop] = {}  # by camera

    def sync(self, ids: Ids) -> Array:
        """Take over types, sizes and colours that geoms have in those of simulations ``ids`` that are painted here.
        Returns the colours of all geoms in them, [n, g, 4]."""
        rows = ids[self._mine(ids)] - self.sims[0]
        for backdrop in self._backdrops.values():
            backdrop.known_n[rows] = False
        self.twin.sync(rows)
        for stage in self.stages:
            stage.sync(rows)
        return geom_colors(self.twin.batch, rows)

    def paint(self, lens: Lens, ids: Ids, frame: Frame) -> None:
        """Paint those of simulations ``ids`` that are painted here into their rows of ``frame``."""
        mine = self._mine(ids)
        for start in range(mine.start, mine.stop, BLOCK):
            rows = slice(start, min(start + BLOCK, mine.stop))
            shot = _Shot.of(lens, ids[rows], frame.flat(rows))
            if lens.mounted:
                self._paint_still(lens, shot)
            else:
                self._take_backdrop(lens, shot)
            self.moving.draw(shot, self.cull)
            self.translucent.draw(shot, self.cull, translucent=True)

    def _mine(self, ids: Ids) -> slice:
        first, last = np.searchsorted(ids, [self.sims[0], self.sims[-1] + 1])
        return slice(int(first), int(last))

    def _take_backdrop(self, lens: Lens, shot: _Shot) -> None:
        """Start the pictures with what was painted earlier, as far as it still holds."""
        name, rows = lens.camera.name, shot.sims - self.sims[0]
        if name not in self._backdrops:
            count = len(self.sims)
            kept = Frame.empty(count, lens.camera.height, lens.camera.width).flat(slice(None))
            pose = np.zeros((count, len(self.still.bodies), 12))
            self._backdrops[name] = _Backdrop(kept, np.zeros(count, bool), pose)
        backdrop, pose = self._backdrops[name], self.still.poses(shot.sims)
        stale = ~backdrop.known_n[rows] | (backdrop.pose_nb12[rows] != pose).any((1, 2))
        if stale.any():
            fresh = Frame.empty(int(stale.sum()), lens.camera.height, lens.camera.width).flat(slice(None))
            self._paint_still(lens, _Shot.of(lens, shot.sims[stale], fresh))
            backdrop.frame.put(rows[stale], fresh)
            backdrop.pose_nb12[rows], backdrop.known_n[rows] = pose, True
        backdrop.frame.take(rows, out=shot.frame)

    def _paint_still(self, lens: Lens, shot: _Shot) -> None:
        """Start the pictures with the ground and what stands still on it."""
        ray, length = frame_rays(shot.grid, shot.step_n, shot.rotation_n33)
        scenery, sims = self.scenery, shot.sims
        shot.frame.put(slice(None), Frame(*self.ground.paint(
            ray, length, shot.origin_n3, scenery.rgba_Ng4[sims], scenery.sun_N3[sims], scenery.brightness_N[sims]
        )))  # fmt: skip
        self.still.draw(shot, self.cull)
