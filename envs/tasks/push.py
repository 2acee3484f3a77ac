"""Push: slide a cube to a mark on the table with the closed gripper."""

import torch
from torch import Tensor

from embodied.core.spec import Difference, Term
from embodied.envs.tasks.base import Quantity, distance, near
from embodied.envs.tasks.common import CubeTask, GoalTask, cube_quantities, move_towards, on_table
from embodied.envs.tasks.config import PushConfig


class Push(GoalTask, CubeTask):
    """Slide a cube to a mark on the table."""

    name = "push"
    recordable = True
    instruction = "push the red cube to the green mark"
    config: PushConfig

    def observed(self) -> tuple[Quantity, ...]:
        return (
            *cube_quantities(self, "cube"),
            Quantity(Term("goal", 2, "m", "base", meaning="x, y of the mark"), lambda: self.goal[:, :2]),
            Quantity(Term("goal_from_cube", 2, "m", "base", difference=Difference("goal", "cube_pos"))),
        )

    def _goal_distance(self) -> Tensor:
        return distance(self.goal[:, :2], self.cube[:, :2])

    def _direction(self) -> Tensor:
        """Return the horizontal direction from the cube to the goal, [N, 2]."""
        return (self.goal - self.cube)[:, :2] / self._goal_distance().unsqueeze(-1).clamp(min=1e-6)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        reach, size = self.scale
        back = self.cube[:, :2] - self._direction() * (self.config.cube_half_m + 0.025 * size)
        # from there it can push straight
        behind = torch.cat([back, torch.full_like(self.cube[:, 2:], 0.02 * size)], dim=-1)
        near_behind, to_goal = near(distance(behind, self.view.arm.tip()), 0.15 * reach), self._goal_distance()
        return {
            "behind": 0.2 * torch.where(success, 1.0, near_behind),
            "push": 0.5 * (0.5 * near(to_goal, 0.15 * reach) + 0.5 * near(to_goal, 0.04 * reach)),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        return (self._goal_distance() < self.config.success_m) & on_table(self.view, "cube", self.config.cube_half_m)

    def expert(self) -> Tensor:
        tcp, cube, direction, (reach, size) = self.view.arm.tip(), self.cube, self._direction(), self.scale
        to_goal = self._goal_distance().unsqueeze(-1)
        offset = (tcp - cube)[:, :2]
        along = (offset * direction).sum(-1, keepdim=True)
        across = offset - along * direction
        start = cube[:, :2] - direction * 0.06 * size
        low, high = tcp[:, 2:] < 0.03 * size, tcp[:, 2:] > 0.08 * size
        error = across.norm(dim=-1, keepdim=True)
        behind = (along < -0.025 * size) & (error < 0.05 * size)
        over_start = (tcp[:, :2] - start).norm(dim=-1, keepdim=True) < 0.02 * size
        aligned = (1 - error / (0.02 * size)).clamp(min=0)  # otherwise back off and align first
        advance = aligned * (to_goal / 2).clamp(max=0.016 * size) + (1 - aligned) * (-0.06 * size - along)
        push = tcp[:, :2] + (direction * advance - across) * self.view.arm.lead
        horizontal = torch.where(low & behind, push, torch.where(high | over_start, start, tcp[:, :2]))
        height = torch.where(low & behind | over_start, self.robot.workspace_m[0][2] + 0.002 * size, 0.11 * size)
        done = (to_goal < 0.02 * reach) & on_table(self.view, "cube", self.config.cube_half_m).unsqueeze(-1)
        target = torch.where(done, tcp, torch.cat([horizontal, height], dim=-1)) + (self.view.tcp_pos - tcp)
        turn = torch.atan2(direction[:, 1], direction[:, 0]) - self.view.yaw() + self.view.arm.side_rad
        turn = turn - (turn / torch.pi).round() * torch.pi
        return move_towards(self.view, target, gripper=-torch.ones_like(tcp[:, 0]), turn=turn)
