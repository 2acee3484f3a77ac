"""Solids in images, many at once and in single precision: the tiles that a geom may touch, and the hits of rays.

An image is cut into square tiles. A geom cannot touch a tile if it lies wholly to one side of one of the four planes
through the camera and the tile's edges; support functions of convex geoms give its extent in a direction. For rays that
come near a geom ``SOLIDS`` take a fifth of the time of ``Batch.ray``. Only operations that IEEE 754 defines exactly are
used, element by element, so a hit does not depend on the other rays.

Suffixes: n simulations, g geoms, t tiles (c columns, r rows of them), m triples of these, p pixels of a tile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from mujoco import mjtGeom
from numpy.typing import NDArray

from embodied.envs.rendering.cameras import Array, Array32, Ids

TILE, MARGIN = 4, 0.05  # pixels; the margin is for rounding
Vector = tuple[Array32, Array32, Array32]  # components, of shapes that broadcast
MISSED = np.float32(np.inf)  # depth of a ray that hits nothing
ENDLESS_M = 1e6
_TINY = np.float32(1e-20)


@dataclass(frozen=True, slots=True)
class Grid:
    """Tiles of an image of ``width`` x ``height`` pixels."""

    width: int
    height: int
    pixel_tp: Ids
    """Index of each pixel in the flat image; pixels beyond the edge repeat the last column or row."""
    x_c: Array
    """Centres of the pixels of each column of tiles, right of the optical axis, pixels, [c, TILE]."""
    y_r: Array
    """Centres of the pixels of each row of tiles, above the optical axis, pixels, [r, TILE]."""

    @staticmethod
    @lru_cache(maxsize=32)
    def of(width: int, height: int) -> "Grid":
        """Return the tiles of an image of so many pixels."""
        columns, rows = -(-width // TILE), -(-height // TILE)
        x = np.arange(columns * TILE).clip(max=width - 1).reshape(columns, TILE)
        y = np.arange(rows * TILE).clip(max=height - 1).reshape(rows, TILE)
        pixel_tp = (y[:, None, :, None] * width + x[:, None]).reshape(-1, TILE * TILE)
        return Grid(width, height, pixel_tp, x - (width - 1) / 2, (height - 1) / 2 - y)


def bounds(kind_ng: Ids, size_ng3: Array32, rbound_ng: Array) -> tuple[Array32, Array32]:
    """Return bounds of geoms: each is the sum of a box and an ellipsoid along the geom's axes.

    Half sizes of the boxes, and half axes of the ellipsoids, [n, g, 3]. kind, size, rbound: types, sizes and bounding
    radii of the geoms, as in the model.
    """
    first, second, third, none = *np.moveaxis(size_ng3, -1, 0), np.zeros_like(rbound_ng)
    ellipsoid, cylinder = kind_ng == mjtGeom.mjGEOM_ELLIPSOID, kind_ng == mjtGeom.mjGEOM_CYLINDER
    box, long = kind_ng == mjtGeom.mjGEOM_BOX, cylinder | (kind_ng == mjtGeom.mjGEOM_CAPSULE)
    half = np.where(box, first, none), np.where(box, second, none), np.select([long, box], [second, third], none)
    unbounded = np.where(rbound_ng > 0, rbound_ng, ENDLESS_M)  # planes and height fields
    ball = np.select([long | (kind_ng == mjtGeom.mjGEOM_SPHERE), box], [first, none], unbounded)
    radii = [np.where(ellipsoid, size, ball) for size in (first, second, third)]
    radii[2] = np.where(cylinder, none, radii[2])  # a disc
    return np.stack(half, -1).astype(np.float32), np.stack(radii, -1).astype(np.float32)


def touched(
    bounds_ng: Sequence[Array32], center_3ng: Array32, axes_33ng: Array32, step_n: Array, grid: Grid
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which columns and rows of tiles may show each geom with these ``bounds``, [c, n, g] and [r, n, g].

    center, axes (component i of axis k, [i, k, n, g]): in camera coordinates. step: size of a pixel at unit depth.
    """
    n, g = center_3ng.shape[1:]
    # all pairs of simulation and geom are one axis, the last one: that is fast
    center, axes = center_3ng.reshape(3, -1), axes_33ng.reshape(3, 3, -1)
    half, radii = (bound.reshape(-1, 3).T.copy() for bound in bounds_ng)
    inside = []
    for axis, place in enumerate((grid.x_c, grid.y_r)):
        span = np.concatenate([place.min(1) - MARGIN, place.max(1) + MARGIN])[:, None]  # of each column or row
        slope = np.repeat((span * step_n).astype(np.float32), g, axis=1)
        lean = [axes[axis, k] + slope * axes[2, k] for k in range(3)]
        reach = np.sqrt(sum((radii[k] * lean[k]) ** 2 for k in range(3)))
        for k in range(3):
            reach += half[k] * np.abs(lean[k])
        middle, size = center[axis] + slope * center[2], len(place)
        within = (middle[:size] + reach[:size] >= 0) & (middle[size:] - reach[size:] <= 0)
        inside.append(within.reshape(size, n, g))
    ahead = radii.max(0) - center[2] + (np.abs(axes[2]) * half).sum(0) > 0
    return inside[0] & ahead.reshape(n, g), inside[1]


