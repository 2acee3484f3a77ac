"""Objects whose shape differs from simulation to simulation, while all of them run on one model."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS, Batch

from envs.mujoco.scene import Shape, add_object


class ShapeVariants:
    """Gives the free bodies ``names``, each of one geom, any of ``shapes`` in every simulation.

    A body gets the values that the compiler gives to such a body: of every model field that depends on the shape,
    derived ones too, so that the physics is bit for bit that of a model compiled with it and ``set_const`` has nothing
    to do. All have the mass ``mass_kg``; where the simulations' masses are randomised the inertia follows.
    """

    def __init__(self, batch: Batch, names: Sequence[str], shapes: Sequence[Shape], mass_kg: float) -> None:
        self.batch = batch
        model, alone = batch.model, [_compiled(shape, mass_kg) for shape in shapes]
        rows, rows_alone = [_rows(model, name) for name in names], _rows(alone[0], "object")
        self._bodies = np.concatenate([part["body"] for part in rows])
        self._fields: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # live values, rows [B, R], choices
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


def _compiled(shape: Shape, mass_kg: float) -> mujoco.MjModel:
    """A world with nothing in it but the object."""
    spec = mujoco.MjSpec()
    add_object(spec, "object", shape, mass_kg, (1, 1, 1, 1))
    spec.body("object").pos = [0, 0, 0]  # where it starts is no part of its shape
    return spec.compile()


def _rows(model: mujoco.MjModel, name: str) -> dict[str, np.ndarray]:
    """Where a free body of one geom lies in the fields that begin with each prefix."""
    body = model.body(name).id
    return {
        "body": np.array([body]),
        "geom": np.array([model.body_geomadr[body]]),
        "dof": model.body_dofadr[body] + np.arange(6),
        "bvh": np.array([model.body_bvhadr[body]]),
    }
