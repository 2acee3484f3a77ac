"""Layers of an image: sets of geoms that are drawn together over the layers before.

    poses of bodies ─► geoms in camera coordinates ─► tiles that may show a geom ─► ray hits ─► shading ─► nearest wins

Suffixes: n simulations, g geoms, b bodies, c columns and r rows of tiles, p pixels of a tile, m (geom, image, tile)
triples to be drawn.
"""

from typing import NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.envs.rendering.appearance import Lens, Scenery, Twin
from embodied.envs.rendering.cameras import Array, Array32, Camera, Ids, field_values
from embodied.envs.rendering.solids import MISSED, SOLIDS, TILE, Grid, Hit, Vector, bounds, dot, touched

# light on a surface: ambient, from above, from the camera, from the sun
AMBIENT, FROM_ABOVE, FACING, FROM_SUN = (np.float32(share) for share in (0.34, 0.14, 0.14, 0.62))


class Frame(NamedTuple):
    """Images of n simulations while they are drawn, with one axis for all pixels."""

    rgb: NDArray[np.uint8]
    """Colour, [n, h*w, 3]."""
    depth: NDArray[np.float32]
    """Distance along the optical axis of the nearest surface drawn so far, [n, h*w], m."""
    geom: NDArray[np.int32] | None
    """Id of the geom at that surface, [n, h*w]; None where ids are not needed, which saves time."""

    @staticmethod
    def empty(count: int, camera: Camera, geoms: bool = True) -> "Frame":
        """Return uninitialised images of ``count`` simulations."""
        shape = (count, camera.height * camera.width)
        geom = np.empty(shape, np.int32) if geoms else None
        return Frame(np.empty((*shape, 3), np.uint8), np.empty(shape, np.float32), geom)

    def view(self, rows: slice) -> "Frame":
        return Frame(self.rgb[rows], self.depth[rows], None if self.geom is None else self.geom[rows])

    def put(self, rows: Ids | slice, other: "Frame") -> None:
        """Replace some rows by those of ``other``."""
        for ours, theirs in zip(self, other, strict=True):
            if ours is not None and theirs is not None:
                ours[rows] = theirs


class RenderTarget(NamedTuple):
    """Images of n simulations that one camera renders together, and the camera's poses (``Lens.pose``)."""

    sims: Ids
    grid: Grid
    origin_n3: Array
    """Positions of the camera, m, world frame."""
    rotation_n33: Array
    """Camera-to-world rotations."""
    step_n: Array
    """Size of a pixel at unit depth."""
    frame: Frame

    @staticmethod
    def of(lens: Lens, sims: Ids, frame: Frame) -> "RenderTarget":
        """Return the target for the present poses of ``lens``."""
        return RenderTarget(sims, Grid.of(lens.camera.width, lens.camera.height), *lens.pose(sims), frame)


