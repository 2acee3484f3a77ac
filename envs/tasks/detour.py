"""Detour: bring the gripper to a goal behind a post, which can be passed on either side.

Seen along the way from the post to the goal, the two ways mirror each other, and neither is shorter. The expert takes
one of them at random, so demonstrations show two ways of acting in the same state.
"""

from collections.abc import Mapping

import mujoco
import torch
from torch import Tensor
from torch.nn.functional import normalize

from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import RED, add_post
from embodied.envs.mujoco.view import View
from embodied.envs.tasks.base import Quantity, column, distance, near, progress
from embodied.envs.tasks.common import GoalTask, draw, move_towards
from embodied.envs.tasks.config import DetourConfig

LEFT, RIGHT = "passed_left", "passed_right"
BESIDE_M = 0.04  # a tool that is this near the post along the way is beside it
CLEARANCE_M = 0.05  # distance from the forbidden column at which the expert passes


class Detour(GoalTask):
    """Bring the tool centre point to a goal behind a post."""

    name = "detour"
    recordable = True
    instruction = "move the gripper around the red post to the green sphere"
    other_outcomes = (LEFT, RIGHT)
    config: DetourConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_post(spec, "post", self.config.keep_out_m / 2, 0.25 * self.scale.reach, RED)
        super().build_scene(spec)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.post = view.mocap("post")
        self.side = torch.ones_like(self.goal[:, 0])  # on which the expert passes: left 1, right -1

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.post[ids, :2] = draw(self.view, rng, "post", self.config.post_low_m, self.config.post_high_m)
        self.side[ids] = self.view.tensor(rng.uniform("side", -1.0, 1.0)).sign()

    def observed(self) -> tuple[Quantity, ...]:
        post = Term("post_from_tcp", 2, "m", "base", meaning="x, y of the post minus those of the tool centre point")
        return (
            Quantity(Term("goal", 3, "m", "base", meaning="x, y, z of the goal"), lambda: self.goal),
            Quantity(Term("goal_from_tcp", 3, "m", "base", difference=Difference("goal", "tcp_pos"))),
            Quantity(Term("post", 2, "m", "base"), lambda: self.post[:, :2], observed=False),
            Quantity(post, compute=lambda parts: parts["post"] - parts["tcp_pos"][:, :2]),
        )

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("way", 1, "m"), lambda: column(self._way())),)

    def _axes(self) -> tuple[Tensor, Tensor]:
        """Return the horizontal directions from the post to the goal, and to the left of that, each [N, 2]."""
        forward = normalize((self.goal - self.post)[:, :2], dim=-1)
        return forward, torch.stack([-forward[:, 1], forward[:, 0]], -1)

    def _from_post(self) -> tuple[Tensor, Tensor]:
        """Return how far the tool is beyond the post, and how far to the left of it, m, each [N]."""
        forward, left = self._axes()
        offset = (self.view.tcp_pos - self.post)[:, :2]
        return (offset * forward).sum(-1), (offset * left).sum(-1)

    def _point(self, forward_m: float, left: Tensor | float) -> Tensor:
        """Return the point this far beyond the post and this far to the left of it, at the goal's height, [N, 3]."""
        forward_axis, left_axis = self._axes()
        offset = forward_axis * forward_m + left_axis * (left if isinstance(left, float) else left.unsqueeze(-1))
        return torch.cat([self.post[:, :2] + offset, self.goal[:, 2:]], -1)

    def _way(self) -> Tensor:
        """Return the length of the shorter way to the goal, m [N]."""
        tcp, goal = self.view.tcp_pos, self.goal
        aside = self.config.keep_out_m + CLEARANCE_M * self.scale.reach
        beside = self._point(0.0, aside), self._point(0.0, -aside)
        around = [distance(point, tcp) + distance(goal, point) for point in beside]
        return torch.where(self._from_post()[0] > 0, distance(goal, tcp), torch.minimum(*around))

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        way = self._way()
        return {
            "way": 0.3 * torch.where(success, 1.0, progress(way, 0.6 * self.scale.reach)),
            "near": 0.2 * torch.where(success, 1.0, near(way, 0.1 * self.scale.reach)),
            "at_goal": 0.5 * success,
        }

    def success(self) -> Tensor:
        return distance(self.goal, self.view.tcp_pos) < self.config.success_m

    def failure(self) -> Tensor:
        return distance(self.view.tcp_pos[:, :2], self.post[:, :2]) < self.config.keep_out_m

    def outcomes(self) -> dict[str, Tensor]:
        """Return whether the tool is beside the post, outside of the forbidden column, on its left and on its right."""
        forward, left = self._from_post()
        beside, keep_out = forward.abs() < BESIDE_M * self.scale.reach, self.config.keep_out_m
        return {LEFT: beside & (left > keep_out), RIGHT: beside & (left < -keep_out)}

    def expert(self) -> Tensor:
        """Go to the front of the post, aside, past it, and to the goal: on the side of the episode."""
        keep_out, (forward, left), reach = self.config.keep_out_m, self._from_post(), self.scale.reach
        # an arm that a disturbance took past the other side goes on there
        side = torch.where((left.abs() > keep_out) & (forward > -keep_out), left.sign(), self.side)
        aside = side * (keep_out + CLEARANCE_M * reach)
        at_front = (left * side > -0.01 * reach) & (forward > -keep_out - 0.07 * reach) | (left * side > 0.03 * reach)
        at_side = left * side > keep_out + 0.01 * reach
        behind = -keep_out - 0.05 * reach
        front, corner = self._point(behind, 0.0), self._point(behind, aside)
        target = torch.where(at_side.unsqueeze(-1), self._point(0.03 * reach, aside), corner)
        target = torch.where(at_front.unsqueeze(-1), target, front)
        target = torch.where((forward > 0.01 * reach).unsqueeze(-1), self.goal, target)
        return move_towards(self.view, target, gripper=torch.ones_like(target[:, 0]), limit=0.5)

    def state_dict(self) -> dict[str, Tensor]:
        return {"task/side": self.side.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.side.copy_(state["task/side"])
