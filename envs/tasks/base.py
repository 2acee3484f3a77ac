"""What a task is, and what it sees of the simulation.

A task reads torch tensors over the batch's live arrays (``View``) and returns torch tensors; it never steps the
simulation. All quantities are for N envs, metres, seconds, radians, float64 as the engine has them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.options import Count, Share, config_dataclass
from embodied.core.spec import ActionSpace, CameraSpec, EnvSpec, Instruction, StartStage, Term
from envs.common.instructions import single_instruction
from envs.common.seeding import EpisodeRng
from envs.mujoco.robots.panda import FINGER_CLOSED_M, FINGER_OPEN_M, HOME_QPOS, ControlConfig, PandaArm
from envs.tasks.ground_truth import GroundTruth

HOME_SPREAD = np.full(7, 0.05)
HELD_SPREAD = np.array([0.4, 0.15, 0.05, 0.15, 0.05, 0.1, 0.05])  # tool from y = -0.25 to 0.25 m, z = 0.06 to 0.3 m
BETWEEN_M = 0.02  # a cube whose centre is this near the tool centre point along every axis is between the fingers


@config_dataclass
class TaskConfig:
    """Options that every task has."""

    control: ControlConfig = field(default_factory=ControlConfig)
    """How actions move the arm."""
    max_episode_steps: Count = 80
    """Time limit, control steps."""
    control_dt_s: float = 0.05
    """Length of a control step, s."""
    held_starts: Share = 0.0
    """Share of the training episodes that start with the object already in the hand, anywhere over the table, so that
    what comes after the grasp is learned from the first minute. Evaluation has none. A start-state distribution wider
    than the task's is an old remedy for exploration (Kakade and Langford 2002; reverse curriculum: Florensa et al.
    2017)."""

    def substeps(self, timestep_s: float) -> int:
        """Physics steps in a control step; UserError unless it is a whole number of them."""
        substeps = round(self.control_dt_s / timestep_s)
        if substeps < 1 or abs(substeps * timestep_s - self.control_dt_s) > 1e-9:
            raise UserError(
                f"control_dt_s: got {self.control_dt_s}, allowed: multiples of the physics step, {timestep_s}"
            )
        return substeps


@config_dataclass
class ObjectTaskConfig(TaskConfig):
    """Options of tasks with objects on the table."""

    fail_out_of_reach: bool = False
    """End an episode as a failure when an object has left the arm's workspace, instead of letting the time run out."""


