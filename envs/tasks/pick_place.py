"""Pick and place: put a cube into a walled tray and let go.

The walls are higher than the cube, so that it cannot be pushed in; success needs the cube at rest inside the walls
with no finger on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from envs.registry import TASKS
from envs.scene import BLUE, RED, add_cube, add_tray
from envs.seeding import EpisodeRng
from envs.tasks.base import Task, TaskConfig, View, near, progress
from envs.tasks.common import (
    arm_state,
    cube_privileged,
    cube_state,
    grasp_move,
    grasp_reward,
    move_towards,
    place_cube,
    put_cube_in_hand,
)


@dataclass(frozen=True)
class PickPlaceConfig(TaskConfig):
    """cube_*, tray_*: table areas (m) where the cube and the tray's centre start; they do not overlap.

    carry_m: height of the cube's centre at which it passes the wall with some clearance.
    """

    max_episode_steps: int = 80
    held_starts: float = 0.3
    cube_half_m: float = 0.02
    cube_mass_kg: float = 0.064
    cube_low_m: tuple[float, float] = (0.45, -0.2)
    cube_high_m: tuple[float, float] = (0.65, 0.0)
    tray_low_m: tuple[float, float] = (0.45, 0.14)
    tray_high_m: tuple[float, float] = (0.65, 0.22)
    tray_half_m: float = 0.08
    wall_m: float = 0.065
    carry_m: float = 0.1
    rest_speed_m_s: float = 0.05


@TASKS.register("pick_place", config=PickPlaceConfig)
class PickPlace(Task):
    name = "pick_place"
    instruction = "put the red cube into the blue tray"
    config: PickPlaceConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_cube(spec, "cube", self.config.cube_half_m, self.config.cube_mass_kg, RED)
        add_tray(spec, "tray", self.config.tray_half_m, self.config.wall_m, BLUE)

    def bind(self, view: View) -> None:
        self.view = view
        self.tray = view.mocap("tray")
        self.cube = view.body_qpos("cube")[:, :3]
        self.cube_vel = view.body_qvel("cube")[:, :3]

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        place_cube(
            self.view, "cube", ids, rng, self.config.cube_low_m, self.config.cube_high_m, self.config.cube_half_m
        )
        tray = rng.uniform("tray", list(self.config.tray_low_m), list(self.config.tray_high_m))
        self.tray[ids, :2] = torch.from_numpy(tray)

    def put_in_hand(self, ids: Tensor) -> None:
        put_cube_in_hand(self.view, "cube", ids, self.config.cube_half_m)

    def observe(self) -> dict[str, Tensor]:
        return {
            **arm_state(self.view),
            **cube_state(self.view, "cube"),
            "tray": self.tray[:, :2],
            "tray_from_cube": self.tray - self.cube,
        }

    def privileged(self) -> dict[str, Tensor]:
        return cube_privileged(self.view, "cube")

    def _above(self) -> Tensor:
        """The cube is within the tray's walls seen from above, bool [N]."""
        inner = self.config.tray_half_m - self.config.cube_half_m / 2
        return (self.cube - self.tray)[:, :2].abs().amax(dim=-1) < inner

    def _inside(self) -> Tensor:
        """The cube is between the walls: above the tray's floor with its centre under the walls' upper edge."""
        return self._above() & (self.cube[:, 2] < self.config.wall_m)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        config, above, inside = self.config, self._above(), self._inside()
        grasped = self.view.grasped("cube")
        reach = near((self.cube - self.view.tcp_pos).norm(dim=-1), 0.15)
        height = ((self.cube[:, 2] - config.cube_half_m) / (config.carry_m - config.cube_half_m)).clamp(0, 1)
        height = torch.where(above, 1.0, height)
        horizontal = (self.cube - self.tray)[:, :2].norm(dim=-1)
        vertical = torch.where(above, 0.0, self.cube[:, 2] - config.carry_m)
        distance = torch.hypot(horizontal, vertical)
        across = 0.5 * progress(distance, 0.6) + 0.5 * near(distance, 0.1)
        low = progress(self.cube[:, 2] - config.cube_half_m, 0.15)
        return {
            "reach": 0.1 * torch.where(inside, 1.0, reach),
            "grasp": 0.1 * torch.where(inside, 1.0, grasp_reward(self.view, "cube")),
            "lift": 0.1 * torch.where(inside, 1.0, grasped * height),
            "carry": 0.2 * torch.where(inside, 1.0, grasped * height * across),
            "lower": 0.15 * torch.where(inside, 1.0, grasped * above * low),
            "release": 0.1 * inside * self.view.opening(),
            "placed": 0.25 * success,
        }

    def success(self) -> Tensor:
        resting = self.cube_vel.norm(dim=-1) < self.config.rest_speed_m_s
        return self._inside() & resting & ~self.view.touched("cube")

    def expert(self) -> Tensor:
        config = self.config
        target, gripper = grasp_move(self.view, "cube", config.control)
        grasped, above, tcp = self.view.grasped("cube"), self._above(), self.view.tcp_pos
        over_tray = self.tray + torch.tensor([0, 0, config.carry_m + 0.02])
        ready = (self.cube[:, 2] > config.carry_m - 0.02) | above
        way = torch.where(ready.unsqueeze(-1), over_tray, torch.cat([self.cube[:, :2], over_tray[:, 2:]], -1))
        target = torch.where(grasped.unsqueeze(-1), tcp + way - self.cube, target)
        centred = (self.cube - self.tray)[:, :2].norm(dim=-1) < 0.03
        let_go = centred & above
        retreat = torch.cat([tcp[:, :2], torch.full_like(tcp[:, 2:], 0.2)], dim=-1)
        target = torch.where(let_go.unsqueeze(-1) | self._inside().unsqueeze(-1), retreat, target)
        gripper = torch.where(let_go | self._inside(), 1.0, gripper)
        return move_towards(self.view, target, config.control, gripper)
