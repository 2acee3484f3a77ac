"""Reach: bring the gripper's tool centre point to a goal in the air."""

import torch
from torch import Tensor

from embodied.core.spec import Difference, Term
from embodied.envs.tasks.base import Quantity, column, distance, near
from embodied.envs.tasks.common import GoalTask, move_towards
from embodied.envs.tasks.config import ReachConfig


class Reach(GoalTask):
    """Bring the tool centre point to a goal."""

    name = "reach"
    recordable = True
    instruction = "move the gripper to the green sphere"
    config: ReachConfig

    def observed(self) -> tuple[Quantity, ...]:
        return (
            Quantity(Term("goal", 3, "m", "base", meaning="x, y, z of the goal"), lambda: self.goal),
            Quantity(Term("goal_from_tcp", 3, "m", "base", difference=Difference("goal", "tcp_pos"))),
        )

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("distance", 1, "m"), lambda: column(self._distance())),)

    def _distance(self) -> Tensor:
        return distance(self.goal, self.view.tcp_pos)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {"reach": 0.5 * near(self._distance(), 0.15 * self.scale.reach), "at_goal": 0.5 * success}

    def success(self) -> Tensor:
        return self._distance() < self.config.success_m

    def expert(self) -> Tensor:
        return move_towards(self.view, self.goal, gripper=torch.ones_like(self.goal[:, 0]))