class View:
    """Named torch tensors over the live arrays of a batch: no copies, current after every control step.

    batch: for model fields that a task sets per simulation.
    """

    def __init__(self, batch: Batch, arm: PandaArm) -> None:
        self.batch, self.model = batch, batch.model
        self.qpos = torch.from_numpy(batch.bind("qpos"))
        self.qvel = torch.from_numpy(batch.bind("qvel"))
        self.mocap_pos = torch.from_numpy(batch.bind("mocap_pos"))
        self.sensors = _readonly(batch.bind("sensordata"))
        self.tcp_pos = _readonly(batch.bind("site_xpos"))[:, arm.tcp_site]
        self.tcp_mat = _readonly(batch.bind("site_xmat"))[:, arm.tcp_site]
        self.tcp_vel = self.sensor("tcp_vel")
        self.arm_qpos, self.arm_qvel = self.qpos[:, :7], self.qvel[:, :7]
        self.finger_qpos = self.qpos[:, 7:9]
        self.finger_targets = torch.from_numpy(batch.bind("ctrl"))[:, 7:9]
        self.finger_target = self.finger_targets[:, :1]
        self._views: dict[tuple[str, str], Tensor] = {}  # by what they are of and whose: looking up names is slow
        self._derived: dict[tuple[str, str], Tensor] = {}  # computed since the simulation last moved

    def changed(self) -> None:
        """The simulation has moved on: what was derived from its state is out of date."""
        self._derived.clear()

    def sensor(self, name: str) -> Tensor:
        """Reading of a sensor, [N, d]."""
        sensor = self.model.sensor(name)
        return self.sensors[:, sensor.adr[0] : sensor.adr[0] + sensor.dim[0]]

    def body_qpos(self, name: str) -> Tensor:
        """Position and quaternion of a free body, [N, 7]; writable."""
        return _kept(self._views, ("qpos", name), lambda: _columns(self.qpos, self.model.joint(name).qposadr[0], 7))

    def body_qvel(self, name: str) -> Tensor:
        """Linear (world frame) and angular (body frame) velocity of a free body, [N, 6]."""
        return _kept(self._views, ("qvel", name), lambda: _columns(self.qvel, self.model.joint(name).dofadr[0], 6))

    def cube_axes(self, name: str) -> Tensor:
        """Directions of the x and the y axis of the cube ``name``, [N, 6]. Their sensors are neighbours (add_cube)."""
        return self._neighbours(f"{name}_x_axis", 6)

    def mocap(self, name: str) -> Tensor:
        """Position of a mocap body, [N, 3]; writable."""
        return self.mocap_pos[:, int(self.model.body(name).mocapid[0])]

    def opening(self) -> Tensor:
        """How far the fingers are told to open, 0 (closed) to 1 (open), [N]."""
        return (self.finger_target[:, 0] - FINGER_CLOSED_M) / (FINGER_OPEN_M - FINGER_CLOSED_M)

    def between(self, name: str) -> Tensor:
        """Whether the centre of the cube ``name`` is between the open or closed fingers, bool [N]."""

        def compute() -> Tensor:
            return (self.body_qpos(name)[:, :3] - self.tcp_pos).abs().amax(dim=-1) < BETWEEN_M

        return _kept(self._derived, ("between", name), compute)

    def grasped(self, name: str) -> Tensor:
        """Whether both fingers touch the cube ``name`` and it is between them, bool [N].

        Contacts alone are not enough: closed fingers that rest on top of a cube both touch it.
        """
        return _kept(self._derived, ("grasped", name), lambda: self._fingers(name).all(dim=-1) & self.between(name))

    def touched(self, name: str) -> Tensor:
        """Whether any finger touches the cube ``name``, bool [N]."""
        return _kept(self._derived, ("touched", name), lambda: self._fingers(name).any(dim=-1))

    def _fingers(self, name: str) -> Tensor:
        """Whether the left and the right finger touch the cube, bool [N, 2] (neighbouring sensors of add_cube)."""
        return self._neighbours(f"left_finger_{name}", 2) > 0

    def _neighbours(self, first: str, size: int) -> Tensor:
        """``size`` readings from the sensor ``first`` on."""
        return _kept(
            self._views, ("sensors", first), lambda: _columns(self.sensors, self.model.sensor(first).adr[0], size)
        )


def _kept(kept: dict[tuple[str, str], Tensor], key: tuple[str, str], compute: Callable[[], Tensor]) -> Tensor:
    """The value at ``key``, computed where there is none."""
    if key not in kept:
        kept[key] = compute()
    return kept[key]


def _columns(array: Tensor, first: int, size: int) -> Tensor:
    return array[:, first : first + size]


