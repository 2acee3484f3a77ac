"""Images of simulations by ray casting: colour, depth and segmentation, with no OpenGL, EGL or Vulkan.

Suffixes: n simulations, r rays of one simulation, h and w pixels. World frame, metres; a camera looks along its -z
axis with +x to the right and +y up, as in MJCF.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.core.errors import UserError

Array = NDArray[np.float64]
Array32 = NDArray[np.float32]
Ids = NDArray[np.integer]
Vec3 = tuple[float, float, float]

DEFAULT_RGBA = [0.5, 0.5, 0.5, 1.0]  # MuJoCo's mark of a geom that takes its material's colour
GROUPS = (0, 1, 2)  # groups of geoms that MuJoCo shows by default
EXTENT_M = 8.0  # distance at which the floor has faded into the horizon
CHECKER_M = 0.25  # edge of the floor's tiles
SUN = np.array([0.35, -0.45, 0.85]) / np.linalg.norm([0.35, -0.45, 0.85])  # unit vector towards the light
SKY = np.array([[0.86, 0.89, 0.92], [0.42, 0.55, 0.70]])  # its colours at the horizon and at the zenith, 0 to 1
_SUBPIXELS = ((-0.375, -0.125), (0.125, -0.375), (0.375, 0.125), (-0.125, 0.375))  # rotated grid, in pixels


@dataclass(frozen=True, slots=True)
class Camera:
    """Pose, field of view and size (pixels) of a camera; give either ``pos`` and ``lookat``, or ``mount``.

    UserError for both, neither, or values out of range.
    """

    name: str
    """Key of its images: ``images.<name>``."""
    width: int = 64
    height: int = 64
    fovy_deg: float = 45.0
    """Vertical field of view; the MJCF camera's replaces it if ``mount`` is given."""
    pos: Vec3 | None = None
    """Position, m, world frame."""
    lookat: Vec3 | None = None
    """Point in the middle of the image, m, world frame; +z is up in the image."""
    mount: str | None = None
    """Name of a ``<camera>`` of the MJCF, whose pose (it moves with its body) and field of view are used."""

    def __post_init__(self) -> None:
        placed = self.pos is not None and self.lookat is not None
        if placed == (self.mount is not None) or (self.pos is None) != (self.lookat is None):
            raise UserError(f"camera '{self.name}': give either pos and lookat, or mount (an MJCF camera's name)")
        if placed and self.pos == self.lookat:
            raise UserError(f"camera '{self.name}': pos and lookat are the same point, {self.pos}")
        if self.width < 1 or self.height < 1:
            raise UserError(f"camera '{self.name}': width and height must be positive, got {self.width}x{self.height}")
        if not 0.0 < self.fovy_deg < 180.0:
            raise UserError(f"camera '{self.name}': fovy_deg must be in (0, 180), got {self.fovy_deg}")

    def scaled(self, factor: float) -> "Camera":
        """Return the camera at ``factor`` times its distances from the world's origin; a mounted one as it is."""
        if self.pos is None or self.lookat is None:
            return self
        (x, y, z), (at_x, at_y, at_z) = self.pos, self.lookat
        pos, lookat = (factor * x, factor * y, factor * z), (factor * at_x, factor * at_y, factor * at_z)
        return replace(self, pos=pos, lookat=lookat)


def render(batch: Batch, camera: Camera, fine: bool = False, groups: Sequence[int] = GROUPS) -> dict[str, NDArray[Any]]:
    """Render the n simulations of a batch as they are now; their state is untouched.

    Returns ``rgb`` uint8 [n, h, w, 3], ``depth`` float32 [n, h, w] in metres along the optical axis (inf where no geom
    is hit) and ``segmentation`` int32 [n, h, w], the geom's id (-1 where none). fine: with shadows, and with 4 rays per
    pixel at edges of geoms. groups: of geoms that are visible.
    """
    scene, width, height = _Scene(batch, groups, shadows=fine), camera.width, camera.height
    origin_n3, rotation_n33, fovy_deg = _poses(batch, camera, scene.model)
    step = 2.0 * np.tan(np.deg2rad(fovy_deg) / 2.0) / height  # size of a pixel at unit depth
    x, y = np.meshgrid(np.arange(width) - (width - 1) / 2, (height - 1) / 2 - np.arange(height))
    pixels_r3 = np.stack([x.ravel() * step, y.ravel() * step, np.full(x.size, -1.0)], axis=-1)
    direction = pixels_r3 @ rotation_n33.transpose(0, 2, 1)
    color, dist, geom, normal = scene.trace(origin_n3, direction)
    if fine:
        edge = _subset(_edges(geom, normal, height, width))
        color_e = np.zeros((*edge.shape, 3))
        for dx, dy in _SUBPIXELS:
            rays = pixels_r3[edge] + np.array([dx * step, dy * step, 0.0])
            color_e += scene.trace(origin_n3, rays @ rotation_n33.transpose(0, 2, 1))[0] / len(_SUBPIXELS)
        np.put_along_axis(color, edge[..., None], color_e, axis=1)
    shape = (batch.nsim, height, width)
    return {
        "rgb": (color.clip(0.0, 1.0) * 255.0 + 0.5).astype(np.uint8).reshape(*shape, 3),
        "depth": np.where(geom < 0, np.inf, dist).astype(np.float32).reshape(shape),
        "segmentation": geom.astype(np.int32).reshape(shape),
    }


