"""Which rays of a picture can hit anything: a picture is cut into square tiles, and only tiles that the outline of a
geom may touch are cast. Outlines are never too small, so pictures are the same as if every ray were cast.

A tile is missed for certain by a geom that lies wholly to one side of one of the four planes through the camera and
the tile's edges. How far a convex geom reaches in a direction is its support function, so this needs no projection and
holds for what is beside or behind the camera too.

Suffixes: n simulations, g geoms, t tiles (c columns, r rows of them), p pixels of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mujoco
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
    """Bounds of the geoms of some layers in ``num_sims`` simulations: a box along the geom's axes with half sizes h, to
    every point of which a sphere of radius r is added, or (disc) a disc of that radius across the z axis."""

    def __init__(self, model: mujoco.MjModel, layers: Sequence[Ids], num_sims: int) -> None:
        geoms = np.concatenate(layers)
        ends = np.cumsum([len(layer) for layer in layers])
        self._layers = [slice(end - len(layer), end) for end, layer in zip(ends, layers, strict=True)]
        self.bodies, self._body_g = np.unique(model.geom_bodyid[geoms], return_inverse=True)
        self._pos_g3 = model.geom_pos[geoms].astype(np.float32)
        rotation = np.empty((len(geoms), 9))
        for row, geom in zip(rotation, geoms, strict=True):
            mujoco.mju_quat2Mat(row, model.geom_quat[geom])
        self._rotation_g33 = rotation.reshape(-1, 3, 3).astype(np.float32)
        bounds = _bounds(model.geom_type[geoms], model.geom_size[geoms], model.geom_rbound[geoms])
        self._half_ng3, self._radius_ng, self._disc_ng = (np.stack([bound] * num_sims) for bound in bounds)

    def resize(self, layer: int, rows: Ids, type_ng: Ids, size_ng3: Array, rbound_ng: Array) -> None:
        """Take other types, sizes and bounding radii of the geoms of a layer in simulations ``rows`` [n]."""
        at = rows, self._layers[layer]
        self._half_ng3[at], self._radius_ng[at], self._disc_ng[at] = _bounds(type_ng, size_ng3, rbound_ng)

    def tiles(
        self,
        rows: Ids,
        xpos_nb3: Array,
        xmat_nb9: Array,
        origin_n3: Array,
        rotation_n33: Array,
        step_n: Array,
        grid: Grid,
    ) -> list[NDArray[np.bool_]]:
        """Which tiles may show each layer, bool [n, t].

        rows: the simulations. xpos, xmat: poses of ``self.bodies``. origin, rotation, step: see ``Lens.pose``.
        """
        to_camera, n, g = rotation_n33.transpose(0, 2, 1)[:, None], len(rows), len(self._body_g)
        body_nb33 = (to_camera @ xmat_nb9.reshape(n, -1, 3, 3)).astype(np.float32)
        body_nb31 = (to_camera @ (xpos_nb3 - origin_n3[:, None])[..., None]).astype(np.float32)
        turn = body_nb33[:, self._body_g]
        # one axis for all pairs of simulation and geom, the last one, makes the following fast
        center = (body_nb31[:, self._body_g] + turn @ self._pos_g3[..., None]).reshape(-1, 3).T.copy()
        axes = (turn @ self._rotation_g33).reshape(-1, 9).T.copy().reshape(3, 3, -1)
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
        columns = (touched[0] & ahead.reshape(n, g)).transpose(1, 2, 0).astype(np.float32)
        lines = touched[1].transpose(1, 0, 2).astype(np.float32)
        return [(lines[..., some] @ columns[:, some] > 0).reshape(n, -1) for some in self._layers]


def _bounds(type_ng: Ids, size_ng3: Array, rbound_ng: Array) -> tuple[Array32, Array32, Array32]:
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
