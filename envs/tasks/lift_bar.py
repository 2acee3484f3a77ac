"""Lift a bar: two arms lift a bar by the handles at its ends, and hold it level at a height.

It is too heavy for one hand at one end, in which it would tilt.
"""

from collections.abc import Mapping
from itertools import product

import mujoco
import torch
from torch import Tensor

from embodied.core.spec import Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import SIDES
from embodied.envs.mujoco.robots.base import Robot
from embodied.envs.mujoco.robots.described import build_robot
from embodied.envs.mujoco.robots.pair import Pair
from embodied.envs.mujoco.scene import add_bar, add_goal
from embodied.envs.mujoco.view import View
from embodied.envs.tasks import common
from embodied.envs.tasks.base import Quantity, Task, near, progress
from embodied.envs.tasks.config import LiftBarConfig


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
        return Pair(build_robot(self.config.robots[SIDES[0]], self.config.control), self.config.apart_m)

    def corners(self) -> list[tuple[str, tuple[float, ...]]]:
        """Return the middles of both handles of bars in the corners of the area, m, left first."""
        config, half_m = self.config, self.config.bar_length_m / 2
        places = product(*zip(config.bar_low_m, config.bar_high_m, strict=True), config.height_m)
        return [("bar_low_m", (x, y + half_m, z, x, y - half_m, z)) for x, y, z in places]

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_bar(spec, "bar", self.config.bar_length_m, self.config.handle_half_m, self.config.bar_mass_kg)
        add_goal(spec, "goal", self.config.success_m)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.goal, self.hands = view.mocap("goal"), [(view.views[i], f"{SIDES[i]}_handle") for i in range(2)]

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        config, view = self.config, self.view
        place = common.draw(view, rng, "bar_pos", config.bar_low_m, config.bar_high_m)
        common.stand(view, "bar", ids, rng, place, config.handle_half_m / 2, config.yaw_rad)
        self.goal[ids, :2], self.goal[ids, 2] = place, view.tensor(rng.uniform("height", *config.height_m))

    def observed(self) -> tuple[Quantity, ...]:
        below = Term("handles_below_goal", 2, "m", meaning="height of the goal minus that of each handle, left first")
        handles = [common.cube_quantities(self, f"{side}_handle", f"{side}_tcp_pos") for side in SIDES]
        goal = Quantity(Term("goal", 3, "m", "base"), lambda: self.goal, observed=False)
        return *handles[0], *handles[1], goal, Quantity(below, compute=self._below_goal)

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (
            Quantity(Term("handles_grasped", 2), lambda: self._grasped().to(self.goal.dtype)),
            Quantity(Term("bar_vel", 6, "m/s, rad/s"), lambda: self.view.body_qvel("bar")),
        )

    def _below(self) -> Tensor:
        """Return how far each handle is below the goal, m [N, 2]."""
        return self._below_goal({"goal": self.goal} | {f"{name}_pos": view.position(name) for view, name in self.hands})

    def _below_goal(self, places: Mapping[str, Tensor]) -> Tensor:
        """Return how far each handle is below the goal, m [N, 2], from their places by name."""
        return places["goal"][:, 2:] - torch.stack([places[f"{side}_handle_pos"][:, 2] for side in SIDES], -1)

    def _grasped(self) -> Tensor:
        """Return whether each hand holds its handle, bool [N, 2]."""
        return torch.stack([view.grasped(name) for view, name in self.hands], -1)

    def _off(self) -> Tensor:
        """Return the greatest distance of a handle from the goal's height, and from the other's, m [N]."""
        below = self._below()
        return torch.cat([below, below.diff()], -1).abs().amax(-1)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        reach, off, held = self.scale.reach, self._off(), self._grasped().all(-1)
        lowest = self.goal[:, 2] - self._below().amax(-1)
        return {
            "reach": 0.1 * torch.stack([common.reach_reward(*hand) for hand in self.hands]).mean(0),
            "grasp": 0.1 * torch.stack([common.grasp_reward(*hand) for hand in self.hands]).mean(0),
            "lift": 0.15 * held * ((lowest - self.rest_m) / (0.08 * reach)).clamp(0, 1),
            "carry": 0.35 * held * (0.5 * progress(off, 0.4 * reach) + 0.5 * near(off, 0.06 * reach)),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        return (self._off() < self.config.success_m) & self._grasped().all(-1)

    def expert(self) -> Tensor:
        """Grasp both handles, then lift both ends."""
        moves, carried, below = [], self._grasped().all(-1), self._below()
        for i, (view, name) in enumerate(self.hands):
            target, gripper = common.grasp_move(view, name, self.half_width_m)
            up = torch.cat([view.tcp_pos[:, :2], view.tcp_pos[:, 2:] + below[:, i : i + 1]], -1)
            target, limit = torch.where(carried.unsqueeze(-1), up, target), torch.where(carried, 0.5, 1.0)
            moves.append(common.move_towards(view, target, gripper, limit, around=name))
        return torch.cat(moves, -1)