class Hit(NamedTuple):
    """Nearest intersection of each ray with a solid; a ray that begins inside a solid does not hit it.

    The functions below take the size of the geom as in the model, start and direction of the rays in its frame (three
    arrays each), and squared lengths of the rays.
    """

    depth: Array32
    """Distance in lengths of the ray, [p, m]; ``MISSED`` if there is no intersection."""
    normal: Vector
    """Outward unit normal there, three of [p, m]; undefined if there is no intersection."""


def dot(a: Vector, b: Vector) -> Array32:
    product: Array32 = a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
    return product


def _along(origin: Vector, ray: Vector, depth: Array32) -> Vector:
    """Return the points at ``depth`` on the rays."""
    return (origin[0] + depth * ray[0], origin[1] + depth * ray[1], origin[2] + depth * ray[2])


def _if_ahead(depth: Array32, hit: NDArray[np.bool_]) -> Array32:
    """Return ``depth`` for rays that hit a point ahead of them, ``MISSED`` for others."""
    return np.where(hit & (depth > 0), depth, MISSED)


def sphere(size: Vector, origin: Vector, ray: Vector, square: Array32) -> Hit:
    """Return the hits of spheres; size[0]: radius."""
    radius = size[0]
    # from the ray's point nearest to the centre back to the surface: no difference of two large squares
    middle = -dot(origin, ray) / square
    nearest = _along(origin, ray, middle)
    inside = radius * radius - dot(nearest, nearest)
    back = np.sqrt(np.maximum(inside, np.float32(0)) / square)
    x, y, z = _along(nearest, ray, -back)
    return Hit(_if_ahead(middle - back, inside >= 0), (x / radius, y / radius, z / radius))


def ellipsoid(size: Vector, origin: Vector, ray: Vector, square: Array32) -> Hit:
    """Return the hits of ellipsoids, which are unit spheres in stretched space; size: half axes."""
    ones = np.ones_like(size[0])
    start = (origin[0] / size[0], origin[1] / size[1], origin[2] / size[2])
    way = (ray[0] / size[0], ray[1] / size[1], ray[2] / size[2])
    depth, (x, y, z) = sphere((ones, ones, ones), start, way, dot(way, way))
    normal = (x / size[0], y / size[1], z / size[2])
    length: Array32 = np.sqrt(dot(normal, normal))
    return Hit(depth, (normal[0] / length, normal[1] / length, normal[2] / length))