def _poses(batch: Batch, camera: Camera, model: mujoco.MjModel) -> tuple[Array, Array, float]:
    """Return position [n, 3], camera-to-world rotation [n, 3, 3] and vertical field of view (degrees)."""
    if camera.mount is None:
        assert camera.pos is not None
        assert camera.lookat is not None
        pos = np.array([camera.pos], np.float64)
        rotation = look_at(pos, np.array([camera.lookat]))
        return np.tile(pos, (batch.nsim, 1)), np.tile(rotation, (batch.nsim, 1, 1)), camera.fovy_deg
    cam = mounted_camera(model, camera)
    pos_n3, rotation_n33 = np.empty((batch.nsim, 3)), np.empty((batch.nsim, 3, 3))
    data = mujoco.MjData(model)
    for sim in range(batch.nsim):
        batch.get_data(sim, data)
        model = batch.get_model(sim, model)
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        pos_n3[sim], rotation_n33[sim] = data.cam_xpos[cam], data.cam_xmat[cam].reshape(3, 3)
    return pos_n3, rotation_n33, float(model.cam_fovy[cam])


def look_at(pos_n3: Array, lookat_n3: Array, up: Vec3 = (0.0, 0.0, 1.0)) -> Array:
    """Return the camera-to-world rotation [n, 3, 3] (columns: right, up, back) of cameras at ``pos``.

    ``lookat`` is in the middle of the image and ``up`` upwards; +y is, if the camera looks straight along ``up``.
    """
    back = pos_n3 - lookat_n3
    back /= np.linalg.norm(back, axis=-1, keepdims=True)
    steep = np.abs(back * up).max(axis=-1, keepdims=True) >= 0.999
    right = np.cross(np.where(steep, [0.0, 1.0, 0.0], up), back)
    right /= np.linalg.norm(right, axis=-1, keepdims=True)
    return np.stack([right, np.cross(back, right), back], axis=-1)


def mounted_camera(model: mujoco.MjModel, camera: Camera) -> int:
    """Return the id of the MJCF camera ``camera.mount``; UserError that lists the model's cameras if it is not one."""
    assert camera.mount is not None
    cam: int = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera.mount)
    if cam < 0:
        names = ", ".join(model.camera(i).name for i in range(model.ncam)) or "none"
        raise UserError(f"camera '{camera.name}': the model has no camera '{camera.mount}'. It has: {names}")
    return cam


def field_values(batch: Batch, field: str, sims: Ids) -> NDArray[Any]:
    """Return a field of the model in simulations ``sims``, [n, ...]."""
    shared, expanded = getattr(batch.model, field), batch.expanded(field)
    values: NDArray[Any] = np.broadcast_to(shared, (len(sims), *shared.shape)) if expanded is None else expanded[sims]
    return values


def geom_colors(batch: Batch, sims: Ids) -> Array:
    """Return colour and opacity (0 to 1) of every geom or of its material, [n, ngeom, 4]."""
    model, rgba_ng4 = batch.model, field_values(batch, "geom_rgba", sims).astype(np.float64)
    if model.nmat:
        uses_material = (model.geom_matid >= 0) & (model.geom_rgba == DEFAULT_RGBA)[:, :3].all(1)
        rgba_ng4 = np.where(uses_material[:, None], model.mat_rgba[np.clip(model.geom_matid, 0, None)], rgba_ng4)
    return rgba_ng4


