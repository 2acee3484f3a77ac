"""Lift a bar: two arms lift a bar by the handles at its ends, and hold it level at a height.

It is too heavy for one hand at one end, in which it would tilt.
"""

from itertools import product

import mujoco
import torch
from torch import Tensor

from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import SIDES
from embodied.envs.mujoco.robots.base import Robot
from embodied.envs.mujoco.robots.pair import Pair
from embodied.envs.mujoco.scene import add_bar, add_goal
from embodied.envs.mujoco.view import View
from embodied.envs.tasks import common
from embodied.envs.tasks.base import Quantity, Task, near, progress
from embodied.envs.tasks.config import LiftBarConfig

HANDLES = tuple(f"{side}_handle" for side in SIDES)


class LiftBar(Task):
    """Lift a bar at both ends to a height, and hold it level."""

    name = "lift_bar"
    recordable = True
    instruction = "lift the bar at both ends to the height of the green sphere"
    config: LiftBarConfig

    def __init__(self, config: LiftBarConfig) -> None:
        super().__init__(config)
        self.half_width_m = config.handle_half_m
        self.rest_m = 2.25 * config.handle_half_m  # height of the handles of a bar on the table
        common.check_gap(self, "handle_half_m", config.handle_half_m)

    def build_robot(self) -> Robot:
        return Pair(super().build_robot(), self.config.apart_m)

    def corners(self) -> list[tuple[str, tuple[float, ...]]]:
        """Return the middles of both handles of bars in the corners of the area, m, left first."""
        config, half_m = self.config, self.config.bar_length_m / 2
        places = product(*zip(config.bar_low_m, config.bar_high_m, strict=True), config.height_m)
        return [("bar_low_m", (x, y + half_m, z, x, y - half_m, z)) for x, y, z in places]

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        config = self.config
        add_bar(spec, "bar", HANDLES, config.bar_length_m, config.handle_half_m, config.bar_mass_kg)
        add_goal(spec, "goal", config.success_m)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.goal, self.hands = view.mocap("goal"), tuple(zip(view.views, HANDLES, strict=True))

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        config, view = self.config, self.view
        place = common.draw(view, rng, "bar_pos", config.bar_low_m, config.bar_high_m)
        common.stand(view, "bar", ids, rng, place, config.handle_half_m / 2, config.yaw_rad)
        self.goal[ids, :2], self.goal[ids, 2] = place, view.tensor(rng.uniform("height", *config.height_m))

    def observed(self) -> tuple[Quantity, ...]:
        below = Term("handles_below_goal", 2, "m", meaning="height of the goal minus that of each handle, left first")
        return (
            *(self._place_of(name) for name in HANDLES),
            *(self._offset_of(name, side) for name, side in zip(HANDLES, SIDES, strict=True)),
            Quantity(below, self._below),
        )

    def _place_of(self, name: str) -> Quantity:
        term = Term(f"{name}_pos", 3, "m", "base", meaning=f"x, y, z of the middle of {name}")
        return Quantity(term, lambda: self.view.position(name))

    def _offset_of(self, name: str, side: str) -> Quantity:
        difference = Difference(f"{name}_pos", f"{side}_tcp_pos")
        return Quantity(Term(f"{name}_from_tcp", 3, "m", "base", difference=difference))

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (
            Quantity(Term("handles_grasped", 2), lambda: self._grasped().to(self.goal.dtype)),
            Quantity(Term("bar_vel", 6, "m/s, rad/s"), lambda: self.view.body_qvel("bar")),
        )

    def _height(self) -> Tensor:
        """Return the height of each handle's middle, m [N, 2]."""
        return torch.stack([self.view.position(name)[:, 2] for name in HANDLES], -1)

    def _below(self) -> Tensor:
        """Return how far each handle is below the goal, m [N, 2]."""
        return self.goal[:, 2:] - self._height()

    def _grasped(self) -> Tensor:
        """Return whether each hand holds its handle, bool [N, 2]."""
        return torch.stack([view.grasped(name) for view, name in self.hands], -1)

    def _off(self) -> Tensor:
        """Return the greatest distance of a handle from the goal's height, and from the other's, m [N]."""
        below = self._below()
        return torch.cat([below, below.diff()], -1).abs().amax(-1)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        reach, off, held = self.scale.reach, self._off(), self._grasped().all(-1)
        height = ((self._height().amin(-1) - self.rest_m) / (0.08 * reach)).clamp(0, 1)
        return {
            "reach": 0.1 * torch.stack([common.reach_reward(*hand) for hand in self.hands]).mean(0),
            "grasp": 0.1 * torch.stack([common.grasp_reward(*hand) for hand in self.hands]).mean(0),
            "lift": 0.15 * held * height,
            "carry": 0.35 * held * (0.5 * progress(off, 0.4 * reach) + 0.5 * near(off, 0.06 * reach)),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        return (self._off() < self.config.success_m) & self._grasped().all(-1)

    def expert(self) -> Tensor:
        """Grasp both handles, then lift both ends."""
        moves, carried = [], self._grasped().all(-1)
        for (view, name), below in zip(self.hands, self._below().unbind(-1), strict=True):
            target, gripper = common.grasp_move(view, name)
            up = torch.cat([view.tcp_pos[:, :2], view.tcp_pos[:, 2:] + below.unsqueeze(-1)], -1)
            target = torch.where(carried.unsqueeze(-1), up, target)
            turn = view.turn_to("bar") * ~view.grasped(name)
            moves.append(common.move_towards(view, target, gripper, torch.where(carried, 0.5, 1.0), turn=turn))
        return torch.cat(moves, -1)
