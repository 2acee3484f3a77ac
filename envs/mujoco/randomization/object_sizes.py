"""Objects whose size differs between simulations of one model by a factor."""

import numpy as np
import torch
from mujoco.batch import Batch

from embodied.envs.mujoco.groups import free_bodies
from embodied.envs.mujoco.randomization.terms import Target

# by field: power of the factor; geoms' frames, bounds and bounding volumes grow with the size
_POWERS = {"geom_size": 1, "geom_pos": 1, "geom_rbound": 1, "geom_aabb": 1, "bvh_aabb": 1, "body_ipos": 1,
           "body_inertia": 2}  # fmt: skip
SIZE_FIELDS = tuple(_POWERS)
"""Fields of the model that depend on the size of an object."""


class ObjectSizes(Target):
    """Factors of the sizes of all free bodies. Masses stay, so inertia grows with the square.

    Tasks may give objects other shapes when an episode begins (shape_variants.py). So ``restore`` comes
    before the task's reset, and ``apply`` after it.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, model = batch, batch.model
        bodies = np.array(free_bodies(model), dtype=np.int64)
        self.size = len(bodies)
        self.factor_NB = np.ones((batch.nsim, self.size))
        geoms = np.flatnonzero(np.isin(model.geom_bodyid, bodies))
        volumes = [model.body_bvhadr[b] + np.arange(model.body_bvhnum[b]) for b in bodies]
        body_of_volume = np.repeat(np.arange(self.size), [len(rows) for rows in volumes])
        rows_of = {
            "geom": (geoms, np.searchsorted(bodies, model.geom_bodyid[geoms])),
            "body": (bodies, np.arange(self.size)),
            "bvh": (np.concatenate([*volumes, np.zeros(0, int)]), body_of_volume),
        }
        self._fields = {}
        for name, power in _POWERS.items():
            rows, body_of_row = rows_of[name.split("_")[0]]
            if np.any(getattr(model, name)[rows]):
                self._fields[name] = batch.expand(name), rows, body_of_row, power
        factor = torch.from_numpy(self.factor_NB)
        self.by_name = {model.body(int(body)).name: factor[:, i] for i, body in enumerate(bodies)}
        """Factor of each object in every simulation, [N], live, by the name of its body."""

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> None:
        self.factor_NB[ids] = value_nE

    def restore(self, ids: np.ndarray) -> None:
        """Give the objects of simulations ``ids`` [n] the model's own sizes."""
        model = self.batch.model
        for name, (live, rows, _, _) in self._fields.items():
            live[ids[:, None], rows] = getattr(model, name)[rows]
            mass = self.batch.expanded("body_mass")
            if name == "body_inertia" and mass is not None:
                live[ids[:, None], rows] *= (mass[ids[:, None], rows] / model.body_mass[rows])[..., None]

    def apply(self, ids: np.ndarray) -> None:
        """Scale the objects of simulations ``ids`` [n] from the model's own sizes."""
        for live, rows, body_of_row, power in self._fields.values():
            factor = self.factor_NB[ids[:, None], body_of_row] ** power
            live[ids[:, None], rows] *= factor.reshape(*factor.shape, *[1] * (live.ndim - 2))
        if self._fields:
            self.batch.set_const(ids)
