"""Ray casting by MuJoCo, for shapes that ``embodied.envs.rendering.solids`` lacks, such as meshes."""

from __future__ import annotations

import mujoco
import numpy as np

from embodied.envs.rendering.appearance import Twin
from embodied.envs.rendering.cameras import Array, Ids
from embodied.envs.rendering.solids import MISSED, Hit, Vector


class RayCastGeom:
    """One geom of a twin, alone in a twin of its own that MuJoCo casts rays at.

    twin: the twin that the geom belongs to. spec: of its model. geom: id in its model.
    """

    def __init__(self, twin: Twin, spec: mujoco.MjSpec, geom: int) -> None:
        spec = spec.copy()
        all_geoms = [one for body in spec.bodies for one in body.geoms]
        for place, one in enumerate(all_geoms):
            if place != geom:
                spec.delete(one)
        self.twin = Twin(twin.source, spec.compile(), twin.sims, nthread=1)

    def intersect(self, origin_n3: Array, sims_n: Ids, row_m: Ids, ray: Vector) -> Hit:
        """Return where rays hit the geom in simulations ``sims[row]`` (sorted).

        origin: where the rays of each simulation start. ray: three of [p, m]. Both are in world coordinates.
        """
        self.twin.copy_positions()
        present, first, count = np.unique(row_m, return_index=True, return_counts=True)
        sim = np.repeat(np.arange(len(present)), count)
        place = sim, np.arange(len(row_m)) - np.repeat(first, count)
        ray_nkp3 = np.ones((len(present), count.max(), len(ray[0]), 3))  # entries without a tile are padding
        ray_nkp3[place] = np.stack(ray, -1).transpose(1, 0, 2)
        dist, _, normal = self.twin.batch.ray(
            origin_n3[present][:, None], ray_nkp3.reshape(len(present), -1, 3), ids=sims_n[present] - self.twin.sims[0],
            normal=True,
        )  # fmt: skip
        depth_pm = dist.reshape(ray_nkp3.shape[:3])[place].T
        x, y, z = normal.reshape(ray_nkp3.shape)[place].T.astype(np.float32)
        return Hit(np.where(depth_pm < 0, MISSED, depth_pm).astype(np.float32), (x, y, z))
