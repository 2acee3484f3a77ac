"""Apply the terms of domain randomisation to the simulations of a batch.

term ── Target: model field | value of a quantity | push ──► write(ids, numbers)
start: terms of all modes, in order;  step: terms of mode ``interval`` whose moment has come
"""

from collections.abc import Mapping

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError, unknown_name
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import SIDES
from embodied.envs.mujoco.randomization.terms import OBJECT_OF_PREFIX, RandomizationTerm
from embodied.envs.mujoco.robots.parts import ancestors, finger_bodies

_DEPENDENT_FIELDS = {"body_mass": "body_inertia", "actuator_gainprm": "actuator_biasprm"}
TOOLS = ("tcp", *(f"{side}/tcp" for side in SIDES))


class Target:
    """Destination of the numbers of a term."""

    size: int
    """Entries that can have numbers of their own."""
    pushes = False
    """Whether it changes velocities. Then nothing is written when an episode begins, and each number is followed by one
    for the direction, in [0, 1)."""
    simulated = True
    """Whether the engine reads what ``write`` changes: a model or speeds."""
    derives = False
    """Whether the engine derives constants from it, which are stale after ``write``."""

    def renew(self, ids: np.ndarray) -> None:
        """Give what ``write`` scales the model's own values in envs ``ids`` [n], whose episodes begin."""

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> None:
        """Write numbers [n, size] of envs ``ids`` [n]."""
        raise NotImplementedError

    def start(self, ids: np.ndarray) -> None:
        """Begin episodes in envs ``ids`` [n], whose state is current."""


