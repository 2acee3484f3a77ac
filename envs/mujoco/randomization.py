"""Domain randomisation: per-env values of the model's fields, drawn at start-up or at every reset.

The options are named as in Isaac Lab's and mjlab's event terms: ``mode`` (startup, reset), ``distribution`` (uniform,
log_uniform, gaussian) and ``operation`` (scale, add, abs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import mujoco
import numpy as np
import torch
from mujoco.batch import MODEL_FIELDS, Batch
from pydantic import Field
from torch import Tensor

from embodied.core.errors import UserError, unknown_name
from embodied.core.options import config_dataclass, one_of
from envs.common.seeding import EpisodeRng

_OBJECT_OF_PREFIX = {"geom": "geom", "body": "body", "actuator": "actuator", "dof": "joint", "jnt": "joint"}
_DEPENDENT_FIELDS = {"body_mass": "body_inertia", "actuator_gainprm": "actuator_biasprm"}
_FIELDS = sorted(name for name in MODEL_FIELDS if name.split("_")[0] in _OBJECT_OF_PREFIX)


@config_dataclass
class RandomizationTerm:
    """One randomised field. One number is drawn per env and applied to all names.

    Dependent values are adjusted: a body's inertia with its ``body_mass`` (as if its density had changed), and a
    position actuator's bias with its stiffness, ``actuator_gainprm`` column 0. Terms are applied in order, each to the
    model's own value of the named entries.
    """

    field: Annotated[str, one_of(_FIELDS)]
    """MjModel field that ``Batch.expand`` supports, for instance geom_friction, body_mass, actuator_gainprm."""
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Geoms, bodies, actuators or joints that the term applies to."""
    range: tuple[float, float]
    """(low, high) of uniform and log_uniform, (mean, standard deviation) of gaussian."""
    mode: Literal["startup", "reset"] = "reset"
    """When the number is drawn."""
    distribution: Literal["uniform", "log_uniform", "gaussian"] = "uniform"
    """How the number is drawn."""
    operation: Literal["scale", "add", "abs"] = "scale"
    """scale multiplies the model's own value by the number, add adds the number, abs replaces the value."""
    column: int | None = None
    """Index along the field's last axis; null: all."""

    def __post_init__(self) -> None:
        low, high = self.range
        if self.distribution == "gaussian":
            if high < 0:
                raise UserError(f"range: got {list(self.range)}, which has a negative standard deviation")
        elif low > high:
            raise UserError(f"range: got {list(self.range)}, which has low above high")
        elif self.distribution == "log_uniform" and low <= 0:
            raise UserError(f"range: got {list(self.range)}, which for log_uniform must be above 0")

    def draw(self, rng: EpisodeRng, name: str) -> np.ndarray:
        """Draw one number per env, [n]."""
        low, high = self.range
        if self.distribution == "log_uniform":
            return np.asarray(np.exp(rng.uniform(name, float(np.log(low)), float(np.log(high)))))
        if self.distribution == "gaussian":
            u = rng.uniform(name, [0.0, 0.0], [1.0, 1.0])
            return np.asarray(low + high * np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1]))
        return rng.uniform(name, float(low), float(high))