def _subset(mask_nr: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return indices [n, k] of the true entries of each row, padded with false entries to the greatest count k."""
    most = int(mask_nr.sum(1).max())
    return np.argsort(~mask_nr, axis=1, kind="stable")[:, :most]


def _edges(geom_nr: Ids, normal_nr3: Array, height: int, width: int) -> NDArray[np.bool_]:
    """Return the pixels next to another geom, or next to a crease of the same geom, [n, h*w]."""
    geom = geom_nr.reshape(-1, height, width)
    normal = normal_nr3.reshape(-1, height, width, 3)
    edge = np.zeros(geom.shape, bool)
    for axis in (1, 2):
        near, far = (slice(None),) * axis + (slice(None, -1),), (slice(None),) * axis + (slice(1, None),)
        differs = (geom[near] != geom[far]) | ((normal[near] * normal[far]).sum(-1) < 0.85) & (geom[near] >= 0)
        edge[near] |= differs
        edge[far] |= differs
    return edge.reshape(len(geom), -1)


class _Scene:
    """Cast and shade rays in the simulations of a batch."""

    def __init__(self, batch: Batch, groups: Sequence[int], shadows: bool) -> None:
        self.model = model = batch.get_model(0)
        visible = np.isin(np.arange(mujoco.mjNGROUP), groups).astype(np.uint8)
        self.cast = partial(batch.ray, geomgroup=visible, normal=True)  # distance, geom and normal of hits
        sims = np.arange(batch.nsim)
        self.shadows, self.rows = shadows, sims[:, None]
        self.plane_g = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        self.rgba_ng4 = geom_colors(batch, sims)
        specular = model.mat_specular[np.clip(model.geom_matid, 0, None)] if model.nmat else 0.0
        self.specular_g = np.where(self.plane_g, 0.0, np.where(model.geom_matid >= 0, specular, 0.2))

    def trace(self, origin_n3: Array, direction_nr3: Array) -> tuple[Array, Array, Ids, Array]:
        """Return colour [n, r, 3], distance in lengths of the direction [n, r], geom [n, r] and normal [n, r, 3]."""
        dist, geom, normal = self.cast(origin_n3[:, None], direction_nr3)
        color, alpha = self._shade(origin_n3, direction_nr3, dist, geom, normal)
        if (alpha < 1.0).any():  # one layer behind translucent geoms
            k = _subset(alpha < 1.0)
            rays = np.take_along_axis(direction_nr3, k[..., None], axis=1)
            body = self.model.geom_bodyid[np.take_along_axis(geom, k, axis=1)]
            color_b, _ = self._shade(origin_n3, rays, *self.cast(origin_n3[:, None], rays, bodyexclude=body))
            share = np.take_along_axis(alpha, k, axis=1)[..., None]
            color_k = np.take_along_axis(color, k[..., None], axis=1)
            np.put_along_axis(color, k[..., None], share * color_k + (1.0 - share) * color_b, axis=1)
        return color, dist, geom, normal

    def _shade(self, origin_n3: Array, direction: Array, dist: Array, geom: Ids, normal: Array) -> tuple[Array, Array]:
        """Return colour [n, r, 3] and opacity [n, r] at the hits."""
        length = np.linalg.norm(direction, axis=-1, keepdims=True)
        unit, hit, is_plane = direction / length, origin_n3[:, None] + dist[..., None] * direction, self.plane_g[geom]
        rgba = self.rgba_ng4[self.rows, geom]
        tile = np.where(is_plane, 0.92 + 0.08 * (np.floor(hit[..., :2] / CHECKER_M).sum(-1) % 2), 1.0)
        facing = -(normal * unit).sum(-1)
        outward = np.where(facing[..., None] < 0.0, -normal, normal)
        lit = np.where(geom < 0, 0.0, outward @ SUN).clip(0.0)
        if self.shadows and (lit > 0.0).any():
            k = _subset(lit > 0.0)
            start = np.take_along_axis(hit + 1e-4 * outward, k[..., None], axis=1)
            in_light = self.cast(start, np.tile(SUN, (k.shape[1], 1)))[1] < 0
            np.put_along_axis(lit, k, np.take_along_axis(lit, k, axis=1) * in_light, axis=1)
        half = SUN - unit
        half /= np.linalg.norm(half, axis=-1, keepdims=True)
        gloss = self.specular_g[geom] * (outward * half).sum(-1).clip(0.0) ** 32 * (lit > 0.0)
        ambient = 0.34 + 0.14 * outward[..., 2] + 0.14 * np.abs(facing)
        color = rgba[..., :3] * tile[..., None] * (ambient + 0.62 * lit)[..., None] + 0.6 * (gloss * lit)[..., None]
        high = unit[..., 2:].clip(0.0, 1.0) ** 0.7
        sky = (1.0 - high) * SKY[0] + high * SKY[1]
        away = np.where(is_plane, (dist * length[..., 0] / EXTENT_M).clip(0, 1) ** 2, 0)
        away = np.where(geom < 0, 1.0, away)[..., None]
        return (1.0 - away) * color + away * sky, np.where(geom < 0, 1.0, rgba[..., 3])
