"""Which rays of a picture can hit anything: a picture is cut into square tiles, and only tiles that the outline of a
geom may touch are cast. Outlines are never too small, so pictures are the same as if every ray were cast.

A tile is missed for certain by a geom that lies wholly to one side of one of the four planes through the camera and
the tile's edges. How far a convex geom reaches in a direction is its support function, so this needs no projection and
holds for what is beside or behind the camera too.

Suffixes: n simulations, g geoms, t tiles (c columns, r rows of them), p pixels of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from mujoco import mjtGeom
from numpy.typing import NDArray

Array = NDArray[np.float64]
Array32 = NDArray[np.float32]
Ids = NDArray[np.integer]
TILE, MARGIN = 4, 0.05  # pixels; the margin is for rounding


@dataclass(frozen=True, slots=True)
class Grid:
    """Tiles of a picture. pixel_tp: their pixels' places in the picture (the last column and row stand in for what is
    beyond the edge). x_c, y_r: where pixels' centres are, right and up of the optical axis, in pixels, [c or r, TILE].
    span_x, span_y: the least and the greatest of them with some margin, [2, c or r]."""

    width: int
    height: int
    pixel_tp: Ids
    x_c: Array
    y_r: Array
    span_x: Array
    span_y: Array

    @staticmethod
    @lru_cache(maxsize=32)
    def of(width: int, height: int) -> Grid:
        columns, rows = -(-width // TILE), -(-height // TILE)
        x = np.arange(columns * TILE).clip(max=width - 1).reshape(columns, TILE)
        y = np.arange(rows * TILE).clip(max=height - 1).reshape(rows, TILE)
        x_c, y_r = x - (width - 1) / 2, (height - 1) / 2 - y
        spans = [np.stack([at.min(1) - MARGIN, at.max(1) + MARGIN]) for at in (x_c, y_r)]
        pixel_tp = (y[:, None, :, None] * width + x[:, None]).reshape(-1, TILE * TILE)
        return Grid(width, height, pixel_tp, x_c, y_r, *spans)


class Outlines:
    """Bounds of geoms in some simulations: a box along the geom's axes with half sizes h, to every point of which a
    sphere of radius r is added, or (disc) a disc of that radius across the z axis. kind, size, rbound: types, sizes and
    bounding radii of the geoms, [n, g], [n, g, 3] and [n, g]."""

    def __init__(self, kind_ng: Ids, size_ng3: Array32, rbound_ng: Array) -> None:
        self._half_ng3, self._radius_ng, self._disc_ng = _bounds(kind_ng, size_ng3, rbound_ng)

    def resize(self, rows: Ids, kind_ng: Ids, size_ng3: Array32, rbound_ng: Array) -> None:
        """Take others in simulations ``rows``."""
        self._half_ng3[rows], self._radius_ng[rows], self._disc_ng[rows] = _bounds(kind_ng, size_ng3, rbound_ng)

    def touched(
        self, rows: Ids, center_3ng: Array32, axes_33ng: Array32, step_n: Array, grid: Grid
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which columns and lines of tiles may show each geom of simulations ``rows``, bool [c, n, g] and [r, n, g].

        center, axes: where the geoms are, and component i of their axis k, [i, k, n, g], in the camera's coordinates.
        step: see ``Lens.pose``.
        """
        n, g = center_3ng.shape[1:]
        # one axis for all pairs of simulation and geom, the last one, makes the following fast
        center, axes = center_3ng.reshape(3, -1), axes_33ng.reshape(3, 3, -1)
        half, radius, disc = (
            self._half_ng3[rows].reshape(-1, 3).T.copy(),
            self._radius_ng[rows].ravel(),
            self._disc_ng[rows].ravel(),
        )
        touched = []
        for axis, span in ((0, grid.span_x), (1, grid.span_y)):
            slope = np.repeat((span.reshape(-1, 1) * step_n).astype(np.float32), g, axis=1)
            lean = [axes[axis, k] + slope * axes[2, k] for k in range(3)]
            reach = radius * np.sqrt(np.maximum(1 + slope * slope - disc * (lean[2] * lean[2]), np.float32(0)))
            for k in range(3):
                reach += half[k] * np.abs(lean[k])
            middle = center[axis] + slope * center[2]
            size = span.shape[1]
            inside = (middle[:size] + reach[:size] >= 0) & (middle[size:] - reach[size:] <= 0)
            touched.append(inside.reshape(size, n, g))
        ahead = radius - center[2] + (np.abs(axes[2]) * half).sum(0) > 0
        return touched[0] & ahead.reshape(n, g), touched[1]


def _bounds(type_ng: Ids, size_ng3: Array32, rbound_ng: Array) -> tuple[Array32, Array32, Array32]:
    """Half sizes [..., g, 3], radius and whether it is of a disc [..., g]; see ``Outlines``."""
    first, second, third, none = *np.moveaxis(size_ng3, -1, 0), np.zeros_like(rbound_ng)
    sphere, ellipsoid = type_ng == mjtGeom.mjGEOM_SPHERE, type_ng == mjtGeom.mjGEOM_ELLIPSOID
    capsule, cylinder = type_ng == mjtGeom.mjGEOM_CAPSULE, type_ng == mjtGeom.mjGEOM_CYLINDER
    box = type_ng == mjtGeom.mjGEOM_BOX
    half_z = np.select([capsule | cylinder, box], [second, third], none)
    half = np.stack([np.where(box, first, none), np.where(box, second, none), half_z], axis=-1)
    unbounded = np.where(rbound_ng > 0, rbound_ng, np.inf)  # planes and height fields
    radius = np.select([sphere | capsule | cylinder, ellipsoid, box], [first, size_ng3.max(-1), none], unbounded)
    return half.astype(np.float32), radius.astype(np.float32), cylinder.astype(np.float32)
