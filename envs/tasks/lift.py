"""Lift: grasp a cube and hold it at a goal in the air."""

from __future__ import annotations

import mujoco
import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.options import Fraction, PositiveInt, config_dataclass
from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import add_goal
from embodied.envs.mujoco.view import View
from embodied.envs.registry import TASKS
from embodied.envs.tasks.base import Quantity, near, progress
from embodied.envs.tasks.common import (
    CubeConfig,
    GraspedCubeTask,
    cube_quantities,
    draw,
    firmly_grasped,
    grasp_move,
    grasp_reward,
    move_towards,
    reach_reward,
)


@config_dataclass
class LiftConfig(CubeConfig):
    """Options of Lift."""

    max_episode_steps: PositiveInt = 64
    """Time limit, control steps."""
    held_starts: Fraction = 0.3
    """Share of the training episodes that start with the object in the hand; see ``TaskConfig``."""
    goal_low_m: tuple[float, float, float] = (0.45, -0.15, 0.12)
    """Box of goals in the air."""
    goal_high_m: tuple[float, float, float] = (0.65, 0.15, 0.3)
    """Opposite corner of that box."""
    success_m: float = 0.03
    """Greatest distance from the goal that counts as success."""


@TASKS.register("lift", config=LiftConfig)
class Lift(GraspedCubeTask):
    """Grasp a cube and hold it at a goal in the air."""

    name = "lift"
    instruction = "lift the red cube to the green sphere"
    config: LiftConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        add_goal(spec, "goal", self.config.success_m)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.goal = view.mocap("goal")

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.goal[ids] = draw(self.view, rng, "goal", self.config.goal_low_m, self.config.goal_high_m)

    def observed(self) -> tuple[Quantity, ...]:
        return (
            *cube_quantities(self, "cube"),
            Quantity(Term("goal", 3, "m", "base", meaning="x, y, z of the goal"), lambda: self.goal),
            Quantity(Term("goal_from_cube", 3, "m", "base", difference=Difference("goal", "cube_pos"))),
        )

    def _goal_distance(self) -> Tensor:
        """Return the distance of the cube from the goal, [N]."""
        distance: Tensor = vector_norm(self.goal - self.cube, dim=-1)
        return distance

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        grasped, distance = self.view.grasped("cube"), self._goal_distance()
        height = ((self.cube[:, 2] - self.config.cube_half_m) / 0.08).clamp(0, 1)
        return {
            "reach": 0.1 * reach_reward(self.view, "cube"),
            "grasp": 0.1 * grasp_reward(self.view, "cube"),
            "lift": 0.15 * grasped * height,
            "carry": 0.35 * grasped * (0.5 * progress(distance, 0.4) + 0.5 * near(distance, 0.06)),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        return (self._goal_distance() < self.config.success_m) & self.view.grasped("cube")

    def expert(self) -> Tensor:
        target, gripper = grasp_move(self.view, "cube")
        carried = firmly_grasped(self.view, "cube")
        low = self.cube[:, 2:] < 0.05  # straight up first: a cube that drags along the table turns in the hand
        way = torch.cat([torch.where(low, 0.0, (self.goal - self.cube)[:, :2]), (self.goal - self.cube)[:, 2:]], dim=-1)
        target = torch.where(carried.unsqueeze(-1), self.view.tcp_pos + way, target)
        return move_towards(self.view, target, gripper, limit=torch.where(carried, 0.5, 1.0))
