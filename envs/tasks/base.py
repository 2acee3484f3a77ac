"""What a task is, and what it sees of the simulation.

A task reads torch tensors over the batch's live arrays (``View``) and returns torch tensors; it never steps the
simulation. All quantities are for N envs, metres, seconds, radians, float64 as the engine has them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError
from envs.common.instructions import Instructions
from envs.common.seeding import EpisodeRng
from envs.mujoco.robots.panda import FINGER_CLOSED_M, FINGER_OPEN_M, HOME_QPOS, ControlConfig, PandaArm

HOME_SPREAD = np.full(7, 0.05)
HELD_SPREAD = np.array([0.4, 0.15, 0.05, 0.15, 0.05, 0.1, 0.05])  # tool from y = -0.25 to 0.25 m, z = 0.06 to 0.3 m
BETWEEN_M = 0.02  # a cube whose centre is this near the tool centre point along every axis is between the fingers


@dataclass(frozen=True)
class TaskConfig:
    """Options that every task has. max_episode_steps counts control steps of ``control_dt_s`` seconds.

    held_starts: share of the training episodes that start with the object already in the hand, anywhere over the
    table, so that what comes after the grasp is learned from the first minute. Evaluation has none. A start-state
    distribution wider than the task's is an old remedy for exploration (Kakade and Langford 2002; reverse
    curriculum: Florensa et al. 2017).
    """

    control: ControlConfig = field(default_factory=ControlConfig)
    max_episode_steps: int = 80
    control_dt_s: float = 0.05
    held_starts: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.held_starts <= 1:
            raise UserError(f"held_starts: got {self.held_starts}, allowed: 0 to 1")
        if self.max_episode_steps < 1:
            raise UserError(f"max_episode_steps: got {self.max_episode_steps}, allowed: 1 or more")

    def substeps(self, timestep_s: float) -> int:
        """Physics steps in a control step; UserError unless it is a whole number of them."""
        substeps = round(self.control_dt_s / timestep_s)
        if substeps < 1 or abs(substeps * timestep_s - self.control_dt_s) > 1e-9:
            raise UserError(
                f"control_dt_s: got {self.control_dt_s}, allowed: multiples of the physics step, {timestep_s}"
            )
        return substeps


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
    """One task. A subclass names its parts; the pool does the rest.

    instruction: what is to be done, in a sentence. instruction_N: int64 [N], which of ``instructions`` the present
    episode of each env has; the pool writes it before ``reset``.
    """

    name: str
    instruction: str
    instruction_N: Tensor
    config: TaskConfig

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @property
    def instructions(self) -> Instructions:
        """All texts that it can be told; one, unless a task says otherwise."""
        return Instructions.only(self.instruction)

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        """Add the task's objects to a spec that holds the robot and the table."""
        raise NotImplementedError

    def bind(self, view: View) -> None:
        """Remember the tensors that the task reads. Called once."""
        raise NotImplementedError

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        """Write the initial state of envs ``ids`` [n] (objects and goals; the arm is already placed)."""
        raise NotImplementedError

    def observe(self) -> dict[str, Tensor]:
        """Named parts of ``obs["state"]``, each [N, d], in order."""
        raise NotImplementedError

    def privileged(self) -> dict[str, Tensor]:
        """Named parts of ``obs["privileged"]`` beyond the state, each [N, d]; for the critic only."""
        raise NotImplementedError

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        """Named reward terms, each [N]; the reward is their sum. success: that of the same state, bool [N]."""
        raise NotImplementedError

    def success(self) -> Tensor:
        """Whether the task is solved now, bool [N]."""
        raise NotImplementedError

    def expert(self) -> Tensor:
        """A scripted action that solves the task from the present state, [N, A]. Stateless."""
        raise NotImplementedError

    def put_in_hand(self, ids: Tensor) -> None:
        """Put the task's object between the fingers of envs ``ids`` [n], closed on it. For ``held_starts`` above 0."""
        raise UserError(f"held_starts: {self.name} has no object to hold, allowed: 0")

    def state_dict(self) -> dict[str, Tensor]:
        """What the task keeps of its envs outside of the physics, tensors of fixed shapes; its keys begin ``task/``."""
        return {"task/instruction": self.instruction_N.clone()} if len(self.instructions.texts) > 1 else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state_dict``, whose entries are in ``state`` among others. The physics is there already."""
        if len(self.instructions.texts) > 1:
            self.instruction_N.copy_(state["task/instruction"])

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