class Layer:
    """Draw a set of the twin's geoms, once ``copy_geoms`` was called for all twins.

    spec: of the twin's model. geoms: ids in that model. xpos, xmat: poses of the bodies, bound to the source batch.
    """

    def __init__(self, twin: Twin, spec: mujoco.MjSpec, geoms: Ids, scenery: Scenery, xpos: Array, xmat: Array) -> None:
        model, shape = twin.batch.model, (len(twin.sims), len(geoms))
        self.twin, self.geoms, self.scenery, self.xpos, self.xmat = twin, geoms, scenery, xpos, xmat
        self.bodies, self._body_g = np.unique(model.geom_bodyid[geoms], return_inverse=True)
        rotation_g9 = np.empty((len(geoms), 9))
        for row, geom in zip(rotation_g9, geoms, strict=True):
            mujoco.mju_quat2Mat(row, model.geom_quat[geom])
        self._rotation_g33 = rotation_g9.reshape(-1, 3, 3)
        self._kind_Ng, self._size_Ng3 = np.empty(shape, np.int32), np.empty((*shape, 3), np.float32)
        self._pos_Ng31 = np.empty((*shape, 3, 1))  # in the body's frame
        self._bounds = np.empty_like(self._size_Ng3), np.empty_like(self._size_Ng3)
        others = [g for g, geom in enumerate(geoms) if model.geom_type[geom] not in SOLIDS]  # such as meshes
        self._ray_cast = {g: _twin_of_one(twin, spec, int(geoms[g])) for g in others}

    def copy_geoms(self, rows: Ids) -> None:
        """Copy the types, sizes and positions of geoms from twins ``rows``."""
        fields = ("geom_type", "geom_size", "geom_rbound", "geom_pos")
        kind, size, rbound, pos = (field_values(self.twin.batch, name, rows)[:, self.geoms] for name in fields)
        self._kind_Ng[rows], self._size_Ng3[rows], self._pos_Ng31[rows] = kind, size, pos[..., None]
        for ours, new in zip(self._bounds, bounds(kind, self._size_Ng3[rows], rbound), strict=True):
            ours[rows] = new
        for twin in self._ray_cast.values():
            twin.copy_geoms(rows)

    def poses(self, sims: Ids) -> Array:
        """Return position and rotation matrix of every body, [n, b, 12]."""
        at = np.ix_(sims, self.bodies)
        return np.concatenate([self.xpos[at], self.xmat[at].reshape(len(sims), -1, 9)], axis=-1)

    def draw(self, target: RenderTarget, translucent: bool = False) -> None:
        """Draw all geoms over the images of ``target``. translucent: blend with the image behind."""
        if not len(self.geoms):
            return
        rows, grid, n = target.sims - self.twin.sims[0], target.grid, len(target.sims)
        center_3ng, axes_33ng = self._to_camera(target)
        bounds_ng = [bound[rows] for bound in self._bounds]
        column_cng, line_rng = touched(bounds_ng, center_3ng, axes_33ng, target.step_n, grid)
        place = np.flatnonzero(line_rng.T[..., None] & column_cng.T[:, :, None])
        pair_m = place // len(grid.pixel_tp)  # index of the (geom, image) pair
        tile_m = place - pair_m * len(grid.pixel_tp)
        kind_m = self._kind_Ng[rows].T.ravel().take(pair_m)
        packed = self._pack_inputs(target, center_3ng, axes_33ng)
        for kind in np.unique(kind_m):
            chosen = np.flatnonzero(kind_m == kind)
            pair, tile = pair_m.take(chosen), tile_m.take(chosen)
            geom = pair // n
            self._draw_kind(target, kind, packed.take(pair, axis=1), geom, pair - geom * n, tile, translucent)

    def _to_camera(self, target: RenderTarget) -> tuple[Array32, Array32]:
        """Return the geoms' centres [3, n, g] and component i of their axis k [i, k, n, g] in camera coordinates."""
        at, rows = np.ix_(target.sims, self.bodies), target.sims - self.twin.sims[0]
        to_camera_n133 = target.rotation_n33.transpose(0, 2, 1)[:, None]
        body_nb33 = to_camera_n133 @ self.xmat[at].reshape(len(target.sims), -1, 3, 3)
        body_nb31 = to_camera_n133 @ (self.xpos[at] - target.origin_n3[:, None])[..., None]
        turn_ng33 = body_nb33[:, self._body_g]
        center_ng3 = (body_nb31[:, self._body_g] + turn_ng33 @ self._pos_Ng31[rows])[..., 0]
        axes_ng33 = turn_ng33 @ self._rotation_g33
        return (
            np.ascontiguousarray(center_ng3.transpose(2, 0, 1), np.float32),
            np.ascontiguousarray(axes_ng33.transpose(2, 3, 0, 1), np.float32),
        )

    def _pack_inputs(self, target: RenderTarget, center_3ng: Array32, axes_33ng: Array32) -> Array32:
        """Return 27 numbers (see ``_draw_kind``) of every (geom, image) pair in the geom's frame, [27, g * n]."""
        n, g = center_3ng.shape[1:]
        if self._ray_cast:
            axes_33ng = axes_33ng.copy()  # MuJoCo casts rays in the world's frame
            axes_33ng[..., list(self._ray_cast)] = target.rotation_n33.transpose(2, 1, 0)[..., None]
        scenery, sims = self.scenery, target.sims
        sun_3n = (target.rotation_n33 * scenery.sun_N3[sims][..., None]).sum(1).T
        up_3n = target.rotation_n33[:, 2].T
        turned = [
            (vector[:, None] * axes_33ng).sum(0) for vector in (-center_3ng, sun_3n[..., None], up_3n[..., None])
        ]  # from camera coordinates to each geom's frame
        per_image = np.stack([target.step_n, scenery.brightness_N[sims]])
        parts = [
            axes_33ng.reshape(9, n, g), *turned, self._size_Ng3[sims - self.twin.sims[0]].transpose(2, 0, 1),
            np.broadcast_to(per_image[..., None], (2, n, g)), scenery.rgba_Ng4[sims][:, self.geoms].transpose(2, 0, 1),
        ]  # fmt: skip
        return np.concatenate(parts, dtype=np.float32).transpose(0, 2, 1).reshape(-1, g * n)

    def _draw_kind(
        self, target: RenderTarget, kind: int, packed: Array32, geom_m: Ids, row_m: Ids, tile_m: Ids, translucent: bool
    ) -> None:
        """Draw geoms of one type where they are nearer than the surface drawn so far.

        packed: inputs of each triple, [27, m]. geom, row, tile: index into ``geoms``, image and tile of each, [m].
        """
        camera_axes = packed[:9].reshape(3, 3, -1)  # right, up, back
        origin, sun, up, size = ((packed[k], packed[k + 1], packed[k + 2]) for k in (9, 12, 15, 18))
        step, brightness, rgba = packed[21], packed[22], packed[23:]
        ray, square = _tile_rays(target.grid, tile_m, camera_axes, step)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if kind in SOLIDS:
                hit = SOLIDS[kind](size, origin, ray, square)
            else:
                hit = self._cast_rays(target, geom_m, row_m, ray)
            light = shade(hit.normal, ray, np.sqrt(square), sun, up, brightness)
        frame, depth = target.frame, hit.depth.ravel()
        all_places = (target.grid.pixel_tp.T.take(tile_m, axis=1) + row_m * frame.depth.shape[1]).ravel()
        nearer = _keep_nearest(frame.depth.reshape(-1), all_places, depth)
        place, rgb = all_places.take(nearer), frame.rgb.reshape(-1, 3)
        if frame.geom is not None:
            frame.geom.reshape(-1)[place] = np.broadcast_to(self.geoms[geom_m], light.shape).ravel().take(nearer)
        for k in range(3):
            color = light * rgba[k]
            if translucent:
                behind = rgb[:, k].take(all_places).reshape(color.shape)
                color = rgba[3] * np.minimum(color, np.float32(255)) + (1 - rgba[3]) * behind
            rgb[place, k] = to_uint8(color).ravel().take(nearer)

    def _cast_rays(self, target: RenderTarget, geom_m: Ids, row_m: Ids, ray: Vector) -> Hit:
        """Return hits of geoms that ``SOLIDS`` lacks, by MuJoCo; ``ray`` is in world coordinates."""
        depth_pm, normal_3pm = np.empty(ray[0].shape, np.float32), np.empty((3, *ray[0].shape), np.float32)
        for g in np.unique(geom_m):
            chosen, twin = np.flatnonzero(geom_m == g), self._ray_cast[g]
            twin.copy_positions()
            present, first, count = np.unique(row_m[chosen], return_index=True, return_counts=True)
            place = np.repeat(np.arange(len(present)), count), np.arange(len(chosen)) - np.repeat(first, count)
            ray_nkp3 = np.ones((len(present), count.max(), len(ray[0]), 3))  # entries without a tile are padding
            ray_nkp3[place] = np.stack([way[:, chosen] for way in ray], -1).transpose(1, 0, 2)
            origin, ids = target.origin_n3[present][:, None], target.sims[present] - twin.sims[0]
            dist, _, normal = twin.batch.ray(origin, ray_nkp3.reshape(len(present), -1, 3), ids=ids, normal=True)
            depth_pm[:, chosen] = dist.reshape(ray_nkp3.shape[:3])[place].T
            normal_3pm[:, :, chosen] = normal.reshape(ray_nkp3.shape)[place].T
        x, y, z = normal_3pm
        return Hit(np.where(depth_pm < 0, MISSED, depth_pm), (x, y, z))


