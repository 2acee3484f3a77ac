"""Colours in the images of policies' cameras, in single precision: geoms that rays hit, and the ground behind them.

The light is that of ``embodied.envs.rendering.cameras.render`` without gloss and shadows. Only operations that IEEE 754
defines exactly are used, element by element, so a pixel does not depend on the pixels computed with it.

Suffixes: n simulations, h and w pixels, m hits, g geoms; names ending in _3m have x, y and z first.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.envs.rendering.cameras import CHECKER_M, EXTENT_M, HORIZON, ZENITH, Array
from embodied.envs.rendering.culling import Grid
from embodied.envs.rendering.solids import Vector, dot

Array32 = NDArray[np.float32]
# light on a surface: ambient, from above, from the camera, from the sun
AMBIENT, FROM_ABOVE, FACING, SUN = (np.float32(share) for share in (0.34, 0.14, 0.14, 0.62))
SKY_LOW, SKY_HIGH = (255 * color.astype(np.float32) for color in (HORIZON, ZENITH))
TILE_M = np.float32(CHECKER_M)
NOTHING = -1  # segmentation where there is no geom


def shade(normal: Vector, ray: Vector, length: Array32, sun: Vector, up: Vector, brightness: Array32) -> Array32:
    """Return the light that white surfaces reflect to the camera, a factor of their colour.

    normal, ray, sun, up: vectors in one common frame, of shapes that broadcast. ray, from the camera, has ``length``;
    the directions to the sun and upwards are unit vectors.
    """
    facing = -dot(normal, ray) / length
    outward = np.where(facing < 0, np.float32(-1), np.float32(1))
    lit = np.maximum(outward * dot(normal, sun), np.float32(0))
    light = AMBIENT + FROM_ABOVE * (outward * dot(normal, up)) + FACING * np.abs(facing) + SUN * lit
    shaded: Array32 = light * brightness
    return shaded


def frame_rays(grid: Grid, step_n: Array, rotation_n33: Array) -> tuple[list[Array32], Array32]:
    """Return the rays through all pixels in world coordinates (three arrays [n, h*w]) and their lengths [n, h*w].

    step, rotation: see ``Lens.pose``.
    """
    turn = rotation_n33.astype(np.float32)[..., None]
    x_nw = (step_n[:, None] * grid.x_c.ravel()[: grid.width]).astype(np.float32)
    y_nh = (step_n[:, None] * grid.y_r.ravel()[: grid.height]).astype(np.float32)
    across = [turn[:, k, 0] * x_nw for k in range(3)]
    along = [turn[:, k, 1] * y_nh - turn[:, k, 2] for k in range(3)]
    ray = [(a[:, None, :] + b[:, :, None]).reshape(len(a), -1) for a, b in zip(across, along, strict=True)]
    length = np.sqrt((1 + x_nw * x_nw)[:, None, :] + (y_nh * y_nh)[:, :, None])
    return ray, length.reshape(len(length), -1)


def to_uint8(color: Array32) -> NDArray[np.uint8]:
    """Return colours of at least 0 rounded and limited to 255. Overwrites ``color``."""
    np.minimum(color, np.float32(255), out=color)
    color += np.float32(0.5)
    return color.astype(np.uint8)


class Ground:
    """Table top, tiled floor that fades into the horizon, and sky, drawn without testing rays against geoms.

    The planes are the geoms ``table_top`` and ``floor`` of the model, both horizontal.
    """

    def __init__(self, model: mujoco.MjModel) -> None:
        self.table, self.floor = model.geom("table_top").id, model.geom("floor").id
        self.table_pos = model.geom_pos[self.table].astype(np.float32)
        self.table_half = model.geom_size[self.table].astype(np.float32)
        self.floor_z = np.float32(model.geom_pos[self.floor, 2])

    def paint(
        self,
        ray: list[Array32],
        length: Array32,
        origin_n3: Array,
        rgba_ng4: Array32,
        sun_n3: Array32,
        brightness_n: Array32,
    ) -> tuple[NDArray[np.uint8], Array32, NDArray[np.int32]]:
        """Return colour uint8 [n, r, 3], depth (inf: sky) and geom (-1: sky) [n, r] of ``frame_rays`` from ``origin``.

        rgba, sun, brightness: see ``Scenery``.
        """
        origin_n3 = origin_n3.astype(np.float32)
        lit_n = AMBIENT + FROM_ABOVE + SUN * np.maximum(sun_n3[:, 2], np.float32(0))
        down = -ray[2] / length  # cosine of the angle to straight down
        light = (lit_n[:, None] + FACING * down) * brightness_n[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = (self.table_pos[2] - origin_n3[:, 2:]) / ray[2]
            on_table = (ray[2] < 0) & (depth > 0)
            for k in range(2):
                reached = origin_n3[:, k, None] + depth * ray[k]
                on_table &= np.abs(reached - self.table_pos[k]) <= self.table_half[k]
        rgb = np.empty((*length.shape, 3), np.uint8)
        for k in range(3):
            rgb[..., k] = to_uint8(light * rgba_ng4[:, self.table, k, None])
        geom = np.where(on_table, np.int32(self.table), np.int32(NOTHING))
        rest = np.flatnonzero(~on_table)  # rays that reach the floor or the sky
        row_m, (x, y, z) = rest // length.shape[1], (component.ravel()[rest] for component in ray)
        origin_m3, length_m = origin_n3[row_m], length.ravel()[rest]
        sky = SKY_LOW + np.sqrt(np.maximum(z / length_m, np.float32(0)))[:, None] * (SKY_HIGH - SKY_LOW)
        sky *= brightness_n[row_m, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            depth_m = (self.floor_z - origin_m3[:, 2]) / z
            depth_m = np.where((z < 0) & (depth_m > 0), depth_m, np.float32(np.inf))
            columns, lines = (np.floor((origin_m3[:, k] + depth_m * way) / TILE_M) for k, way in ((0, x), (1, y)))
            number = columns + lines
            odd = np.abs(number - 2 * np.floor(number / 2))
        near = 1 - np.minimum(depth_m * length_m / np.float32(EXTENT_M), np.float32(1)) ** 2
        share = np.where(near > 0, near, np.float32(0))[:, None]
        tile = np.where(near > 0, light.ravel()[rest] * (np.float32(0.92) + np.float32(0.08) * odd), np.float32(0))
        rgb.reshape(-1, 3)[rest] = to_uint8(share * tile[:, None] * rgba_ng4[row_m, self.floor, :3] + (1 - share) * sky)
        depth.ravel()[rest] = depth_m
        geom.ravel()[rest] = np.where(depth_m < np.inf, self.floor, NOTHING)
        return rgb, depth, geom
