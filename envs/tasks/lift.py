"""Lift: grasp a cube and hold it at a goal in the air."""

from __future__ import annotations

import mujoco
import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.options import Fraction, PositiveInt, config_dataclass
from embodied.core.spec import Difference, StartStage, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import RED, add_cube, add_goal
from embodied.envs.mujoco.view import View
from embodied.envs.registry import TASKS
from embodied.envs.tasks.base import ObjectTaskConfig, Task, near, progress
from embodied.envs.tasks.common import (
    cube_privileged,
    cube_privileged_terms,
    cube_state,
    cube_terms,
    firmly_grasped,
    grasp_move,
    grasp_reward,
    move_towards,
    out_of_reach,
    place_cube,
    put_cube_in_hand,
)


@config_dataclass
class LiftConfig(ObjectTaskConfig):
    """Options of Lift. ``low`` and ``high`` are opposite corners of an area (x, y) or a box (x, y, z)."""

    max_episode_steps: PositiveInt = 64
    """Time limit, control steps."""
    held_starts: Fraction = 0.3
    """Share of the training episodes that start with the object in the hand; see ``TaskConfig``."""
    cube_half_m: float = 0.02
    """Half the cube's edge."""
    cube_mass_kg: float = 0.064
    """Mass of the cube."""
    cube_low_m: tuple[float, float] = (0.45, -0.15)
    """Area of the table where the cube starts."""
    cube_high_m: tuple[float, float] = (0.65, 0.15)
    """Opposite corner of that area."""
    goal_low_m: tuple[float, float, float] = (0.45, -0.15, 0.12)
    """Box of goals in the air."""
    goal_high_m: tuple[float, float, float] = (0.65, 0.15, 0.3)
    """Opposite corner of that box."""
    success_m: float = 0.03
    """Greatest distance from the goal that counts as success."""


@TASKS.register("lift", config=LiftConfig)
class Lift(Task):
    """Grasp a cube and hold it at a goal in the air."""

    name = "lift"
    instruction = "lift the red cube to the green sphere"
    config: LiftConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_cube(spec, "cube", self.config.cube_half_m, self.config.cube_mass_kg, RED)
        add_goal(spec, "goal", self.config.success_m)

    def bind(self, view: View) -> None:
        self.view = view
        self.goal = view.mocap("goal")
        self.cube = view.body_qpos("cube")[:, :3]

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        place_cube(
            self.view, "cube", ids, rng, self.config.cube_low_m, self.config.cube_high_m, self.config.cube_half_m
        )
        goal = rng.uniform("goal", list(self.config.goal_low_m), list(self.config.goal_high_m))
        self.goal[ids] = self.view.tensor(goal)

    @property
    def stages(self) -> tuple[StartStage, ...]:
        return (StartStage("held", self.config.held_starts),)

    def put_in_hand(self, ids: Tensor) -> None:
        put_cube_in_hand(self.view, "cube", ids, self.config.cube_half_m)

    def state_terms(self) -> tuple[Term, ...]:
        offset = Term("goal_from_cube", 3, "m", "base", difference=Difference("goal", "cube_pos"))
        return (*cube_terms("cube"), Term("goal", 3, "m", "base", meaning="x, y, z of the goal"), offset)

    def privileged_terms(self) -> tuple[Term, ...]:
        return cube_privileged_terms("cube")

    def observe(self) -> dict[str, Tensor]:
        return {
            **cube_state(self.view, "cube"),
            "goal": self.goal,
            "goal_from_cube": self.goal - self.cube,
        }

    def privileged(self) -> dict[str, Tensor]:
        return cube_privileged(self.view, "cube")

    def _goal_distance(self) -> Tensor:
        """Return the distance of the cube from the goal, [N]."""
        distance: Tensor = vector_norm(self.goal - self.cube, dim=-1)
        return distance

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        grasped, distance = self.view.grasped("cube"), self._goal_distance()
        height = ((self.cube[:, 2] - self.config.cube_half_m) / 0.08).clamp(0, 1)
        return {
            "reach": 0.1 * near(vector_norm(self.cube - self.view.tcp_pos, dim=-1), 0.15),
            "grasp": 0.1 * grasp_reward(self.view, "cube"),
            "lift": 0.15 * grasped * height,
            "carry": 0.35 * grasped * (0.5 * progress(distance, 0.4) + 0.5 * near(distance, 0.06)),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        return (self._goal_distance() < self.config.success_m) & self.view.grasped("cube")

    def failure(self) -> Tensor | None:
        return out_of_reach(self, self.cube)

    def expert(self) -> Tensor:
        target, gripper = grasp_move(self.view, "cube")
        carried = firmly_grasped(self.view, "cube")
        low = self.cube[:, 2:] < 0.05  # straight up first: a cube that drags along the table turns in the hand
        way = torch.cat([torch.where(low, 0.0, (self.goal - self.cube)[:, :2]), (self.goal - self.cube)[:, 2:]], dim=-1)
        target = torch.where(carried.unsqueeze(-1), self.view.tcp_pos + way, target)
        return move_towards(self.view, target, gripper, limit=torch.where(carried, 0.5, 1.0))
