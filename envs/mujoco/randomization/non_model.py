"""Quantities of domain randomisation that are not fields of the model: the targets of their terms, and their effects.

action_delay, joint_friction ──► features of the engine    backlash, encoder_offset ──► the arm's commands
noise, offsets, delays of measurements ──► Sensing        object_size ──► ObjectSizes        pushes ──► Push
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.mujoco.randomization.object_shapes import SIZE_FIELDS, ObjectSizes
from embodied.envs.mujoco.randomization.randomizer import Fields, Target, free_bodies, members
from embodied.envs.mujoco.randomization.sensing import QUANTITIES as SENSED
from embodied.envs.mujoco.randomization.sensing import Noise, Sensing
from embodied.envs.mujoco.randomization.terms import QUANTITIES, RandomizationTerm
from embodied.envs.mujoco.robots.base import ArmState, Measurement, Simulations, live
from embodied.envs.tasks.base import Task

Terms = Mapping[str, RandomizationTerm]
PRESLIDING = 0.001  # rad or m that a joint moves before its dry friction is overcome


class Value(Target):
    """A quantity with ``size`` numbers per env, float64 [N, size]."""

    simulated = False

    def __init__(self, num_envs: int, size: int, device: torch.device) -> None:
        self.size, self.value_NE = size, torch.zeros(num_envs, size, dtype=torch.float64, device=device)

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> None:
        device = self.value_NE.device
        self.value_NE[torch.from_numpy(ids).to(device)] = torch.from_numpy(value_nE).to(device)


class ActionDelay(Target):
    """The delay of all actuators. The engine stores the past commands."""

    size = 1

    def __init__(self, fields: Fields, states: Simulations) -> None:
        self.model, self.timestep_s = states.model, float(states.model.opt.timestep)
        self.delay_NU = fields.add("actuator_delay")
        self.history, self.ctrl = live(states.bind("history")), live(states.bind("ctrl"))

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> None:
        steps = np.round(value_nE / self.timestep_s)
        # a quarter of a step less, so that rounding of the time never selects the previous command
        self.delay_NU[ids] = np.where(steps > 0, (steps - 0.25) * self.timestep_s, 0.0)

    def start(self, ids: np.ndarray) -> None:
        """Fill the past commands with the present ones."""
        rows = torch.from_numpy(ids).to(self.ctrl.device)
        for actuator, (samples, _) in enumerate(self.model.actuator_history):
            # layout of a buffer: a user's number, the cursor, the times, the values
            first = self.model.actuator_historyadr[actuator] + 2 + samples
            self.history[rows, first : first + samples] = self.ctrl[rows, actuator, None]


class JointFriction(Target):
    """Dry friction of the arm's joints, by springs that yield at ``PRESLIDING`` (Prandtl's elastic-plastic element).

    This costs no time, while each entry of ``dof_frictionloss`` is a constraint that the solver solves for.
    """

    def __init__(self, fields: Fields, states: Simulations, joints: list[int]) -> None:
        model = states.model
        self.size, self.joints = len(joints), joints
        self.stiffness_NJ = fields.add("jnt_stiffness")
        self.qpos, self.end = live(states.bind("qpos")), live(states.bind("plastic"))
        at, end_at = model.jnt_qposadr[joints], model.jnt_plasticadr[joints]
        self._at, self._end_at = (torch.tensor(x, dtype=torch.int64, device=self.qpos.device) for x in (at, end_at))
        self._rest = torch.as_tensor(model.qpos_spring[at]).to(self.qpos)

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> None:
        self.stiffness_NJ[ids[:, None], self.joints] = value_nE / PRESLIDING

    def start(self, ids: np.ndarray) -> None:
        """Relax the springs at the present pose."""
        rows = torch.from_numpy(ids).to(self.qpos.device)[:, None]
        self.end[rows, self._end_at] = self.qpos[rows, self._at] - self._rest


class Push(Target):
    """Added velocities: of objects in a horizontal direction, or of the arm's joints either way."""

    pushes = True

    def __init__(self, states: Simulations, dofs: np.ndarray, planar: bool) -> None:
        self.qvel, self.planar = live(states.bind("qvel")), planar
        self.size, self.dofs = len(dofs), torch.as_tensor(dofs, dtype=torch.int64, device=self.qvel.device)

    def write(self, ids: np.ndarray, value_nE: np.ndarray) -> None:
        speed, turn = np.split(value_nE, 2, axis=1)
        rows = torch.from_numpy(ids).to(self.qvel.device)[:, None]
        if self.planar:
            self.qvel[rows, self.dofs] += torch.from_numpy(speed * np.cos(2 * np.pi * turn)).to(self.qvel)
            self.qvel[rows, self.dofs + 1] += torch.from_numpy(speed * np.sin(2 * np.pi * turn)).to(self.qvel)
        else:
            self.qvel[rows, self.dofs] += torch.from_numpy(speed * np.where(turn < 0.5, -1.0, 1.0)).to(self.qvel)


