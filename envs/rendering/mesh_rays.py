"""Geoms of other shapes than ``envs.rendering.solids`` has, such as meshes: MuJoCo casts rays at them."""

from __future__ import annotations

import mujoco
import numpy as np

from envs.rendering.appearance import Twin
from envs.rendering.cameras import Array, Ids
from envs.rendering.solids import MISSED, Meeting, Vector


class OtherShape:
    """Geom ``geom`` of the model of ``twin``, alone in a twin of its own, whose spec is ``spec`` without the others."""

    def __init__(self, twin: Twin, spec: mujoco.MjSpec, geom: int) -> None:
        spec = spec.copy()
        everything = [one for body in spec.bodies for one in body.geoms]
        for place, one in enumerate(everything):
            if place != geom:
                spec.delete(one)
        self.twin = Twin(twin.source, spec.compile(), twin.sims, nthread=1)

    def meet(self, origin_n3: Array, sims_n: Ids, row_m: Ids, ray: Vector) -> Meeting:
        """Where rays from ``origin``, in world coordinates, three of [p, m], meet it in simulations sims[row] (sorted);
        see ``Meeting``."""
        self.twin.follow()
        present, first, count = np.unique(row_m, return_index=True, return_counts=True)
        sim = np.repeat(np.arange(len(present)), count)
        place = sim, np.arange(len(row_m)) - np.repeat(first, count)
        ray_nkp3 = np.ones((len(present), count.max(), len(ray[0]), 3))  # the last of some are not asked for
        ray_nkp3[place] = np.stack(ray, -1).transpose(1, 0, 2)
        dist, _, normal = self.twin.batch.ray(
            origin_n3[present][:, None], ray_nkp3.reshape(len(present), -1, 3), ids=sims_n[present] - self.twin.sims[0],
            normal=True,
        )  # fmt: skip
        depth_pm = dist.reshape(ray_nkp3.shape[:3])[place].T
        x, y, z = normal.reshape(ray_nkp3.shape)[place].T.astype(np.float32)
        return Meeting(np.where(depth_pm < 0, MISSED, depth_pm).astype(np.float32), (x, y, z))
