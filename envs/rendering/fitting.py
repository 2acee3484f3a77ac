"""One or two primitives that look like a mesh: their silhouettes are compared with the mesh's.

    rays from all sides ─► points on the mesh, or in two halves of it ─► of each the best box, ellipsoid, cylinder or
    capsule ─► sizes and centres improved step by step

Suffixes: m rays, p points where they hit the mesh.
"""

from collections.abc import Iterator
from typing import NamedTuple

import mujoco
import numpy as np
from mujoco import mjtGeom
from numpy.typing import NDArray

from embodied.envs.rendering.cameras import Array, Array32, look_at
from embodied.envs.rendering.solids import MISSED, SOLIDS, dot

ENOUGH, GAIN = 0.75, 0.05  # overlap with which one primitive is enough, and what a second one must gain
DIRECTIONS, PIXELS = 9, 20  # silhouettes, and pixels along their edges
STEPS, MOVES = (0.1, 0.04), np.vstack([np.eye(6), -np.eye(6)])  # changes of sizes and centre, shares of the sizes
THINNEST_M = 5e-4  # half size
Mask = NDArray[np.bool_]


class Solid(NamedTuple):
    """A primitive in the frame of a geom."""

    kind: int
    size: Array
    pos: Array
    axes: Array
    """Its axes, as rows."""

    def hit(self, origin_m3: Array32, way_m3: Array32) -> Mask:
        """Return which rays hit it, [m]."""
        half, pos, axes = (x.astype(np.float32) for x in (self.size, self.pos, self.axes))
        size, start, ray = ((x[0], x[1], x[2]) for x in (half, axes @ (origin_m3 - pos).T, axes @ way_m3.T))
        with np.errstate(divide="ignore", invalid="ignore"):
            hit_m: Mask = SOLIDS[self.kind](size, start, ray, dot(ray, ray)).depth != MISSED
        return hit_m


def fit_mesh(model: mujoco.MjModel, geom: int) -> list[Solid]:
    """Return the primitive, or two, that look like the mesh of a geom."""
    data, rays = mujoco.MjData(model), _rays_at(model.geom_aabb[geom])
    data.geom_xpos[geom], data.geom_xmat[geom] = 0, np.eye(3).ravel()
    depth_m = np.array([mujoco.mj_rayMesh(model, data, geom, *ray) for ray in zip(*rays, strict=True)])
    points_p3 = (rays[0] + depth_m[:, None] * rays[1])[depth_m >= 0]
    low, high = points_p3.min(0), points_p3.max(0)
    long = np.argmax(high - low)
    upper_p = points_p3[:, long] > (low + high)[long] / 2
    whole, overlap = _fit([points_p3], rays, depth_m >= 0)
    if overlap > ENOUGH:
        return whole
    halves, more = _fit([points_p3[upper_p], points_p3[~upper_p]], rays, depth_m >= 0)
    return halves if more > overlap + GAIN else whole


def _fit(parts: list[Array], rays: tuple[Array, Array], seen_m: Mask) -> tuple[list[Solid], float]:
    """Return solids for parts of a mesh, and their overlap with what is seen: intersection over union of pixels.

    A part for which every solid would make more pixels wrong than right has none.
    """
    origin_m3, way_m3 = (x.astype(np.float32) for x in rays)
    solids, masks = dict[int, Solid](), np.zeros((len(parts), len(seen_m)), bool)

    def keep_best(k: int, tried: Iterator[Solid]) -> None:
        others_m = np.delete(masks, k, axis=0).any(0)
        for solid in tried:
            mask_m = solid.hit(origin_m3, way_m3)
            if ((mask_m | others_m) != seen_m).sum() < ((masks[k] | others_m) != seen_m).sum():
                solids[k], masks[k] = solid, mask_m

    for k, points_p3 in enumerate(parts):
        keep_best(k, _candidates(points_p3))
    for step, k in ((step, k) for step in STEPS for k in solids):
        keep_best(k, (_moved(solids[k], change) for change in step * MOVES))
    return list(solids.values()), float((masks.any(0) & seen_m).sum() / (masks.any(0) | seen_m).sum())


def _candidates(points_p3: Array) -> Iterator[Solid]:
    """Yield solids of about the size of the points' bounding box."""
    low, high = points_p3.min(0), points_p3.max(0)
    for turn in range(3):  # each edge of the box is the z axis once
        axes, half = np.roll(np.eye(3), turn, axis=0), np.maximum(np.roll(high - low, turn) / 2, THINNEST_M)
        radius, straight = half[:2].mean(), max(half[2] - half[:2].mean(), THINNEST_M)
        for kind, size in (
            (mjtGeom.mjGEOM_BOX, half),
            (mjtGeom.mjGEOM_ELLIPSOID, half),
            (mjtGeom.mjGEOM_CYLINDER, np.array([radius, half[2], 0])),
            (mjtGeom.mjGEOM_CAPSULE, np.array([radius, straight, 0])),
        )[2 * (turn > 0) :]:
            yield Solid(kind, size, (low + high) / 2, axes)


def _moved(solid: Solid, change_6: Array) -> Solid:
    """Return a solid whose sizes and centre have changed by shares of its sizes, along its axes."""
    size, way = np.maximum(solid.size * (1 + change_6[:3]), THINNEST_M), change_6[3:] * solid.size.max()
    return solid._replace(size=size, pos=solid.pos + way @ solid.axes)


def _rays_at(box_6: Array) -> tuple[Array, Array]:
    """Return starts and directions [m, 3] of rays at a box (centre and half size) from ``DIRECTIONS`` all around."""
    turn, up = np.arange(DIRECTIONS) * np.pi * (3 - np.sqrt(5)), 1 - (2 * np.arange(DIRECTIONS) + 1) / DIRECTIONS
    flat, radius = np.sqrt(1 - up * up), np.linalg.norm(box_6[3:])
    place = ((np.arange(PIXELS) + 0.5) / PIXELS * 2 - 1) * radius
    x, y = (axis.reshape(-1, 1) for axis in np.meshgrid(place, place))
    camera = look_at(np.stack([flat * np.cos(turn), flat * np.sin(turn), up], -1), np.zeros((1, 3)))[:, None]
    origin = box_6[:3] + x * camera[..., 0] + y * camera[..., 1] + 2 * radius * camera[..., 2]
    return origin.reshape(-1, 3), -np.repeat(camera[:, 0, :, 2], PIXELS**2, 0)