def _twin_of_one(twin: Twin, spec: mujoco.MjSpec, geom: int) -> Twin:
    """Return a twin that has only this geom, at which MuJoCo casts rays. spec: of the twin's model."""
    spec = spec.copy()
    for place, one in enumerate([one for body in spec.bodies for one in body.geoms]):
        if place != geom:
            spec.delete(one)
    return Twin(twin.source, spec.compile(), twin.sims, nthread=1)


def shade(normal: Vector, ray: Vector, length: Array32, sun: Vector, up: Vector, brightness: Array32) -> Array32:
    """Return the light that white surfaces reflect to the camera, a factor of their colour.

    Vectors are in one common frame, of shapes that broadcast. ray, from the camera, has ``length``; sun and up are unit
    vectors. Only operations that IEEE 754 defines exactly are used, so a pixel does not depend on other pixels.
    """
    facing = -dot(normal, ray) / length
    outward = np.where(facing < 0, np.float32(-1), np.float32(1))
    lit = np.maximum(outward * dot(normal, sun), np.float32(0))
    light = AMBIENT + FROM_ABOVE * (outward * dot(normal, up)) + FACING * np.abs(facing) + FROM_SUN * lit
    shaded: Array32 = light * brightness
    return shaded


def to_uint8(color: Array32) -> NDArray[np.uint8]:
    """Return colours of at least 0 rounded and limited to 255. Overwrites ``color``."""
    np.minimum(color, np.float32(255), out=color)
    color += np.float32(0.5)
    return color.astype(np.uint8)