class Randomizer:
    """Apply the terms to the envs whose episodes start. Values are always relative to the model's own."""

    def __init__(self, batch: Batch, terms: Mapping[str, RandomizationTerm]) -> None:
        self.batch = batch
        self.terms = dict(terms)
        self._rows = {name: _rows(batch.model, term) for name, term in self.terms.items()}
        names = {term.field for term in self.terms.values()}
        names |= {_DEPENDENT_FIELDS[name] for name in names if name in _DEPENDENT_FIELDS}
        self._fields = {name: batch.expand(name) for name in sorted(names)}

    def apply(self, ids: np.ndarray, rng: EpisodeRng, first: np.ndarray) -> None:
        """Draw new values for envs ``ids`` [n].

        first: bool [n], whether terms of mode ``startup`` are drawn too; they depend on the env seed alone.
        """
        stale = np.zeros(len(ids), bool)  # whether constants that the engine derives from the fields are out of date
        for name, term in self.terms.items():
            chosen = first if term.mode == "startup" else np.ones(len(ids), bool)
            if chosen.any():
                drawn_n = term.draw(rng.of_first_episodes() if term.mode == "startup" else rng, f"randomization/{name}")
                self._write(term, self._rows[name], ids[chosen], drawn_n[chosen])
                stale |= chosen & (term.field in mujoco.MjModel._setconst_inputs)
        if stale.any():
            self.batch.set_const(ids[stale])

    def _write(self, term: RandomizationTerm, rows: np.ndarray, ids: np.ndarray, value_n: np.ndarray) -> None:
        """Write the field's entries ``rows`` and their dependent values in envs ``ids`` [n]."""
        nominal = getattr(self.batch.model, term.field)[rows]
        at = np.ix_(ids, rows)
        if nominal.ndim == 1:
            self._fields[term.field][at] = _operate(term.operation, nominal[None], value_n[:, None])
        else:
            columns = np.arange(nominal.shape[1]) if term.column is None else np.array([term.column])
            new = _operate(term.operation, nominal[None][..., columns], value_n[:, None, None])
            self._fields[term.field][np.ix_(ids, rows, columns)] = new
        if term.field == "body_mass":
            ratio = self._fields["body_mass"][at] / nominal
            self._fields["body_inertia"][at] = self.batch.model.body_inertia[rows] * ratio[..., None]
        if term.field == "actuator_gainprm":  # a position servo pulls with kp (ctrl - q): both entries are kp
            self._fields["actuator_biasprm"][*at, 1] = -self._fields["actuator_gainprm"][*at, 0]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the randomised fields, copies."""
        return {f"model/{name}": torch.from_numpy(np.array(values)) for name, values in self._fields.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state_dict``, whose entries ``state`` contains."""
        for name, values in self._fields.items():
            values[:] = state[f"model/{name}"].numpy()
        if any(name in mujoco.MjModel._setconst_inputs for name in self._fields):
            self.batch.set_const()


def _operate(operation: str, nominal: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the new values, broadcast over envs (first axis of ``value``) and rows."""
    if operation == "abs":
        return np.broadcast_to(value, np.broadcast_shapes(nominal.shape, value.shape))
    return np.asarray(nominal * value if operation == "scale" else nominal + value)


def _rows(model: mujoco.MjModel, term: RandomizationTerm) -> np.ndarray:
    """Return the indices of the named objects along the field's first axis; all degrees of freedom of a joint."""
    kind = _OBJECT_OF_PREFIX[term.field.split("_")[0]]
    count = {"geom": model.ngeom, "body": model.nbody, "actuator": model.nu, "joint": model.njnt}[kind]
    objtype = getattr(mujoco.mjtObj, f"mjOBJ_{kind.upper()}")
    known = {mujoco.mj_id2name(model, objtype, i): i for i in range(count)}
    known.pop(None, None)
    for name in term.names:
        if name not in known:
            raise unknown_name(f"{kind} in the randomization of {term.field}", name, known)
    values = getattr(model, term.field)
    if not np.issubdtype(values.dtype, np.floating):
        raise UserError(f"randomization of {term.field}: it holds {values.dtype}, only real numbers can vary")
    columns = values.shape[1] if values.ndim > 1 else 0
    if term.column is not None and not 0 <= term.column < columns:
        allowed = f"null or 0 to {columns - 1}" if columns else "null, the field has one number for each object"
        raise UserError(f"randomization of {term.field}: column: got {term.column}, allowed: {allowed}")
    index = np.array([known[name] for name in term.names])
    if term.field.startswith("dof"):
        return np.flatnonzero(np.isin(model.dof_jntid, index))
    return index
