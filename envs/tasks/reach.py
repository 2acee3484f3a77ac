"""Reach: bring the gripper's tool centre point to a goal in the air."""

from __future__ import annotations

import mujoco
import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.options import PositiveInt, config_dataclass
from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import add_goal
from embodied.envs.mujoco.view import View
from embodied.envs.registry import TASKS
from embodied.envs.tasks.base import Task, TaskConfig, near
from embodied.envs.tasks.common import move_towards


@config_dataclass
class ReachConfig(TaskConfig):
    """Options of Reach. ``low`` and ``high`` are opposite corners of a box (x, y, z)."""

    max_episode_steps: PositiveInt = 40
    """Time limit, control steps."""
    goal_low_m: tuple[float, float, float] = (0.35, -0.3, 0.08)
    """Box of goals."""
    goal_high_m: tuple[float, float, float] = (0.65, 0.3, 0.4)
    """Opposite corner of that box."""
    success_m: float = 0.025
    """Greatest distance from the goal that counts as success."""


@TASKS.register("reach", config=ReachConfig)
class Reach(Task):
    """Bring the tool centre point to a goal."""

    name = "reach"
    instruction = "move the gripper to the green sphere"
    config: ReachConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_goal(spec, "goal", self.config.success_m)

    def bind(self, view: View) -> None:
        self.view = view
        self.goal = view.mocap("goal")

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        self.goal[ids] = self.view.tensor(
            rng.uniform("goal", list(self.config.goal_low_m), list(self.config.goal_high_m))
        )

    def state_terms(self) -> tuple[Term, ...]:
        offset = Term("goal_from_tcp", 3, "m", "base", difference=Difference("goal", "tcp_pos"))
        return (Term("goal", 3, "m", "base", meaning="x, y, z of the goal"), offset)

    def privileged_terms(self) -> tuple[Term, ...]:
        return (Term("distance", 1, "m"),)

    def observe(self) -> dict[str, Tensor]:
        return {"goal": self.goal, "goal_from_tcp": self.goal - self.view.tcp_pos}

    def privileged(self) -> dict[str, Tensor]:
        return {"distance": self._distance().unsqueeze(-1)}

    def _distance(self) -> Tensor:
        distance: Tensor = vector_norm(self.goal - self.view.tcp_pos, dim=-1)
        return distance

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {"reach": 0.5 * near(self._distance(), 0.15), "at_goal": 0.5 * success}

    def success(self) -> Tensor:
        return self._distance() < self.config.success_m

    def expert(self) -> Tensor:
        return move_towards(self.view, self.goal, gripper=torch.ones_like(self.goal[:, 0]))