def _readonly(array: np.ndarray) -> Tensor:
    """A tensor over an output array of the engine. Tasks must not write to it (torch cannot enforce that)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class Task:
    """One task. A subclass says what its parts are; the pool does the rest.

    UserError for an option that the task does not allow.
    """

    name: str
    instruction: str
    """What is to be done, in a sentence."""
    instruction_N: Tensor
    """int64 [N], which of ``instructions`` the present episode of each env has; the pool writes it before ``reset``."""
    config: TaskConfig

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        if config.held_starts > 0 and not self.stages:
            raise UserError(f"held_starts: {self.name} has no object to hold, allowed: 0")

    # -- what it is, known before anything is simulated ----------------------------------------------------------------

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All texts that it can be given; one, unless a task says otherwise."""
        return single_instruction(self.instruction)

    @property
    def stages(self) -> tuple[StartStage, ...]:
        """Stages beyond the ordinary start; at most one, ``held``, which ``put_in_hand`` makes."""
        return ()

    def state_terms(self) -> tuple[Term, ...]:
        """Parts of ``obs["state"]``, in order."""
        raise NotImplementedError

    def privileged_terms(self) -> tuple[Term, ...]:
        """Parts of ``obs["privileged"]`` beyond the state, in order; for the critic only."""
        raise NotImplementedError

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        """Add the task's objects to a spec that holds the robot and the table."""
        raise NotImplementedError

    # -- what happens in the simulation --------------------------------------------------------------------------------

    def bind(self, view: View) -> None:
        """Remember the tensors that the task reads. Called once."""
        raise NotImplementedError

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        """Write the initial state of envs ``ids`` [n] (objects and goals; the arm is already placed)."""
        raise NotImplementedError

    def observe(self) -> dict[str, Tensor]:
        """The quantities of ``state_terms`` by name, each [N, size], in the terms' units (the pool scales them)."""
        raise NotImplementedError

    def privileged(self) -> dict[str, Tensor]:
        """The quantities of ``privileged_terms`` by name, each [N, size], in the terms' units."""
        raise NotImplementedError

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        """Named reward terms, each [N]; the reward is their sum. success: that of the same state, bool [N]."""
        raise NotImplementedError

    def success(self) -> Tensor:
        """Whether the task is solved now, bool [N]."""
        raise NotImplementedError

    def failure(self) -> Tensor | None:
        """Whether the episode has failed for good and ends as a termination, bool [N]; None for a task without."""
        return None

    def expert(self) -> Tensor:
        """A scripted action that solves the task from the present state, [N, A]. Stateless."""
        raise NotImplementedError

    def put_in_hand(self, ids: Tensor) -> None:
        """Put the task's object between the fingers of envs ``ids`` [n], closed on it. For the stage ``held``."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """What the task keeps of its envs outside of the physics, tensors of fixed shapes; its keys begin ``task/``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state_dict``, whose entries are in ``state`` among others. The physics is there already."""

    def initial_arm_qpos(self, rng: EpisodeRng, held: np.ndarray) -> np.ndarray:
        """Arm joint angles at the start of an episode, [n, 7]: about home, and farther where ``held`` [n]."""
        spread = np.where(held[:, None], HELD_SPREAD, HOME_SPREAD)
        return HOME_QPOS + spread * rng.uniform("arm", [-1.0] * 7, [1.0] * 7)


def column(x: Tensor) -> Tensor:
    """[N] (bool or number) as float64 [N, 1]."""
    return x.to(torch.float64).unsqueeze(-1)


def near(distance: Tensor, scale_m: float) -> Tensor:
    """1 at distance 0, falling to 0.24 at ``scale_m``: 1 - tanh(d / scale)."""
    return 1 - torch.tanh(distance / scale_m)


def progress(distance: Tensor, range_m: float) -> Tensor:
    """1 at distance 0, falling linearly to 0 at ``range_m``: the same pull from near and far."""
    return (1 - distance / range_m).clamp(min=0)


def task_spec(task: Task, action: ActionSpace, robot: Sequence[Term], cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
    """The spec of a task.

    robot: terms of the state that the robot measures itself. With cameras the state has only those, and the rest of it
    is privileged.
    """
    state, privileged = task.state_terms(), task.privileged_terms()
    if cameras:
        privileged = (*(term for term in state if term not in robot), *privileged)
        state = tuple(term for term in state if term in robot)
    return EnvSpec(
        task=task.name,
        state=state,
        action=action,
        control_dt_s=task.config.control_dt_s,
        max_episode_steps=task.config.max_episode_steps,
        privileged=privileged,
        cameras=tuple(cameras),
        instructions=task.instructions,
        stages=task.stages,
        descriptions=task.descriptions if isinstance(task, GroundTruth) else (),
    )