def _tile_rays(grid: Grid, tile_m: Ids, camera_axes_33m: Array32, step_m: Array32) -> tuple[Vector, Array32]:
    """Return rays of unit depth through the tiles' pixels, three of [p, m], and their squared lengths [p, m]."""
    line = tile_m // len(grid.x_c)
    x_km = grid.x_c.T.take(tile_m - line * len(grid.x_c), axis=1).astype(np.float32) * step_m
    y_km = grid.y_r.T.take(line, axis=1).astype(np.float32) * step_m

    def sum_over_pixels(across_km: Array32, along_km: Array32) -> Array32:
        return (along_km[:, None] + across_km[None]).reshape(TILE * TILE, -1)

    right, up, back = camera_axes_33m
    x, y, z = (sum_over_pixels(right[k] * x_km, up[k] * y_km - back[k]) for k in range(3))
    return (x, y, z), sum_over_pixels(x_km * x_km, y_km * y_km + 1)


def _keep_nearest(depth_p: Array32, place_m: Ids, new_m: Array32) -> Ids:
    """Lower ``depth`` at each place to the least new value; return the indices of all new values equal to it."""
    nearer = np.flatnonzero(new_m < depth_p.take(place_m))
    new, place = new_m.take(nearer), place_m.take(nearer)
    rest = np.arange(len(nearer))
    while len(rest):  # several writes to one place keep the last one: repeat with the values that are still nearer
        depth_p[place.take(rest)] = new.take(rest)
        rest = rest[new.take(rest) < depth_p.take(place.take(rest))]
    kept: Ids = nearer[new == depth_p.take(place)]
    return kept
