"""Domain randomisation: per-env values of the model's fields, drawn at start-up or at every reset.

The words are those of Isaac Lab's and mjlab's event terms: ``mode`` (startup, reset), ``distribution`` (uniform,
log_uniform, gaussian) and ``operation`` (scale, add, abs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import unknown_name
from envs.seeding import EpisodeRng

_OBJECT_OF_PREFIX = {"geom": "geom", "body": "body", "actuator": "actuator", "dof": "joint", "jnt": "joint"}


@dataclass(frozen=True)
class RandomizationTerm:
    """One randomised field.

    field: an MjModel field that ``Batch.expand`` knows, for instance geom_friction, body_mass, actuator_gainprm.
    names: the geoms, bodies, actuators or joints it applies to. column: index along the field's last axis (None: all).
    range: (low, high) of uniform and log_uniform, (mean, standard deviation) of gaussian. One number is drawn for an
    env and applied to all names. For a position actuator's stiffness use ``actuator_gainprm`` column 0: its bias
    follows.
    """

    field: str
    names: tuple[str, ...]
    range: tuple[float, float]
    mode: str = "reset"
    distribution: str = "uniform"
    operation: str = "scale"
    column: int | None = None

    def __post_init__(self) -> None:
        for key, allowed in (
            ("mode", ("startup", "reset")),
            ("distribution", ("uniform", "log_uniform", "gaussian")),
            ("operation", ("scale", "add", "abs")),
        ):
            if getattr(self, key) not in allowed:
                raise unknown_name(f"randomization {key}", getattr(self, key), allowed)
        if self.distribution != "gaussian" and self.range[0] > self.range[1]:
            raise ValueError(f"randomization of {self.field}: range {self.range} has low above high")

    def draw(self, rng: EpisodeRng, name: str) -> np.ndarray:
        """One number for each env, [n]."""
        low, high = self.range
        if self.distribution == "log_uniform":
            return np.exp(rng.uniform(name, float(np.log(low)), float(np.log(high))))
        if self.distribution == "gaussian":
            u = rng.uniform(name, [0.0, 0.0], [1.0, 1.0])
            return low + high * np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1])
        return rng.uniform(name, float(low), float(high))


class Randomizer:
    """Applies the terms to the envs whose episodes start. Values are always relative to the model's own."""

    def __init__(self, batch: Batch, terms: Mapping[str, RandomizationTerm]) -> None:
        self.batch = batch
        self.terms = dict(terms)
        self._rows = {name: _rows(batch.model, term) for name, term in self.terms.items()}
        self._fields = {term.field: batch.expand(term.field) for term in self.terms.values()}
        if any(term.field == "actuator_gainprm" for term in self.terms.values()):
            self._fields["actuator_biasprm"] = batch.expand("actuator_biasprm")
        self._constants = any(term.field in mujoco.MjModel._setconst_inputs for term in self.terms.values())

    def apply(self, ids: np.ndarray, rng: EpisodeRng, first: np.ndarray) -> None:
        """Draw new values for envs ``ids`` [n]; ``first`` [n] marks those that have had none yet."""
        if not self.terms:
            return
        for name, term in self.terms.items():
            chosen = first if term.mode == "startup" else np.ones(len(ids), bool)
            if chosen.any():
                self._write(term, self._rows[name], ids[chosen], term.draw(rng, f"randomization/{name}")[chosen])
        if self._constants:
            self.batch.set_const(ids)

    def _write(self, term: RandomizationTerm, rows: np.ndarray, ids: np.ndarray, value_n: np.ndarray) -> None:
        nominal = getattr(self.batch.model, term.field)[rows]
        columns = slice(None) if term.column is None else slice(term.column, term.column + 1)
        if nominal.ndim == 1:
            nominal, value = nominal[None], value_n[:, None]
            self._fields[term.field][np.ix_(ids, rows)] = _operate(term.operation, nominal, value)
            return
        value = value_n[:, None, None]
        new = np.repeat(nominal[None], len(ids), 0)
        new[..., columns] = _operate(term.operation, new[..., columns], value)
        self._fields[term.field][np.ix_(ids, rows)] = new
        if term.field == "actuator_gainprm":  # a position servo pulls with kp (ctrl - q): both entries are kp
            bias = self._fields["actuator_biasprm"]
            bias[ids[:, None], rows[None], 1] = -new[..., 0]

    def state_dict(self) -> dict[str, Tensor]:
        return {f"model/{name}": torch.from_numpy(np.array(values)) for name, values in self._fields.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, values in self._fields.items():
            values[:] = state[f"model/{name}"].numpy()
        if self._constants:
            self.batch.set_const()


def _operate(operation: str, nominal: np.ndarray, value: np.ndarray) -> np.ndarray:
    if operation == "scale":
        return nominal * value
    return nominal + value if operation == "add" else np.broadcast_to(value, np.broadcast_shapes(nominal.shape, value.shape))


def _rows(model: mujoco.MjModel, term: RandomizationTerm) -> np.ndarray:
    """Indices of the named objects along the field's first axis."""
    kind = _OBJECT_OF_PREFIX.get(term.field.split("_")[0])
    if kind is None:
        raise unknown_name("randomization field", term.field, [f"{prefix}_..." for prefix in _OBJECT_OF_PREFIX])
    count = {"geom": model.ngeom, "body": model.nbody, "actuator": model.nu, "joint": model.njnt}[kind]
    objtype = getattr(mujoco.mjtObj, f"mjOBJ_{kind.upper()}")
    known = {mujoco.mj_id2name(model, objtype, i): i for i in range(count)}
    known.pop(None, None)
    for name in term.names:
        if name not in known:
            raise unknown_name(f"{kind} in the randomization of {term.field}", name, known)
    index = np.array([known[name] for name in term.names])
    return model.jnt_dofadr[index] if term.field.startswith("dof") else index
