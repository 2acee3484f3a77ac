"""Lift: grasp a cube and hold it at a goal in the air."""

import torch
from torch import Tensor

from embodied.core.spec import Difference, Term
from embodied.envs.tasks import common
from embodied.envs.tasks.base import Quantity, distance, near, progress
from embodied.envs.tasks.config import LiftConfig


class Lift(common.GoalTask, common.CubeTask):
    """Grasp a cube and hold it at a goal in the air."""

    name = "lift"
    recordable = True
    instruction = "lift the red cube to the green sphere"
    held_object = "cube"
    config: LiftConfig

    def observed(self) -> tuple[Quantity, ...]:
        return (
            *common.cube_quantities(self, "cube"),
            Quantity(Term("goal", 3, "m", "base", meaning="x, y, z of the goal"), lambda: self.goal),
            Quantity(Term("goal_from_cube", 3, "m", "base", difference=Difference("goal", "cube_pos"))),
        )

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        grasped, to_goal = self.view.grasped("cube"), distance(self.goal, self.cube)
        reach = self.scale.reach
        height = ((self.cube[:, 2] - self.config.cube_half_m) / (0.08 * reach)).clamp(0, 1)
        return {
            "reach": 0.1 * common.reach_reward(self.view, "cube"),
            "grasp": 0.1 * common.grasp_reward(self.view, "cube"),
            "lift": 0.15 * grasped * height,
            "carry": 0.35 * grasped * (0.5 * progress(to_goal, 0.4 * reach) + 0.5 * near(to_goal, 0.06 * reach)),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        return (distance(self.goal, self.cube) < self.config.success_m) & self.view.grasped("cube")

    def expert(self) -> Tensor:
        target, gripper = common.grasp_move(self.view, "cube", self.half_width_m)
        carried = common.firmly_grasped(self.view, "cube")
        # straight up first: a cube that drags along the table turns in the hand
        low = self.cube[:, 2:] < 0.05 * self.scale.reach
        way = torch.cat([torch.where(low, 0.0, (self.goal - self.cube)[:, :2]), (self.goal - self.cube)[:, 2:]], dim=-1)
        target = torch.where(carried.unsqueeze(-1), self.view.tcp_pos + way, target)
        limit = torch.where(carried, 0.5, 1.0)
        return common.move_towards(self.view, target, gripper, limit, around="cube")