class Fields:
    """The model fields that vary between the simulations of a batch, live arrays by name."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.values: dict[str, np.ndarray] = {}

    def add(self, name: str) -> np.ndarray:
        """Return the live values of a field, [N, ...], and give every simulation its own values from now on."""
        return self.values.setdefault(name, self.batch.expand(name))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"model/{name}": torch.from_numpy(np.array(self.values[name])) for name in sorted(self.values)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, values in self.values.items():
            values[:] = state[f"model/{name}"].numpy()
        if any(name in mujoco.MjModel._setconst_inputs for name in self.values):
            self.batch.set_const()


class ModelField(Target):
    """Entries of a field of the model, with the values that depend on them."""

    def __init__(self, fields: Fields, term: RandomizationTerm) -> None:
        self.term, self.fields, self.model = term, fields, fields.batch.model
        self.rows, self.entry_of_row = _rows(self.model, term)
        self.size = len(np.unique(self.entry_of_row))
        nominal = getattr(self.model, term.field)[self.rows]
        self.nominal = nominal if term.column is None else nominal[:, term.column]
        if len(self.rows):
            self.derives = term.field in mujoco.MjModel._setconst_inputs
            fields.add(term.field)
            if term.field in _DEPENDENT_FIELDS:
                fields.add(_DEPENDENT_FIELDS[term.field])

    def renew(self, ids: np.ndarray) -> None:
        if self.term.field == "body_mass" and len(self.rows):
            for name in ("body_mass", "body_inertia"):
                self.fields.values[name][ids[:, None], self.rows] = getattr(self.model, name)[self.rows]

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> None:
        if not len(self.rows):
            return
        term, values = self.term, self.fields.values
        at, value_nR = (ids[:, None], self.rows), value_nE[:, self.entry_of_row]
        value = value_nR.reshape(*value_nR.shape, *[1] * (self.nominal.ndim - 1))
        changed = {"abs": value, "scale": self.nominal * value, "add": self.nominal + value}[term.operation]
        if term.field == "body_mass":  # the inertia may be that of another size or shape than the model's
            values["body_inertia"][at] *= (changed / values["body_mass"][at])[..., None]
        values[term.field][at if term.column is None else (*at, term.column)] = changed
        if term.field == "actuator_gainprm":  # a position servo pulls with kp (ctrl - q): both entries are kp
            values["actuator_biasprm"][*at, 1] = -values["actuator_gainprm"][*at, 0]


class Randomizer:
    """Draw the terms and write them to their targets. Values are always relative to the model's own.

    targets: of the terms whose field is a quantity, by the term's name. control_dt_s: length of a control step.
    """

    def __init__(
        self, fields: Fields, terms: Mapping[str, RandomizationTerm], targets: Mapping[str, Target], control_dt_s: float
    ) -> None:
        self.fields, self.batch, self.terms = fields, fields.batch, dict(terms)
        self.targets = {name: targets.get(name) or ModelField(fields, term) for name, term in terms.items()}
        spans_s = {name: term.interval_s for name, term in terms.items() if term.interval_s is not None}
        self.intervals = {name: max(1, round(span_s / control_dt_s)) for name, span_s in spans_s.items()}
        """Length of the intervals of terms of mode ``interval``, control steps."""
        self._moment_N: dict[str, np.ndarray] = {}  # a function of plan and step: no state

    def apply(self, ids: np.ndarray, rng: EpisodeRng) -> None:
        """Write the values with which the episodes of envs ``ids`` [n] begin, those of mode ``startup`` too."""
        of_first = EpisodeRng(rng.seed_n, np.zeros_like(rng.seed_n))  # startup: a function of the env seed
        for name, term in self.terms.items():
            target = self.targets[name]
            if not target.pushes:
                source = of_first if term.mode == "startup" else rng
                target.renew(ids)
                target.write(ids, self._draw(name, source, np.zeros(len(ids), np.int64)))
        if any(target.derives for target in self.targets.values()):
            self.batch.set_const(ids)

    def step(self, rng: EpisodeRng, step_N: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
        """Draw the terms of mode ``interval`` whose moment has come; return the envs whose model or speeds changed.

        rng: of all envs' episodes. step: number of the control step that each env is about to make. ids: envs that
        make one (None: all). A term is drawn at one step of each interval, all of them equally likely.
        """
        changed_N, stale_N, stepped_N = np.zeros((3, len(step_N)), bool)
        stepped_N[slice(None) if ids is None else ids] = True
        for name, length in self.intervals.items():
            rows = np.flatnonzero((self._moments(name, rng, step_N, length) == step_N) & stepped_N)
            if len(rows):
                target = self.targets[name]
                target.write(rows, self._draw(name, rng.rows(rows), step_N[rows] // length + 1))
                stale_N[rows] |= target.derives
                changed_N[rows] |= target.simulated
        if stale_N.any():
            self.batch.set_const(np.flatnonzero(stale_N))
        return np.flatnonzero(changed_N)

    def _moments(self, name: str, rng: EpisodeRng, step_N: np.ndarray, length: int) -> np.ndarray:
        """Return the step of the present interval at which a term is drawn, [N]; computed when an interval begins."""
        rows = np.flatnonzero(step_N % length == 0) if name in self._moment_N else np.arange(len(step_N))
        moment_N = self._moment_N.setdefault(name, np.zeros(len(step_N), np.int64))
        number_n = step_N[rows] // length
        unit_n = rng.rows(rows).numbers(f"randomization/{name}/moment", number_n)
        moment_N[rows] = number_n * length + (unit_n * length).astype(np.int64)
        return moment_N

    def _draw(self, name: str, rng: EpisodeRng, number_n: np.ndarray) -> np.ndarray:
        """Return the numbers of a term, [n, size of its target]."""
        term, size = self.terms[name], self.targets[name].size
        value = term.draw(rng, f"randomization/{name}", size if term.each else 1, number_n)
        value = value if term.each else np.repeat(value, size, axis=1)
        if not self.targets[name].pushes:
            return value
        return np.concatenate([value, rng.block(f"randomization/{name}/direction", number_n, size)], axis=1)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.fields.load_state_dict(state)
        self._moment_N.clear()


def _rows(model: mujoco.MjModel, term: RandomizationTerm) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows (degrees of freedom of joints) of the named objects in the field, and each row's object."""
    values = getattr(model, term.field)
    if not np.issubdtype(values.dtype, np.floating):
        raise UserError(f"randomization of {term.field}: it holds {values.dtype}, only real numbers can vary")
    columns = values.shape[1] if values.ndim > 1 else 0
    if term.column is not None and not 0 <= term.column < columns:
        allowed = f"null or 0 to {columns - 1}" if columns else "null, the field has one number for each object"
        raise UserError(f"randomization of {term.field}: column: got {term.column}, allowed: {allowed}")
    kind = OBJECT_OF_PREFIX[term.field.split("_")[0]]
    count = {"geom": model.ngeom, "body": model.nbody, "actuator": model.nu, "joint": model.njnt}[kind]
    objtype = getattr(mujoco.mjtObj, f"mjOBJ_{kind.upper()}")
    names = {mujoco.mj_id2name(model, objtype, i): [i] for i in range(count)}
    known = {name: ids for name, ids in {**members(model, kind), **names}.items() if name is not None}
    for name in term.names:
        if name not in known:
            raise unknown_name(f"{kind} in the randomization of {term.field}", name, known)
    index = np.array(list(dict.fromkeys(i for name in term.names for i in known[name])), dtype=np.int64)
    if term.field.startswith("dof"):
        rows = np.flatnonzero(np.isin(model.dof_jntid, index))
        return rows, np.searchsorted(np.sort(index), model.dof_jntid[rows])
    return index, np.arange(len(index))


def members(model: mujoco.MjModel, kind: str) -> dict[str, list[int]]:
    """Return the ids of the members of ``arm``, ``fingers`` and ``objects`` among a kind (geom, body, actuator, joint).

    The arm's joints are those between base and tool centre point, of two robots both; objects can move freely.
    """
    tools = [body for i, body in enumerate(model.site_bodyid.tolist()) if model.site(i).name in TOOLS]
    arm = [body for tool in tools for body in ancestors(model, tool) if model.body_jntnum[body]]
    bodies = {"arm": arm, "fingers": finger_bodies(model), "objects": free_bodies(model)}
    if kind == "body":
        return bodies
    body_of = {"joint": model.jnt_bodyid, "geom": model.geom_bodyid}
    on_joint = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    body_of["actuator"] = np.where(on_joint, model.jnt_bodyid[model.actuator_trnid[:, 0] * on_joint], -1)
    return {name: np.flatnonzero(np.isin(body_of[kind], ids)).tolist() for name, ids in bodies.items()}


def free_bodies(model: mujoco.MjModel) -> list[int]:
    """Return the ids of the bodies that can move freely."""
    return [int(body) for body in model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]]
