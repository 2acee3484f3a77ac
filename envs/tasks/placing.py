"""Base of the tasks that put an object into a walled tray and let go.

Success needs the object at rest inside the walls with no finger on it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.options import Fraction, PositiveInt, config_dataclass
from embodied.core.spec import StartStage
from embodied.envs.tasks.base import ObjectTaskConfig, Quantity, Task, near, progress
from embodied.envs.tasks.common import (
    cube_contacts,
    grasp_move,
    grasp_reward,
    move_towards,
    out_of_reach,
    put_cube_in_hand,
    reach_reward,
)


@config_dataclass
class PlacingConfig(ObjectTaskConfig):
    """Options of tasks that place an object in a tray."""

    max_episode_steps: PositiveInt = 80
    """Time limit, control steps."""
    held_starts: Fraction = 0.3
    """Share of the training episodes that start with the object in the hand; see ``TaskConfig``."""
    tray_half_m: float = 0.08
    """Half width of the space between the walls."""
    wall_m: float = 0.065
    """Height of the walls."""
    carry_m: float = 0.1
    """Height of the object's centre at which it passes the wall with some clearance."""
    rest_speed_m_s: float = 0.05
    """Greatest speed of an object at rest."""


class Placing(Task):
    """Rewards, success and expert of placing one object in one tray. A subclass's ``bind`` sets the attributes."""

    config: PlacingConfig
    object_name: str
    """Name of the object's body."""
    object: Tensor
    """View of the object's position, [N, 3], m."""
    object_vel: Tensor
    """View of the object's velocity, [N, 3], m/s."""
    tray: Tensor
    """Centre of the tray that the object goes into, [N, 3], m."""
    half_width_m: float | Tensor
    """Half width of the object, a number or [N]."""
    half_height_m: float | Tensor
    """Half height of the object, a number or [N]."""

    def put_in_hand(self, ids: Tensor) -> None:
        width = self.half_width_m
        put_cube_in_hand(self.view, self.object_name, ids, width[ids, None] if isinstance(width, Tensor) else width)

    @property
    def stages(self) -> tuple[StartStage, ...]:
        return (StartStage("held", self.config.held_starts),)

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return cube_contacts(self, self.object_name)

    def _above(self) -> Tensor:
        """Return whether the object is within the tray's walls as seen from above, bool [N]."""
        inner = self.config.tray_half_m - self.half_width_m / 2
        return (self.object - self.tray)[:, :2].abs().amax(dim=-1) < inner

    def _inside(self) -> Tensor:
        """Return whether the object is within the walls and its centre below their upper edge, bool [N]."""
        return self._above() & (self.object[:, 2] < self.config.wall_m)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        config, above, inside = self.config, self._above(), self._inside()
        grasped = self.view.grasped(self.object_name)
        reach = reach_reward(self.view, self.object_name)
        height = ((self.object[:, 2] - self.half_height_m) / (config.carry_m - self.half_height_m)).clamp(0, 1)
        height = torch.where(above, 1.0, height)
        horizontal = vector_norm((self.object - self.tray)[:, :2], dim=-1)
        vertical = torch.where(above, 0.0, self.object[:, 2] - config.carry_m)
        distance = torch.hypot(horizontal, vertical)
        across = 0.5 * progress(distance, 0.6) + 0.5 * near(distance, 0.1)
        low = progress(self.object[:, 2] - self.half_height_m, 0.15)
        return {
            "reach": 0.1 * torch.where(inside, 1.0, reach),
            "grasp": 0.1 * torch.where(inside, 1.0, grasp_reward(self.view, self.object_name)),
            "lift": 0.1 * torch.where(inside, 1.0, grasped * height),
            "carry": 0.2 * torch.where(inside, 1.0, grasped * height * across),
            "lower": 0.15 * torch.where(inside, 1.0, grasped * above * low),
            "release": 0.1 * inside * self.view.opening(),
            "placed": 0.25 * success,
        }

    def success(self) -> Tensor:
        resting: Tensor = vector_norm(self.object_vel, dim=-1) < self.config.rest_speed_m_s
        return self._inside() & resting & ~self.view.touched(self.object_name)

    def failure(self) -> Tensor | None:
        return out_of_reach(self, self.object)

    def expert(self) -> Tensor:
        config = self.config
        target, gripper = grasp_move(self.view, self.object_name)
        grasped, above, tcp = self.view.grasped(self.object_name), self._above(), self.view.tcp_pos
        over_tray = self.tray + torch.tensor([0, 0, config.carry_m + 0.02], device=self.tray.device)
        ready = (self.object[:, 2] > config.carry_m - 0.02) | above
        way = torch.where(ready.unsqueeze(-1), over_tray, torch.cat([self.object[:, :2], over_tray[:, 2:]], -1))
        target = torch.where(grasped.unsqueeze(-1), tcp + way - self.object, target)
        centred = vector_norm((self.object - self.tray)[:, :2], dim=-1) < 0.03
        let_go = centred & above
        retreat = torch.cat([tcp[:, :2], torch.full_like(tcp[:, 2:], 0.2)], dim=-1)
        target = torch.where(let_go.unsqueeze(-1) | self._inside().unsqueeze(-1), retreat, target)
        gripper = torch.where(let_go | self._inside(), 1.0, gripper)
        return move_towards(self.view, target, gripper)
