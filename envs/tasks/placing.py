"""Base of the tasks that put an object into a walled tray, where it must be at rest with no finger on it."""

import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.options import Fraction, config_dataclass
from embodied.envs.tasks import common
from embodied.envs.tasks.base import distance, near, progress


@config_dataclass
class PlacingConfig(common.ObjectTaskConfig):
    """Options of tasks that place an object in a tray."""

    held_starts: Fraction = 0.3
    tray_half_m: float = 0.08
    """Half width of the space between the walls."""
    wall_m: float = 0.065
    """Height of the walls."""
    carry_m: float = 0.1
    """Height of the object's centre at which it passes the wall with some clearance."""
    rest_speed_m_s: float = 0.05
    """Greatest speed of an object at rest."""


class Placing(common.ObjectTask):
    """Rewards, success and expert of placing one object in one tray. A subclass's ``bind`` sets the attributes."""

    config: PlacingConfig
    tray: Tensor
    """Centre of the tray that the object goes into, [N, 3], m."""
    half_height_m: float | Tensor
    """Half height of the object, a number or [N]."""

    def _above(self) -> Tensor:
        """Return whether the object is within the tray's walls as seen from above, bool [N]."""
        inner = self.config.tray_half_m - self.half_width_m / 2
        return (self.object - self.tray)[:, :2].abs().amax(dim=-1) < inner

    def _inside(self) -> Tensor:
        """Return whether the object is within the walls and its centre below their upper edge, bool [N]."""
        return self._above() & (self.object[:, 2] < self.config.wall_m)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        config, above, inside, name = self.config, self._above(), self._inside(), self.objects[0]
        grasped = self.view.grasped(name)
        height = ((self.object[:, 2] - self.half_height_m) / (config.carry_m - self.half_height_m)).clamp(0, 1)
        height = torch.where(above, 1.0, height)
        horizontal = distance(self.object[:, :2], self.tray[:, :2])
        vertical = torch.where(above, 0.0, self.object[:, 2] - config.carry_m)
        to_tray = torch.hypot(horizontal, vertical)
        across = 0.5 * progress(to_tray, 0.6) + 0.5 * near(to_tray, 0.1)
        low = progress(self.object[:, 2] - self.half_height_m, 0.15)
        return {
            "reach": 0.1 * torch.where(inside, 1.0, common.reach_reward(self.view, name)),
            "grasp": 0.1 * torch.where(inside, 1.0, common.grasp_reward(self.view, name)),
            "lift": 0.1 * torch.where(inside, 1.0, grasped * height),
            "carry": 0.2 * torch.where(inside, 1.0, grasped * height * across),
            "lower": 0.15 * torch.where(inside, 1.0, grasped * above * low),
            "release": 0.1 * inside * self.view.arm.opening(),
            "placed": 0.25 * success,
        }

    def success(self) -> Tensor:
        resting: Tensor = vector_norm(self.object_vel, dim=-1) < self.config.rest_speed_m_s
        return self._inside() & resting & ~self.view.touched(self.objects[0])

    def expert(self) -> Tensor:
        config = self.config
        target, gripper = common.grasp_move(self.view, self.objects[0])
        grasped, above, tcp = self.view.grasped(self.objects[0]), self._above(), self.view.tcp_pos
        over_tray = self.tray + torch.tensor([0, 0, config.carry_m + 0.02], device=self.tray.device)
        ready = (self.object[:, 2] > config.carry_m - 0.02) | above
        way = torch.where(ready.unsqueeze(-1), over_tray, torch.cat([self.object[:, :2], over_tray[:, 2:]], -1))
        target = torch.where(grasped.unsqueeze(-1), tcp + way - self.object, target)
        let_go = (distance(self.object[:, :2], self.tray[:, :2]) < 0.03) & above | self._inside()
        retreat = torch.cat([tcp[:, :2], torch.full_like(tcp[:, 2:], 0.2)], dim=-1)
        target = torch.where(let_go.unsqueeze(-1), retreat, target)
        return common.move_towards(self.view, target, torch.where(let_go, 1.0, gripper))
