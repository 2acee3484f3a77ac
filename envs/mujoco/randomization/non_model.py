"""Quantities of domain randomisation that are not fields of the model: the targets of their terms, and their effects.

action_delay, joint_friction ──► features of the engine    backlash, encoder_offset ──► the arm's commands
noise, offsets, delays of measurements ──► Sensing        object_size ──► ObjectSizes        pushes ──► Push
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.groups import free_bodies, members
from embodied.envs.mujoco.randomization.object_sizes import SIZE_FIELDS, ObjectSizes
from embodied.envs.mujoco.randomization.randomizer import Fields, Target
from embodied.envs.mujoco.randomization.sensing import JOINT_QUANTITIES, OBJECT_QUANTITIES, Sensing
from embodied.envs.mujoco.randomization.terms import RandomizationTerm
from embodied.envs.mujoco.robots.base import Arm, EncodedArm
from embodied.envs.tasks.base import Task

Terms = Mapping[str, RandomizationTerm]
PRESLIDING = 0.001  # rad or m that a joint moves before its dry friction is overcome


class Value:
    """A ``Target``: a quantity with ``size`` numbers per env, [N, size]."""

    pushes = False

    def __init__(self, num_envs: int, size: int) -> None:
        self.size = size
        self.value_NE = np.zeros((num_envs, size))

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> bool:
        self.value_NE[ids] = value_nE
        return False


class ActionDelay:
    """A ``Target``: the delay of all actuators. The engine stores the past commands."""

    size, pushes = 1, False

    def __init__(self, fields: Fields) -> None:
        self.batch, self.timestep_s = fields.batch, float(fields.batch.model.opt.timestep)
        self.delay_NU = fields.add("actuator_delay")
        self.history, self.ctrl = self.batch.bind("history"), self.batch.bind("ctrl")

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> bool:
        steps = np.round(value_nE / self.timestep_s)
        # a quarter of a step less, so that rounding of the time never selects the previous command
        self.delay_NU[ids] = np.where(steps > 0, (steps - 0.25) * self.timestep_s, 0.0)
        return False

    def start(self, ids: np.ndarray) -> None:
        """Fill the past commands of envs ``ids`` [n] with their present ones."""
        model = self.batch.model
        for actuator, (samples, _) in enumerate(model.actuator_history):
            # layout of a buffer: a user's number, the cursor, the times, the values
            first = model.actuator_historyadr[actuator] + 2 + samples
            self.history[ids, first : first + samples] = self.ctrl[ids, actuator, None]


class JointFriction:
    """A ``Target``: dry friction of the arm's joints, by springs that yield (Prandtl's elastic-plastic element).

    A joint moves elastically up to ``PRESLIDING``; beyond it the spring's end slides along, and its force is the
    friction. This costs no time, while each entry of ``dof_frictionloss`` is a constraint that the solver solves for.
    """

    pushes = False

    def __init__(self, fields: Fields, joints: list[int]) -> None:
        model = fields.batch.model
        self.size, self.joints = len(joints), joints
        self.stiffness_NJ = fields.add("jnt_stiffness")
        self.qpos, self.end = fields.batch.bind("qpos"), fields.batch.bind("plastic")
        self._at, self._end_at = model.jnt_qposadr[joints], model.jnt_plasticadr[joints]
        self._rest = model.qpos_spring[self._at]

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> bool:
        self.stiffness_NJ[ids[:, None], self.joints] = value_nE / PRESLIDING
        return False

    def start(self, ids: np.ndarray) -> None:
        """Relax the springs of envs ``ids`` [n] at the present pose."""
        self.end[ids[:, None], self._end_at] = self.qpos[ids[:, None], self._at] - self._rest


class Push:
    """A ``Target`` that adds to velocities: of objects in a horizontal direction, or of the arm's joints either way."""

    pushes = True

    def __init__(self, batch: Batch, dofs: np.ndarray, planar: bool) -> None:
        self.qvel, self.dofs, self.planar = batch.bind("qvel"), dofs, planar
        self.size = len(dofs)

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> bool:
        speed, turn = np.split(value_nE, 2, axis=1)
        if self.planar:
            self.qvel[ids[:, None], self.dofs] += speed * np.cos(2 * np.pi * turn)
            self.qvel[ids[:, None], self.dofs + 1] += speed * np.sin(2 * np.pi * turn)
        else:
            self.qvel[ids[:, None], self.dofs] += speed * np.where(turn < 0.5, -1.0, 1.0)
        return False


