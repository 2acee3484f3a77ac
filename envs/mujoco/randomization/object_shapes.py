"""Objects whose size or shape differs between simulations of one model."""

from collections.abc import Sequence

import mujoco
import numpy as np
import torch
from mujoco.batch import MODEL_FIELDS, Batch
from torch import Tensor

from embodied.envs.mujoco.config import Shape
from embodied.envs.mujoco.randomization.randomizer import Target, free_bodies
from embodied.envs.mujoco.scene import add_object
from embodied.envs.rendering.solids import SOLIDS

# by field: power of the factor; geoms' frames, bounds and bounding volumes grow with the size
_POWERS = {"geom_size": 1, "geom_pos": 1, "geom_rbound": 1, "geom_aabb": 1, "bvh_aabb": 1, "body_ipos": 1,
           "body_inertia": 2}  # fmt: skip
SIZE_FIELDS = tuple(_POWERS)
"""Fields of the model that depend on the size of an object."""


class ObjectSizes(Target):
    """Factors of the sizes of all free bodies. Masses stay, so inertia grows with the square.

    Bodies with meshes, whose size the engine cannot change, and bodies that carry others keep their size.
    A task may change shapes when an episode begins, so ``restore`` comes before its reset and ``apply`` after it.
    like: tensor with the type and device that ``by_name`` has.
    """

    def __init__(self, batch: Batch, like: Tensor) -> None:
        self.batch, model = batch, batch.model
        free = np.array(free_bodies(model), dtype=np.int64)
        self.size = len(free)
        self.factor_NB = np.ones((batch.nsim, self.size))
        rigid = ~np.isin(free, model.body_parentid)
        column = np.flatnonzero(rigid & ~np.isin(free, model.geom_bodyid[~np.isin(model.geom_type, list(SOLIDS))]))
        bodies = free[column]
        geoms = np.flatnonzero(np.isin(model.geom_bodyid, bodies))
        volumes = [model.body_bvhadr[b] + np.arange(model.body_bvhnum[b]) for b in bodies]
        body_of_volume = np.repeat(column, [len(rows) for rows in volumes])
        rows_of = {
            "geom": (geoms, np.searchsorted(free, model.geom_bodyid[geoms])),
            "body": (bodies, column),
            "bvh": (np.concatenate([*volumes, np.zeros(0, int)]), body_of_volume),
        }
        self._fields = {}
        for name, power in _POWERS.items():
            rows, body_of_row = rows_of[name.split("_")[0]]
            if np.any(getattr(model, name)[rows]):
                self._fields[name] = batch.expand(name), rows, body_of_row, power
        self._shown_NB = torch.from_numpy(self.factor_NB).to(like)  # the same memory where nothing is converted
        self.by_name = {
            model.body(int(body)).name: self._shown_NB[:, i] for i, body in zip(column, bodies, strict=True)
        }
        """Factor of each object in every simulation, [N], by the name of its body; current after ``apply``."""

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
        self._shown_NB.copy_(torch.from_numpy(self.factor_NB))
        for live, rows, body_of_row, power in self._fields.values():
            factor = self.factor_NB[ids[:, None], body_of_row] ** power
            live[ids[:, None], rows] *= factor.reshape(*factor.shape, *[1] * (live.ndim - 2))
        if self._fields:
            self.batch.set_const(ids)


class ShapeVariants:
    """Give the free bodies ``names``, each of one geom, any of ``shapes`` in every simulation.

    All fields that depend on the shape get the compiler's values, so the physics equals that of a model compiled with
    it, bit for bit. All have the mass ``mass_kg``; if masses are randomised, the inertia is scaled with them.
    """

    def __init__(self, batch: Batch, names: Sequence[str], shapes: Sequence[Shape], mass_kg: float) -> None:
        self.batch = batch
        alone = []  # models of worlds that have only the object
        for shape in shapes:
            spec = mujoco.MjSpec()
            add_object(spec, "object", shape, mass_kg, (1, 1, 1, 1))
            spec.body("object").pos = [0, 0, 0]  # the start position is not part of the shape
            alone.append(spec.compile())
        rows, rows_alone = [_rows(batch.model, name) for name in names], _rows(alone[0], "object")
        self._bodies = np.concatenate([part["body"] for part in rows])
        # by field: live values, rows of the bodies [B, R], values of each shape [K, R, ...]
        self._fields: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for field in sorted(name for name in MODEL_FIELDS if "." not in name):
            values_K = np.stack([np.asarray(getattr(one, field)) for one in alone])
            if (values_K != values_K[0]).any():
                prefix = field.split("_")[0]
                chosen_B = np.stack([part[prefix] for part in rows])
                self._fields[field] = batch.expand(field), chosen_B, values_K[:, rows_alone[prefix]]

    def apply(self, ids: np.ndarray, shape_nB: np.ndarray) -> None:
        """Give body b of simulation ids[i] the shape with index shape_nB[i, b]."""
        for live, rows_BR, choices_KR in self._fields.values():
            live[ids[:, None, None], rows_BR[None]] = choices_KR[shape_nB]
        mass = self.batch.expanded("body_mass")
        if mass is not None and "body_inertia" in self._fields:
            at = np.ix_(ids, self._bodies)
            self._fields["body_inertia"][0][at] *= (mass[at] / self.batch.model.body_mass[self._bodies])[..., None]
            self.batch.set_const(ids)


def _rows(model: mujoco.MjModel, name: str) -> dict[str, np.ndarray]:
    """Return the rows of a free body of one geom in fields with each prefix."""
    body = model.body(name).id
    dofs = model.body_dofadr[body] + np.arange(6)
    first = {"body": body, "geom": model.body_geomadr[body], "bvh": model.body_bvhadr[body]}
    return {prefix: np.array([row]) for prefix, row in first.items()} | {"dof": dofs}