class NonModelRandomization:
    """All quantities of the terms in simulations: of ``fields.batch``, or of others of the same model on a device."""

    def __init__(
        self, arm: ArmState, task: Task, terms: Terms, fields: Fields, states: Simulations, noise: Noise
    ) -> None:
        self.arm, self.targets, by_field = arm, dict[str, Target](), dict[str, Target]()
        for name, term in terms.items():
            if term.field in QUANTITIES:
                if term.field not in by_field:
                    by_field[term.field] = _target(term.field, fields, states)
                self.targets[name] = by_field[term.field]
            elif term.field in SIZE_FIELDS and any(other.field == "object_size" for other in terms.values()):
                raise UserError(f"randomization of {term.field}: allowed without the field object_size, which sets it")
        self._targets = list(by_field.values())
        self.values = {field: target.value_NE for field, target in by_field.items() if isinstance(target, Value)}
        arm.encoder_offset_NJ, arm.backlash_NJ = self.values.get("encoder_offset"), self.values.get("backlash")
        if arm.from_target and "backlash" in self.values:
            arm.wanted_NJ = self.values["wanted"] = torch.zeros_like(self.values["backlash"])
        self.sensing = None
        if not SENSED.isdisjoint(self.values):
            self.sensing = Sensing(task, arm, self.values, longest(terms), noise)
        sizes = by_field.get("object_size")
        self.sizes = sizes if isinstance(sizes, ObjectSizes) else None
        if self.sizes is not None:
            self.values["object_size"] = torch.from_numpy(self.sizes.factor_NB)

    def start(self, ids: np.ndarray) -> None:
        """Begin episodes in envs ``ids``, whose state is current."""
        for target in self._targets:
            target.start(ids)
        if self.sensing is not None:
            self.sensing.start(ids)

    @contextmanager
    def resizing(self, ids: np.ndarray) -> Iterator[None]:
        """Give the objects of envs ``ids`` their original sizes inside the block, and scale them again after it."""
        if self.sizes is not None:
            self.sizes.restore(ids)
        yield
        if self.sizes is not None:
            self.sizes.apply(ids)

    def measured(self) -> Measurement | None:
        """Return the pose that actions start from; None: the true one."""
        return None if self.sensing is None else self.sensing.measured()

    def moved(self) -> None:
        if self.sensing is not None:
            self.sensing.moved()

    def observe(self, ids: np.ndarray | None) -> dict[str, Tensor] | None:
        """Return the measured terms of the state of envs ``ids`` (None: all), by name; None if they are exact."""
        return None if self.sensing is None else self.sensing.observe(ids)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the numbers of all quantities and the past of delayed signals, copies."""
        state = {f"hardware/{name}": value.clone() for name, value in self.values.items()}
        return state if self.sensing is None else {**state, **self.sensing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(state[f"hardware/{name}"])
        if self.sensing is not None:
            self.sensing.load_state_dict(state)


def _target(field: str, fields: Fields, states: Simulations) -> Target:
    model, joints = states.model, members(states.model, "joint")["arm"]
    if field == "action_delay":
        return ActionDelay(fields, states)
    if field == "joint_friction":
        return JointFriction(fields, states, joints)
    if field == "object_size":
        return ObjectSizes(fields.batch, live(states.bind("qpos")))
    if field == "object_push":
        return Push(states, model.body_dofadr[free_bodies(model)], planar=True)
    if field == "arm_push":
        return Push(states, model.jnt_dofadr[joints], planar=False)
    sizes = {"joint_delay": 1, "object_delay": 1, "object_noise": 1, "object_offset": 3}
    return Value(fields.batch.nsim, sizes.get(field, len(joints)), live(states.bind("qpos")).device)


def prepare(spec: mujoco.MjSpec, terms: Terms) -> None:
    """Add to a spec the fields that the terms need: memory of the longest action delay, springs of joint friction."""
    fields = {term.field for term in terms.values()}
    if "action_delay" in fields:
        for actuator in spec.actuators:
            actuator.nsample = round(longest(terms)["action_delay"] / spec.option.timestep) + 2
            actuator.delay = spec.option.timestep
    if "joint_friction" in fields:
        model = spec.compile()
        joints = [spec.joint(model.joint(joint).name) for joint in members(model, "joint")["arm"]]
        for joint in joints:
            joint.springyield = PRESLIDING
        model = spec.compile()
        for joint in joints:  # MuJoCo read the number in degrees if the joint's MJCF is in degrees
            joint.springyield *= PRESLIDING / model.joint(joint.name).springyield.item()


def longest(terms: Terms) -> dict[str, float]:
    """Return the longest delay of each quantity that is one, s."""
    delays = [(term.field, term.range[1]) for term in terms.values() if term.field in QUANTITIES]
    return {field: max(high for other, high in delays if other == field) for field, _ in delays if "_delay" in field}