class NonModelRandomization:
    """All quantities of the terms in the simulations of a batch. UserError if the robot cannot have them."""

    def __init__(self, batch: Batch, arm: Arm, task: Task, terms: Terms, fields: Fields) -> None:
        self.batch, self.arm = batch, arm
        self.targets: dict[str, Target] = {}
        self.sizes: ObjectSizes | None = None
        self.sensing: Sensing | None = None
        self._values: dict[str, Value] = {}
        self._delay: ActionDelay | None = None
        self._friction: JointFriction | None = None
        for name, term in terms.items():
            if term.of_quantity:
                self.targets[name] = self._target(term.field, fields)
            elif term.field in SIZE_FIELDS and any(other.field == "object_size" for other in terms.values()):
                raise UserError(f"randomization of {term.field}: allowed without the field object_size, which sets it")
        values = {name: value.value_NE for name, value in self._values.items()}
        if values:
            if not isinstance(arm, EncodedArm):
                raise UserError(f"randomization of {next(iter(values))}: the robot {task.robot.name} has no encoders")
            arm.encoder_offset_NJ, arm.backlash_NJ = values.get("encoder_offset"), values.get("backlash")
            if any(name in values for name in (*JOINT_QUANTITIES, *OBJECT_QUANTITIES)):
                self.sensing = Sensing(task, arm, values, longest(terms), task.config.control_dt_s)

    def _target(self, field: str, fields: Fields) -> Target:
        """Return the target of a quantity; terms of the same one share it."""
        model, num_envs = self.batch.model, self.batch.nsim
        if field == "action_delay":
            self._delay = self._delay or ActionDelay(fields)
            return self._delay
        if field == "object_size":
            self.sizes = self.sizes or ObjectSizes(self.batch)
            return self.sizes
        if field == "object_push":
            return Push(self.batch, model.body_dofadr[free_bodies(model)], planar=True)
        joints = members(model, "joint")["arm"]
        if field == "joint_friction":
            self._friction = self._friction or JointFriction(fields, joints)
            return self._friction
        if field == "arm_push":
            return Push(self.batch, model.jnt_dofadr[joints], planar=False)
        sizes = {"joint_delay": 1, "object_delay": 1, "object_noise": 1, "object_offset": 3}
        return self._values.setdefault(field, Value(num_envs, sizes.get(field, len(joints))))

    def start(self, ids: np.ndarray, rng: EpisodeRng, limit_N: np.ndarray, left_N: np.ndarray) -> None:
        """Begin episodes in envs ``ids``, whose state is current. rng, limit_N, left_N: see ``Sensing.start``."""
        for started in (self._delay, self._friction):
            if started is not None:
                started.start(ids)
        if self.sensing is not None:
            self.sensing.start(ids, rng, limit_N, left_N)

    @contextmanager
    def resizing(self, ids: np.ndarray) -> Iterator[None]:
        """Give the objects of envs ``ids`` their original sizes inside the block, and scale them again after it."""
        if self.sizes is None:
            yield
        else:
            self.sizes.restore(ids)
            yield
            self.sizes.apply(ids)

    def apply(self, action_NA: np.ndarray, ids: np.ndarray | None) -> None:
        """Command actions as ``Arm.apply`` does, relative to the measured pose."""
        if self.sensing is None:
            self.arm.apply(action_NA, ids)
        else:
            self.sensing.arm.apply(action_NA, ids, self.sensing.measured())

    def moved(self) -> None:
        """Record the state after a control step."""
        if self.sensing is not None:
            self.sensing.moved()

    def observe(self, ids: np.ndarray | None) -> dict[str, Tensor] | None:
        """Return the measured terms of the state of envs ``ids`` (None: all), by name; None if they are exact."""
        return None if self.sensing is None else self.sensing.observe(ids)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the numbers of all quantities and the past of delayed signals, copies."""
        values = {name: value.value_NE for name, value in self._values.items()}
        if self.sizes is not None:
            values["object_size"] = self.sizes.factor_NB
        state = {f"hardware/{name}": torch.from_numpy(value.copy()) for name, value in values.items()}
        return state if self.sensing is None else {**state, **self.sensing.state_dict()}

    def load_state_dict(
        self, state: Mapping[str, Tensor], rng: EpisodeRng, limit_N: np.ndarray, left_N: np.ndarray
    ) -> None:
        """Continue from ``state_dict``, whose entries ``state`` contains; otherwise as in ``start``."""
        for name, value in self._values.items():
            value.value_NE[:] = state[f"hardware/{name}"].numpy()
        if self.sizes is not None:
            self.sizes.factor_NB[:] = state["hardware/object_size"].numpy()
        if self.sensing is not None:
            self.sensing.load_state_dict(state, rng, limit_N, left_N)


def prepare(spec: mujoco.MjSpec, terms: Terms) -> None:
    """Add to a spec the fields that the terms need: memory of the longest action delay, springs of joint friction."""
    fields = {term.field for term in terms.values()}
    if "action_delay" in fields:
        for actuator in spec.actuators:
            actuator.nsample = round(longest(terms)["action_delay"] / spec.option.timestep) + 2
            actuator.delay = spec.option.timestep
    if "joint_friction" in fields:
        model = spec.compile()
        for joint in members(model, "joint")["arm"]:
            spec.joint(model.joint(joint).name).springyield = PRESLIDING


def longest(terms: Terms) -> dict[str, float]:
    """Return the longest delay of each quantity that is one, s."""
    found: dict[str, float] = {}
    for term in terms.values():
        if term.field.endswith("_delay") and term.of_quantity:
            found[term.field] = max(found.get(term.field, 0.0), term.range[1])
    return found
