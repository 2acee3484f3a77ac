"""Stack: put the red cube on the blue cube and let go."""

import mujoco
import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import BLUE, add_cube
from embodied.envs.mujoco.view import View
from embodied.envs.tasks import common
from embodied.envs.tasks.base import Quantity, distance, progress
from embodied.envs.tasks.config import StackConfig


class Stack(common.CubeTask):
    """Put the red cube on the blue cube and let go."""

    name = "stack"
    recordable = True
    instruction = "put the red cube on the blue cube"
    objects = ("cube", "base")
    held_object = "cube"
    config: StackConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        add_cube(spec, "base", self.config.base_half_m, self.config.base_mass_kg, BLUE)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.base = view.body_qpos("base")[:, :3]

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        position = common.draw(self.view, rng, "base_pos", self.config.base_low_m, self.config.base_high_m)
        common.stand(self.view, "base", ids, rng, position, self.config.base_half_m)

    @property
    def _offset(self) -> tuple[float, float, float]:
        """Centre of the stacked red cube minus that of the blue one, m; of cubes whose sizes do not vary."""
        return (0.0, 0.0, self.config.cube_half_m + self.config.base_half_m)

    def observed(self) -> tuple[Quantity, ...]:
        top = Difference("base_pos", "cube_pos", offset=self._offset)
        return (
            *common.cube_quantities(self, "cube"),
            *common.cube_quantities(self, "base"),
            Quantity(Term("top_from_cube", 3, "m", "base", difference=top)),
        )

    def _top(self) -> Tensor:
        """Return where the red cube's centre is on top of the blue cube, m [N, 3]."""
        top = self.base.clone()
        top[:, 2] += self.config.cube_half_m * self.view.size_factor("cube") + self._base_half_m()
        return top

    def _base_half_m(self) -> Tensor | float:
        return self.config.base_half_m * self.view.size_factor("base")

    def _on_base(self) -> Tensor:
        """Return whether the red cube stands on the blue one, which is on the table, bool [N]."""
        offset = self.cube - self._top()
        near_top = offset[:, 2].abs() < 0.008 * self.scale.size
        over: Tensor = vector_norm(offset[:, :2], dim=-1) < self._base_half_m()
        return over & near_top & common.on_table(self.view, "base", self.config.base_half_m)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        on_base, grasped, offset = self._on_base(), self.view.grasped("cube"), self.cube - self._top()
        over = vector_norm(offset[:, :2], dim=-1) < self._base_half_m()
        height_m = 2 * self.config.base_half_m + 0.02 * self.scale.size
        height = ((self.cube[:, 2] - self.config.cube_half_m) / height_m).clamp(0, 1)
        height = torch.where(over, 1.0, height)
        across = progress(vector_norm(offset, dim=-1), 0.4 * self.scale.reach)
        return {
            "reach": 0.1 * torch.where(on_base, 1.0, common.reach_reward(self.view, "cube")),
            "grasp": 0.1 * torch.where(on_base, 1.0, common.grasp_reward(self.view, "cube")),
            "lift": 0.15 * torch.where(on_base, 1.0, grasped * height),
            "carry": 0.25 * torch.where(on_base, 1.0, grasped * height * across),
            "release": 0.1 * on_base * self.view.arm.opening(),
            "stacked": 0.3 * success,
        }

    def success(self) -> Tensor:
        resting: Tensor = vector_norm(self.object_vel, dim=-1) < 0.05
        return self._on_base() & resting & ~self.view.touched("cube")

    def expert(self) -> Tensor:
        reach, size = self.scale
        target, gripper = common.grasp_move(self.view, "cube", self.half_width_m)
        carried, tcp = common.firmly_grasped(self.view, "cube"), self.view.tcp_pos
        top, cube = self._top(), self.cube
        horizontal = distance(top[:, :2], cube[:, :2])
        # up first, then across, and down into a funnel over the blue cube
        height = top[:, 2] + ((horizontal - 0.004 * size) * 4).clamp(-0.004 * size, 0.05 * size)
        low = cube[:, 2] < height - 0.02 * size
        way = torch.where(low.unsqueeze(-1), cube, top)
        way = torch.cat([way[:, :2], height.unsqueeze(-1)], dim=-1)
        target = torch.where(carried.unsqueeze(-1), tcp + way - cube, target)
        let_go = self._on_base() & ((horizontal < 0.012 * size) | ~self.view.grasped("cube"))
        retreat = torch.cat([tcp[:, :2], torch.full_like(tcp[:, 2:], 0.25 * reach)], dim=-1)
        wait = ((self.view.arm.opening() < 0.75) & self.view.touched("cube")).unsqueeze(-1)
        target = torch.where(let_go.unsqueeze(-1), torch.where(wait, tcp, retreat), target)
        gripper = torch.where(let_go, 1.0, gripper)
        limit = torch.where(carried & (horizontal < 0.03 * size), 0.3, torch.where(carried, 0.6, 1.0))
        return common.move_towards(self.view, target, gripper, limit, around="cube")
