"""Buffers for the images of policies' cameras.

Suffixes: n simulations, h and w pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied.envs.rendering.camera_randomization import Lens
from embodied.envs.rendering.cameras import Array, Ids
from embodied.envs.rendering.culling import Grid


@dataclass(frozen=True, slots=True)
class Frame:
    """Images of n simulations while they are drawn; ``flat`` gives h and w as one axis."""

    rgb: NDArray[np.uint8]
    """Colour, [n, h, w, 3]."""
    depth: NDArray[np.float32]
    """Distance along the optical axis of the nearest surface drawn so far, [n, h, w], m."""
    geom: NDArray[np.int32] | None
    """Id of the geom at that surface, [n, h, w]; None where ids are not needed, which saves time."""

    @staticmethod
    def empty(count: int, height: int, width: int, geoms: bool = True) -> Frame:
        """Return uninitialised images of ``count`` simulations."""
        shape = (count, height, width)
        geom = np.empty(shape, np.int32) if geoms else None
        return Frame(np.empty((*shape, 3), np.uint8), np.empty(shape, np.float32), geom)

    def flat(self, rows: slice) -> Frame:
        """Return a view of some rows, with one axis for all pixels."""
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
        for source, copy in ((self.rgb, out.rgb), (self.depth, out.depth), (self.geom, out.geom)):
            if source is not None and copy is not None:
                source.take(rows, axis=0, out=copy, mode="clip")  # clip needs no buffer


@dataclass(frozen=True, slots=True)
class RenderTarget:
    """Flat images of n simulations that one camera renders together, and the camera's poses (``Lens.pose``)."""

    sims: Ids
    """Simulations, [n]."""
    grid: Grid
    """Tiles of an image."""
    origin_n3: Array
    """Positions of the camera, m, world frame."""
    rotation_n33: Array
    """Camera-to-world rotations."""
    step_n: Array
    """Size of a pixel at unit depth."""
    frame: Frame
    """Flat images that are drawn into."""

    @staticmethod
    def of(lens: Lens, sims: Ids, frame: Frame) -> RenderTarget:
        """Return the target for the present poses of ``lens``."""
        return RenderTarget(sims, Grid.of(lens.camera.width, lens.camera.height), *lens.pose(sims), frame)
