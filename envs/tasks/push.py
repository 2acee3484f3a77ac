"""Push: slide a cube to a mark on the table with the closed gripper."""

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
from embodied.envs.tasks.base import Quantity, near
from embodied.envs.tasks.common import CubeConfig, CubeTask, cube_quantities, draw, move_towards


@config_dataclass
class PushConfig(CubeConfig):
    """Options of Push."""

    max_episode_steps: PositiveInt = 64
    """Time limit, control steps."""
    cube_half_m: float = 0.025
    cube_mass_kg: float = 0.1
    cube_low_m: tuple[float, float] = (0.42, -0.12)
    cube_high_m: tuple[float, float] = (0.52, 0.12)
    goal_low_m: tuple[float, float] = (0.6, -0.12)
    """Area of the table where the mark may be."""
    goal_high_m: tuple[float, float] = (0.7, 0.12)
    """Opposite corner of that area."""
    success_m: float = 0.03
    """Greatest horizontal distance from the mark that counts as success."""


@TASKS.register("push", config=PushConfig)
class Push(CubeTask):
    """Slide a cube to a mark on the table."""

    name = "push"
    instruction = "push the red cube to the green mark"
    config: PushConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        add_goal(spec, "goal", self.config.success_m)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.goal = view.mocap("goal")

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.goal[ids, :2] = draw(self.view, rng, "goal", self.config.goal_low_m, self.config.goal_high_m)
        self.goal[ids, 2] = 0.0

    def observed(self) -> tuple[Quantity, ...]:
        return (
            *cube_quantities(self, "cube"),
            Quantity(Term("goal", 2, "m", "base", meaning="x, y of the mark"), lambda: self.goal[:, :2]),
            Quantity(Term("goal_from_cube", 2, "m", "base", difference=Difference("goal", "cube_pos"))),
        )

    def _goal_distance(self) -> Tensor:
        """Return the horizontal distance of the cube from the goal, [N]."""
        distance: Tensor = vector_norm((self.goal - self.cube)[:, :2], dim=-1)
        return distance

    def _behind(self) -> Tensor:
        """Return the point behind the cube from which to push it straight to the goal, [N, 3]."""
        direction = (self.goal - self.cube)[:, :2]
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        back = self.cube[:, :2] - direction * (self.config.cube_half_m + 0.025)
        return torch.cat([back, torch.full_like(self.cube[:, 2:], 0.02)], dim=-1)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        behind, distance = near(vector_norm(self._behind() - self.view.tcp_pos, dim=-1), 0.15), self._goal_distance()
        return {
            "behind": 0.2 * torch.where(success, 1.0, behind),
            "push": 0.5 * (0.5 * near(distance, 0.15) + 0.5 * near(distance, 0.04)),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        on_table = (self.cube[:, 2] - self.config.cube_half_m).abs() < 0.01
        return (self._goal_distance() < self.config.success_m) & on_table

    def expert(self) -> Tensor:
        tcp, cube = self.view.tcp_pos, self.cube
        to_goal = (self.goal - cube)[:, :2]
        distance = to_goal.norm(dim=-1, keepdim=True)
        direction = to_goal / distance.clamp(min=1e-6)
        offset = (tcp - cube)[:, :2]
        along = (offset * direction).sum(-1, keepdim=True)
        across = offset - along * direction
        start = cube[:, :2] - direction * 0.06
        low, high = tcp[:, 2:] < 0.03, tcp[:, 2:] > 0.08
        error = across.norm(dim=-1, keepdim=True)
        behind = (along < -0.025) & (error < 0.05)
        over_start = (tcp[:, :2] - start).norm(dim=-1, keepdim=True) < 0.02
        aligned = (1 - error / 0.02).clamp(min=0)  # otherwise back off and align first
        advance = aligned * (distance / 2).clamp(max=0.016) + (1 - aligned) * (-0.06 - along)
        push = tcp[:, :2] - across + direction * advance
        horizontal = torch.where(low & behind, push, torch.where(high | over_start, start, tcp[:, :2]))
        height = torch.where(low & behind | over_start, 0.014, 0.11)
        done = (distance < 0.02) & ((cube[:, 2:] - self.config.cube_half_m).abs() < 0.01)
        target = torch.where(done, tcp, torch.cat([horizontal, height], dim=-1))
        return move_towards(self.view, target, gripper=-torch.ones_like(tcp[:, 0]))
