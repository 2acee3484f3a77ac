"""Culling: an image is cut into square tiles, and a geom is drawn only in tiles that its outline may touch.

A geom cannot touch a tile if it lies wholly to one side of one of the four planes through the camera and the tile's
edges. The support function of a convex geom gives its extent in a direction. So the test holds for geoms beside or
behind the camera too. Suffixes: n simulations, g geoms, t tiles (c columns, r rows of them), p pixels of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from mujoco import mjtGeom
from numpy.typing import NDArray

from embodied.envs.rendering.cameras import Array, Array32, Ids

TILE, MARGIN = 4, 0.05  # pixels; the margin is for rounding


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


def bounds(kind_ng: Ids, size_ng3: Array32, rbound_ng: Array) -> tuple[Array32, Array32, Array32]:
    """Return bounds of geoms: each is the sum of a box along the geom's axes and a sphere, or a disc across z.

    Half sizes of the boxes [n, g, 3], radii [n, g], and 1 where they are of discs, else 0 [n, g]. kind, size, rbound:
    types, sizes and bounding radii of the geoms, as in the model.
    """
    first, second, third, none = *np.moveaxis(size_ng3, -1, 0), np.zeros_like(rbound_ng)
    sphere, ellipsoid = kind_ng == mjtGeom.mjGEOM_SPHERE, kind_ng == mjtGeom.mjGEOM_ELLIPSOID
    capsule, cylinder = kind_ng == mjtGeom.mjGEOM_CAPSULE, kind_ng == mjtGeom.mjGEOM_CYLINDER
    box = kind_ng == mjtGeom.mjGEOM_BOX
    half_z = np.select([capsule | cylinder, box], [second, third], none)
    half = np.stack([np.where(box, first, none), np.where(box, second, none), half_z], axis=-1)
    unbounded = np.where(rbound_ng > 0, rbound_ng, np.inf)  # planes and height fields
    radius = np.select([sphere | capsule | cylinder, ellipsoid, box], [first, size_ng3.max(-1), none], unbounded)
    return half.astype(np.float32), radius.astype(np.float32), cylinder.astype(np.float32)


def touched(
    bounds_ng: Sequence[Array32], center_3ng: Array32, axes_33ng: Array32, step_n: Array, grid: Grid
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which columns and rows of tiles may show each geom with these ``bounds``, [c, n, g] and [r, n, g].

    center, axes (component i of axis k, [i, k, n, g]): in camera coordinates. step: size of a pixel at unit depth.
    """
    n, g = center_3ng.shape[1:]
    # all pairs of simulation and geom are one axis, the last one: that is fast
    center, axes = center_3ng.reshape(3, -1), axes_33ng.reshape(3, 3, -1)
    half, radius, disc = bounds_ng[0].reshape(-1, 3).T.copy(), bounds_ng[1].ravel(), bounds_ng[2].ravel()
    inside = []
    for axis, place in enumerate((grid.x_c, grid.y_r)):
        span = np.concatenate([place.min(1) - MARGIN, place.max(1) + MARGIN])[:, None]  # of each column or row
        slope = np.repeat((span * step_n).astype(np.float32), g, axis=1)
        lean = [axes[axis, k] + slope * axes[2, k] for k in range(3)]
        reach = radius * np.sqrt(np.maximum(1 + slope * slope - disc * (lean[2] * lean[2]), np.float32(0)))
        for k in range(3):
            reach += half[k] * np.abs(lean[k])
        middle, size = center[axis] + slope * center[2], len(place)
        within = (middle[:size] + reach[:size] >= 0) & (middle[size:] - reach[size:] <= 0)
        inside.append(within.reshape(size, n, g))
    ahead = radius - center[2] + (np.abs(axes[2]) * half).sum(0) > 0
    return inside[0] & ahead.reshape(n, g), inside[1]
