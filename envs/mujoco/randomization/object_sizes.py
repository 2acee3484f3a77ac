"""Objects whose size differs between simulations of one model by a factor."""

from __future__ import annotations

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.envs.mujoco.groups import free_bodies

# by field: power of the factor; geoms' frames, bounds and bounding volumes grow with the size
_POWERS = {"geom_size": 1, "geom_pos": 1, "geom_rbound": 1, "geom_aabb": 1, "bvh_aabb": 1, "body_ipos": 1,
           "body_inertia": 2}  # fmt: skip
SIZE_FIELDS = tuple(_POWERS)
"""Fields of the model that depend on the size of an object."""


class ObjectSizes:
    """A ``Target``: factors of the sizes of all free bodies. Masses stay, so inertia grows with the square.

    Tasks may give objects other shapes when an episode begins (shape_variants.py). So ``restore`` comes
    before the task's reset, and ``apply`` after it.
    """

    pushes = False

    def __init__(self, batch: Batch) -> None:
        self.batch, model = batch, batch.model
        bodies = np.array(free_bodies(model), dtype=np.int64)
        self.size = len(bodies)
        self.factor_NB = np.ones((batch.nsim, self.size))
        geoms = np.flatnonzero(np.isin(model.geom_bodyid, bodies))
        volumes = [model.body_bvhadr[b] + np.arange(model.body_bvhnum[b]) for b in bodies]
        body_of = {
            "geom": (geoms, np.searchsorted(bodies, model.geom_bodyid[geoms])),
            "body": (bodies, np.arange(self.size)),
            "bvh": (
                np.concatenate([*volumes, np.zeros(0, int)]),
                np.repeat(np.arange(self.size), [len(rows) for rows in volumes]),
            ),
        }
        self._fields = {
            name: (batch.expand(name), *body_of[name.split("_")[0]], power)
            for name, power in _POWERS.items()
            if np.any(getattr(model, name)[body_of[name.split("_")[0]][0]])
        }
        names = [mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_BODY, body) for body in bodies]
        factor = torch.from_numpy(self.factor_NB)
        self.by_name: dict[str, Tensor] = {name: factor[:, i] for i, name in enumerate(names)}
        """Factor of each object in every simulation, [N], live, by the name of its body."""

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> bool:
        self.factor_NB[ids] = value_nE
        return False

    def restore(self, ids: np.ndarray) -> None:
        """Give the objects of simulations ``ids`` [n] the model's own sizes."""
        model = self.batch.model
        for name, (live, rows, _, _) in self._fields.items():
            nominal = getattr(model, name)[rows]
            if name == "body_inertia":
                mass = self.batch.expanded("body_mass")
                ratio = 1.0 if mass is None else (mass[ids[:, None], rows] / model.body_mass[rows])[..., None]
                live[ids[:, None], rows] = nominal * ratio
            else:
                live[ids[:, None], rows] = nominal

    def apply(self, ids: np.ndarray) -> None:
        """Scale the objects of simulations ``ids`` [n] from the model's own sizes."""
        for live, rows, body_of_row, power in self._fields.values():
            factor = self.factor_NB[ids[:, None], body_of_row] ** power
            live[ids[:, None], rows] *= factor.reshape(*factor.shape, *[1] * (live.ndim - 2))
        if self._fields:
            self.batch.set_const(ids)