def _cylinder_side(radius: Array32, origin: Vector, ray: Vector) -> tuple[NDArray[np.bool_], Array32, Vector]:
    """Return which rays enter the infinite cylinder along z, at which depth, and at which point."""
    square: Array32 = np.maximum(ray[0] * ray[0] + ray[1] * ray[1], _TINY)
    along: Array32 = -(origin[0] * ray[0] + origin[1] * ray[1])
    middle: Array32 = along / square
    x: Array32 = origin[0] + middle * ray[0]
    y: Array32 = origin[1] + middle * ray[1]
    inside = radius * radius - (x * x + y * y)
    back: Array32 = np.sqrt(np.maximum(inside, np.float32(0)) / square)
    depth: Array32 = middle - back
    return inside >= 0, depth, (x - back * ray[0], y - back * ray[1], origin[2] + depth * ray[2])


def capsule(size: Vector, origin: Vector, ray: Vector, square: Array32) -> Hit:
    """Return the hits of capsules; size: radius and half length of the straight part, along z.

    A ray that enters the infinite cylinder beyond one end can hit only the ball at that end.
    """
    radius, half = size[0], size[1]
    enters, depth, (x, y, z) = _cylinder_side(radius, origin, ray)
    beyond = np.abs(z) > half
    end = np.copysign(half, z)
    ball = sphere(size, (origin[0], origin[1], origin[2] - end), ray, square)
    nearest = np.where(beyond, ball.depth, _if_ahead(depth, enters))
    side = (x / radius, y / radius, np.zeros_like(x))
    nx, ny, nz = (np.where(beyond, b, s) for b, s in zip(ball.normal, side, strict=True))
    return Hit(np.where(enters, nearest, MISSED), (nx, ny, nz))


def cylinder(size: Vector, origin: Vector, ray: Vector, square: Array32) -> Hit:
    """Return the hits of cylinders, computed as for capsules with discs for balls; size: radius and half length."""
    radius, half = size[0], size[1]
    enters, depth, (x, y, z) = _cylinder_side(radius, origin, ray)
    beyond = np.abs(z) > half
    disc = (np.copysign(half, z) - origin[2]) / ray[2]
    dx, dy = origin[0] + disc * ray[0], origin[1] + disc * ray[1]
    on_disc = dx * dx + dy * dy <= radius * radius
    hit = enters & (on_disc | ~beyond)
    zero = np.float32(0)
    normal = (
        np.where(beyond, zero, x / radius), np.where(beyond, zero, y / radius),
        np.where(beyond, np.copysign(np.float32(1), z), zero),
    )  # fmt: skip
    return Hit(_if_ahead(np.where(beyond, disc, depth), hit), normal)


def box(size: Vector, origin: Vector, ray: Vector, square: Array32) -> Hit:
    """Return the hits of boxes; size: half edges.

    The box is the intersection of three slabs: a ray is inside after it has entered all three and before it leaves any.
    """
    entries, exits = [], []
    for half, start, way in zip(size, origin, ray, strict=True):
        inverse = np.float32(1) / way
        low, high = (-half - start) * inverse, (half - start) * inverse
        entries.append(np.minimum(low, high))
        exits.append(np.maximum(low, high))
    entry = np.maximum(np.maximum(entries[0], entries[1]), entries[2])
    leave = np.minimum(np.minimum(exits[0], exits[1]), exits[2])
    x, y, z = ((one == entry) * -np.sign(way) for one, way in zip(entries, ray, strict=True))
    return Hit(_if_ahead(entry, entry <= leave), (x, y, z))


SOLIDS: dict[int, Callable[[Vector, Vector, Vector, Array32], Hit]] = {
    int(mjtGeom.mjGEOM_SPHERE): sphere,
    int(mjtGeom.mjGEOM_CAPSULE): capsule,
    int(mjtGeom.mjGEOM_ELLIPSOID): ellipsoid,
    int(mjtGeom.mjGEOM_CYLINDER): cylinder,
    int(mjtGeom.mjGEOM_BOX): box,
}  # by type of geom
