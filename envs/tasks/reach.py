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
from embodied.envs.tasks.base import Quantity, Task, TaskConfig, column, near
from embodied.envs.tasks.common import draw, move_towards


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
        super().bind(view)
        self.goal = view.mocap("goal")

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        self.goal[ids] = draw(self.view, rng, "goal", self.config.goal_low_m, self.config.goal_high_m)

    def observed(self) -> tuple[Quantity, ...]:
        return (
            Quantity(Term("goal", 3, "m", "base", meaning="x, y, z of the goal"), lambda: self.goal),
            Quantity(Term("goal_from_tcp", 3, "m", "base", difference=Difference("goal", "tcp_pos"))),
        )

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("distance", 1, "m"), lambda: column(self._distance())),)

    def _distance(self) -> Tensor:
        distance: Tensor = vector_norm(self.goal - self.view.tcp_pos, dim=-1)
        return distance

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {"reach": 0.5 * near(self._distance(), 0.15), "at_goal": 0.5 * success}

    def success(self) -> Tensor:
        return self._distance() < self.config.success_m

    def expert(self) -> Tensor:
        return move_towards(self.view, self.goal, gripper=torch.ones_like(self.goal[:, 0]))
