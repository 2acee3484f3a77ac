"""What a task is, and what it sees of the simulation.

A task reads torch tensors over the batch's live arrays (``View``) and returns torch tensors; it never steps the
simulation. All quantities are for N envs, metres, seconds, radians, float64 as the engine has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any

import mujoco
import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.options import Count, Share, config_dataclass, from_mapping
from embodied.core.spec import CameraSpec, EnvSpec, Instruction, StartStage, Term
from envs.common.instructions import single_instruction
from envs.common.seeding import EpisodeRng
from envs.mujoco.robots import ROBOTS
from envs.mujoco.robots.base import Robot
from envs.mujoco.scene import on_table
from envs.mujoco.view import View
from envs.tasks.ground_truth import GroundTruth


@config_dataclass
class TaskConfig:
    """Options that every task has."""

    robot: str = "panda"
    """Which robot does it."""
    control: dict[str, Any] = field(default_factory=dict)
    """How actions move the robot: its own options, such as those of ``ControlConfig`` for the Panda."""
    max_episode_steps: Count = 80
    """Time limit, control steps."""
    control_dt_s: float = 0.05
    """Length of a control step, s."""
    held_starts: Share = 0.0
    """Share of the training episodes that start with the object already in the hand, anywhere over the table, so that
    what comes after the grasp is learned from the first minute. Evaluation has none. A start-state distribution wider
    than the task's is an old remedy for exploration (Kakade and Langford 2002; reverse curriculum: Florensa et al.
    2017)."""

    def __post_init__(self) -> None:
        control = from_mapping(ROBOTS[self.robot].config, self.control, "control")
        object.__setattr__(self, "control", asdict(control))  # with all defaults

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
        entry = ROBOTS[config.robot]
        self.robot: Robot = entry.build(from_mapping(entry.config, config.control, "control"))
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
        """Parts of ``obs["state"]`` after those that the robot measures of itself, in order."""
        raise NotImplementedError

    def privileged_terms(self) -> tuple[Term, ...]:
        """Parts of ``obs["privileged"]`` beyond the state, in order; for the critic only."""
        raise NotImplementedError

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        """Add the task's objects to a spec that holds the robot and the table."""
        raise NotImplementedError

    def scene(self) -> mujoco.MjSpec:
        """Return the robot at its table with the task's objects."""
        spec = on_table(self.robot)
        self.build_scene(spec)
        return spec

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


def column(x: Tensor) -> Tensor:
    """[N] (bool or number) as float64 [N, 1]."""
    return x.to(torch.float64).unsqueeze(-1)


def near(distance: Tensor, scale_m: float) -> Tensor:
    """1 at distance 0, falling to 0.24 at ``scale_m``: 1 - tanh(d / scale)."""
    return 1 - torch.tanh(distance / scale_m)


def progress(distance: Tensor, range_m: float) -> Tensor:
    """1 at distance 0, falling linearly to 0 at ``range_m``: the same pull from near and far."""
    return (1 - distance / range_m).clamp(min=0)


def task_spec(task: Task, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
    """Return the spec of a task. With cameras the state has only what the robot measures; the rest is privileged."""
    robot, objects, privileged = task.robot.terms, task.state_terms(), task.privileged_terms()
    state = robot if cameras else (*robot, *objects)
    privileged = (*objects, *privileged) if cameras else privileged
    return EnvSpec(
        task=task.name,
        state=state,
        action=task.robot.action,
        robot=task.robot.name,
        control_dt_s=task.config.control_dt_s,
        max_episode_steps=task.config.max_episode_steps,
        privileged=privileged,
        cameras=tuple(cameras),
        instructions=task.instructions,
        stages=task.stages,
        descriptions=task.descriptions if isinstance(task, GroundTruth) else (),
    )
