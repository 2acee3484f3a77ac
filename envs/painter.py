"""One thread's share of taking pictures: the ground, and then layer after layer of geoms, nearest in front.

Suffixes: n simulations, p pixels, t and k tiles, r rays of one simulation, m hits of all, g geoms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from envs.appearance import Twin
from envs.camera_randomization import Lens, Scenery
from envs.cameras import Array, Ids, geom_colors
from envs.culling import TILE, Grid, Outlines
from envs.shading import Ground, frame_rays, shade, to_uint8

OBJECTS, ROBOT, GROUND = 0, (1, 2, 3, 4), 5  # groups of the twin's geoms, see assets/franka/coarse.xml
BLOCK, CHUNK = 64, 16  # simulations that are painted, and whose rays are cast, together
_SHAPE = ("geom_type", "geom_size", "geom_rbound")


@dataclass(frozen=True, slots=True)
class Frame:
    """Pictures as they grow: rgb uint8 [n, h, w, 3], depth float32 [n, h, w], geom int32 [n, h, w]."""

    rgb: NDArray[np.uint8]
    depth: NDArray[np.float32]
    geom: NDArray[np.int32]

    @staticmethod
    def empty(count: int, height: int, width: int) -> Frame:
        shape = (count, height, width)
        return Frame(np.empty((*shape, 3), np.uint8), np.empty(shape, np.float32), np.empty(shape, np.int32))

    def flat(self, rows: slice) -> Frame:
        """A view of some rows, with one axis for all pixels."""
        rgb, depth, geom = self.rgb[rows], self.depth[rows], self.geom[rows]
        return Frame(rgb.reshape(len(rgb), -1, 3), depth.reshape(len(rgb), -1), geom.reshape(len(rgb), -1))


@dataclass(frozen=True, slots=True)
class _Shot:
    """Pictures of simulations ``sims`` [n] to be taken; from where: see ``Lens.pose``.

    The rays of a tile are the sum of those of its column, across [n * columns, 1, TILE * 3], and those of its line,
    along [n * lines, TILE, TILE * 3].
    """

    sims: Ids
    grid: Grid
    origin_n3: Array
    rotation_n33: Array
    step_n: Array
    across: Array
    along: Array
    frame: Frame

    @staticmethod
    def of(lens: Lens, sims: Ids, frame: Frame) -> _Shot:
        grid, (origin_n3, rotation_n33, step_n) = Grid.of(lens.camera.width, lens.camera.height), lens.pose(sims)
        right, up, back = (rotation_n33[:, None, None, :, k] for k in range(3))
        across = (step_n[:, None, None] * grid.x_c)[..., None] * right
        along = (step_n[:, None, None] * grid.y_r)[..., None] * up - back
        return _Shot(
            sims, grid, origin_n3, rotation_n33, step_n, across.reshape(-1, 1, TILE * 3),
            np.tile(along, TILE).reshape(-1, TILE, TILE * 3), frame,
        )  # fmt: skip

    def rays(self, rows: Ids, tile_nk: Ids) -> Array:
        """Directions [n, r, 3] of the rays of pictures ``rows`` [n] through the pixels of their tiles."""
        columns, lines = len(self.grid.x_c), len(self.grid.y_r)
        line = tile_nk // columns
        across = self.across.take(rows[:, None] * columns + tile_nk - line * columns, axis=0)
        along = self.along.take(rows[:, None] * lines + line, axis=0)
        return (across + along).reshape(len(rows), -1, 3)

    def places(self, rows: Ids, tile_nk: Ids, chosen_m: Ids) -> Ids:
        """Where in the flat pictures some of these rays belong, numbered as in [n * r]; [m]."""
        size, tile = TILE * TILE, chosen_m // (TILE * TILE)
        within = self.grid.pixel_tp.ravel().take(tile_nk.ravel().take(tile) * size + (chosen_m - tile * size))
        first_nk = np.repeat(rows * self.frame.depth.shape[1], tile_nk.shape[1])
        return within + first_nk.take(tile)


@dataclass(frozen=True, slots=True)
class _Hits:
    """Rays that met something nearer than what was there: where in the flat pictures, in which simulation, which geom,
    its normal and the ray, float32 [3, m]."""

    place_m: Ids
    sim_m: Ids
    geom_m: Ids
    normal_3m: NDArray[np.float32]
    ray_3m: NDArray[np.float32]

    @staticmethod
    def together(parts: Sequence[_Hits]) -> _Hits:
        return _Hits(*(np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in _Hits.__slots__))


class _Layer:
    """Geoms that are cast together, in a model of their own: others would cost time even if rays ignored them."""

    def __init__(self, batch: Batch, spec: mujoco.MjSpec, geoms: Ids, sims: Ids) -> None:
        self.geoms = geoms
        spec = spec.copy()
        everything = [geom for body in spec.bodies for geom in body.geoms]
        for place in np.setdiff1d(np.arange(len(everything)), geoms):
            spec.delete(everything[place])
        self.twin = Twin(batch, spec.compile(), sims, nthread=1)

    def shapes(self, rows: Ids) -> list[NDArray[Any]] | None:
        """Types, sizes and bounding radii of the geoms in twins ``rows``; None where they are the model's."""
        expanded = [self.twin.batch.expanded(name) for name in _SHAPE]
        if all(values is None for values in expanded):
            return None
        shared = [getattr(self.twin.batch.model, name) for name in _SHAPE]
        return [
            np.broadcast_to(nominal, (len(rows), *nominal.shape)) if values is None else values[rows]
            for nominal, values in zip(shared, expanded, strict=True)
        ]

    def cast(self, shot: _Shot, mask_nt: NDArray[np.bool_]) -> Iterator[_Hits]:
        """Cast rays through the tiles in ``mask``; what is hit is in the pictures' depth and geom afterwards."""
        frame = shot.frame
        for rows, tile_nk in _packed(mask_nt):
            ray, sims = shot.rays(rows, tile_nk), shot.sims[rows]
            dist, geom, normal = self.twin.batch.ray(
                shot.origin_n3[rows][:, None], ray, ids=sims - self.twin.sims[0], normal=True
            )
            hit = np.flatnonzero(geom >= 0)
            place, depth = shot.places(rows, tile_nk, hit), dist.ravel().take(hit).astype(np.float32)
            nearer = np.flatnonzero(depth < frame.depth.ravel().take(place))
            hit, place = hit.take(nearer), place.take(nearer)
            geom_m = self.geoms.take(geom.ravel().take(hit))
            frame.depth.ravel()[place], frame.geom.ravel()[place] = depth.take(nearer), geom_m
            normal_3m, ray_3m = _columns(normal.reshape(-1, 3), hit), _columns(ray.reshape(-1, 3), hit)
            yield _Hits(place, sims.take(hit // ray.shape[1]), geom_m, normal_3m, ray_3m)


class Painter:
    """Paints pictures of simulations ``sims`` (consecutive) of ``batch``. spec, model: the twin's, with all layers."""

    def __init__(
        self, batch: Batch, spec: mujoco.MjSpec, model: mujoco.MjModel, sims: Ids, scenery: Scenery, cull: bool
    ) -> None:
        self.sims, self.scenery, self.cull = sims, scenery, cull
        self.xpos, self.xmat = batch.bind("xpos"), batch.bind("xmat")
        self.ground = Ground(model)
        self.rgba_g4 = geom_colors(Batch(model, 1, 1), np.zeros(1, int))[0]
        solid, group = self.rgba_g4[:, 3] == 1, model.geom_group
        layers = [np.flatnonzero(solid & (group == number)) for number in (OBJECTS, *ROBOT)]
        layers = [geoms for geoms in (*layers, np.flatnonzero(~solid)) if len(geoms)]  # what is seen through is last
        self.layers = [_Layer(batch, spec, geoms, sims) for geoms in layers]
        self.num_solid = len(layers) - (not solid.all())
        self.outlines = Outlines(model, layers, len(sims))
        self._backdrops: dict[str, tuple[Frame, NDArray[np.bool_]]] = {}  # by camera, and which of them are up to date

    def sync(self, ids: Ids) -> Array:
        """Take over types, sizes and colours that geoms have in those of simulations ``ids`` that are painted here.
        Returns the colours of all geoms in them, [n, g, 4]."""
        rows = ids[self._mine(ids)] - self.sims[0]
        for _, known in self._backdrops.values():
            known[rows[rows < len(known)]] = False
        rgba_ng4 = np.tile(self.rgba_g4, (len(rows), 1, 1))
        for number, layer in enumerate(self.layers):
            layer.twin.sync(rows)
            rgba_ng4[:, layer.geoms] = geom_colors(layer.twin.batch, rows)
            shapes = layer.shapes(rows)
            if shapes is not None:
                self.outlines.resize(number, rows, *shapes)
        return rgba_ng4

    def paint(self, lens: Lens, ids: Ids, frame: Frame) -> None:
        """Paint those of simulations ``ids`` that are painted here into their rows of ``frame``."""
        for layer in self.layers:
            layer.twin.follow()
        mine = self._mine(ids)
        for start in range(mine.start, mine.stop, BLOCK):
            rows = slice(start, min(start + BLOCK, mine.stop))
            shot = _Shot.of(lens, ids[rows], frame.flat(rows))
            self._paint_ground(lens, shot)
            casts = [layer.cast(shot, mask_nt) for layer, mask_nt in zip(self.layers, self._tiles(shot), strict=True)]
            self._shade(shot, [hits for cast in casts[: self.num_solid] for hits in cast], translucent=False)
            self._shade(shot, [hits for cast in casts[self.num_solid :] for hits in cast], translucent=True)

    def _mine(self, ids: Ids) -> slice:
        first, last = np.searchsorted(ids, [self.sims[0], self.sims[-1] + 1])
        return slice(int(first), int(last))

    def _paint_ground(self, lens: Lens, shot: _Shot) -> None:
        """Start the pictures with what is behind everything. Unless the camera is mounted it stays as it is during an
        episode, and where none of it is randomised one picture will do for all."""
        frame = self._background(lens, shot.sims) if lens.mounted else self._backdrop(lens, shot)
        shot.frame.rgb[:], shot.frame.depth[:], shot.frame.geom[:] = frame.rgb, frame.depth, frame.geom

    def _backdrop(self, lens: Lens, shot: _Shot) -> Frame:
        """What ``_background`` gave for these simulations, or for one of them that stands for all, when it was new."""
        name, varies = lens.camera.name, lens.randomization.moves_cameras or lens.randomization.changes_ground
        rows = shot.sims - self.sims[0] if varies else np.zeros(1, np.int64)
        if name not in self._backdrops:
            count = len(self.sims) if varies else 1
            kept = Frame.empty(count, lens.camera.height, lens.camera.width).flat(slice(None))
            self._backdrops[name] = kept, np.zeros(count, bool)
        kept, known = self._backdrops[name]
        unknown = rows[~known[rows]]
        if len(unknown):
            new = self._background(lens, unknown + self.sims[0])
            kept.rgb[unknown], kept.depth[unknown], kept.geom[unknown] = new.rgb, new.depth, new.geom
            known[unknown] = True
        return Frame(kept.rgb[rows], kept.depth[rows], kept.geom[rows])

    def _background(self, lens: Lens, sims: Ids) -> Frame:
        """Flat pictures with nothing but the ground."""
        origin_n3, rotation_n33, step_n = lens.pose(sims)
        ray, length = frame_rays(Grid.of(lens.camera.width, lens.camera.height), step_n, rotation_n33)
        scenery = self.scenery
        return Frame(*self.ground.paint(
            ray, length, origin_n3, scenery.rgba_Ng4[sims], scenery.sun_N3[sims], scenery.brightness_N[sims]
        ))  # fmt: skip

    def _tiles(self, shot: _Shot) -> list[NDArray[np.bool_]]:
        """Which tiles may show each layer, [n, t]."""
        if not self.cull:
            return [np.ones((len(shot.sims), len(shot.grid.pixel_tp)), bool)] * len(self.layers)
        chosen = np.ix_(shot.sims, self.outlines.bodies)
        return self.outlines.tiles(
            shot.sims - self.sims[0], self.xpos[chosen], self.xmat[chosen], shot.origin_n3, shot.rotation_n33,
            shot.step_n, shot.grid,
        )  # fmt: skip

    def _shade(self, shot: _Shot, parts: list[_Hits], translucent: bool) -> None:
        """Give the pixels of hits their colours; where several hit the same, the last of them."""
        if not parts:
            return
        hits, scenery = _Hits.together(parts), self.scenery
        place, sim = hits.place_m, hits.sim_m
        light_m = shade(hits.normal_3m, hits.ray_3m, _columns(scenery.sun_N3, sim), scenery.brightness_N.take(sim))
        rgba_4m = _columns(scenery.rgba_Ng4.reshape(-1, 4), sim * scenery.rgba_Ng4.shape[1] + hits.geom_m)
        for k in range(3):
            channel, color = shot.frame.rgb.reshape(-1, 3)[:, k], light_m * rgba_4m[k]
            if translucent:
                color = rgba_4m[3] * np.minimum(color, np.float32(255)) + (1 - rgba_4m[3]) * channel[place]
            channel[place] = to_uint8(color)


def _columns(values: NDArray[np.floating], rows: Ids) -> NDArray[np.float32]:
    """Some rows of a matrix, as columns."""
    return np.ascontiguousarray(values.take(rows, axis=0).T, np.float32)


def _packed(mask_nt: NDArray[np.bool_]) -> Iterator[tuple[Ids, Ids]]:
    """Rows [n] in chunks, and the true entries of each row of the chunk, [n, k]. Rows of a chunk have about as many of
    them; shorter ones are filled up with their first."""
    count_n = mask_nt.sum(1)
    order = np.argsort(count_n, kind="stable")
    order = order[count_n[order] > 0]
    for start in range(0, len(order), CHUNK):
        rows = np.sort(order[start : start + CHUNK])
        place = np.flatnonzero(mask_nt[rows])
        row = place // mask_nt.shape[1]
        tile = place - row * mask_nt.shape[1]
        first = np.cumsum(count_n[rows]) - count_n[rows]
        tile_nk = np.repeat(tile[first][:, None], count_n[rows].max(), axis=1)
        tile_nk[row, np.arange(len(row)) - first[row]] = tile
        yield rows, tile_nk
