"""Objects whose shape differs between simulations of one model."""

from collections.abc import Sequence

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS, Batch

from embodied.envs.mujoco.scene import Shape, add_object


class ShapeVariants:
    """Give the free bodies ``names``, each of one geom, any of ``shapes`` in every simulation.

    All fields that depend on the shape, derived ones too, get the compiler's values. So the physics equals that
    of a model compiled with the shape, bit for bit, and ``set_const`` is not needed. All bodies have the mass
    ``mass_kg``; if masses are randomised, the inertia is scaled with the mass.
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
