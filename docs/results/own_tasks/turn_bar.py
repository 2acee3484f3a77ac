"""Push and turn a bar that lies on the table until it lies on a marker."""

from __future__ import annotations

import mujoco
import torch
from torch import Tensor

from embodied.core.options import PositiveInt, config_dataclass
from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.robots.base import live
from embodied.envs.mujoco.view import View
from embodied.envs.tasks.base import Quantity, Task, column, distance, near
from embodied.envs.tasks.common import draw, move_towards
from embodied.envs.tasks.config import TaskConfig

BOX = mujoco.mjtGeom.mjGEOM_BOX
LENGTH_M, WIDTH_M = 0.1, 0.02  # half


@config_dataclass
class TurnBarConfig(TaskConfig):
    """Options of TurnBar."""

    max_episode_steps: PositiveInt = 100
    bar_low_m: tuple[float, float] = (0.43, -0.12)
    bar_high_m: tuple[float, float] = (0.6, 0.12)
    goal_low_m: tuple[float, float] = (0.43, -0.12)
    goal_high_m: tuple[float, float] = (0.6, 0.12)
    max_yaw_rad: float = 0.8
    """Greatest yaw of bar and goal, to either side of the y axis."""
    success_m: float = 0.025
    success_rad: float = 0.175


class TurnBar(Task):
    name = "turn_bar"
    instruction = "push the blue bar onto the green mark"
    config: TurnBarConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        bar = spec.worldbody.add_body(name="bar", pos=[0.5, 0, WIDTH_M])
        bar.add_freejoint(name="bar")
        bar.add_geom(name="bar", type=BOX, size=[WIDTH_M, LENGTH_M, WIDTH_M], mass=0.15, rgba=[0.2, 0.4, 0.8, 1])
        goal = spec.worldbody.add_body(name="goal", mocap=True)
        goal.add_geom(type=BOX, size=[WIDTH_M, LENGTH_M, 0.001], contype=0, conaffinity=0, rgba=[0.2, 0.7, 0.3, 1])

    def bind(self, view: View) -> None:
        super().bind(view)
        self.pose = view.body_qpos("bar")
        self.bar = self.pose[:, :3]
        self.goal = view.mocap("goal")
        self.goal_quat = live(view.batch.bind("mocap_quat"))[
            :, view.model.body("goal").mocapid[0]
        ]  # View has no method for it

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.goal[ids, :2] = draw(self.view, rng, "goal", self.config.goal_low_m, self.config.goal_high_m)
        self.goal_quat[ids] = self.turned(rng, "goal_yaw")
        pose = self.view.tensor([[0.0, 0.0, WIDTH_M, 1.0, 0.0, 0.0, 0.0]]).repeat(len(ids), 1)
        pose[:, :2] = draw(self.view, rng, "bar", self.config.bar_low_m, self.config.bar_high_m)
        pose[:, 3:] = self.turned(rng, "bar_yaw")
        self.pose[ids] = pose
        self.view.body_qvel("bar")[ids] = 0

    def turned(self, rng: EpisodeRng, stream: str) -> Tensor:
        """Draw a yaw, as quaternion [n, 4]."""
        half = self.view.tensor(rng.uniform(stream, -self.config.max_yaw_rad, self.config.max_yaw_rad)) / 2
        zero = torch.zeros_like(half)
        return torch.stack([half.cos(), zero, zero, half.sin()], -1)

    def yaw(self, quat: Tensor) -> Tensor:
        w, x, y, z = quat.unbind(-1)
        return torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))

    def turn(self) -> Tensor:
        """How far the bar still has to turn, rad [N], -pi/2 to pi/2: its ends look the same."""
        turn = self.yaw(self.goal_quat) - self.yaw(self.pose[:, 3:])
        return turn - (turn / torch.pi).round() * torch.pi

    def way(self) -> Tensor:
        """How far the bar's centre is from the goal, m [N]."""
        return distance(self.bar[:, :2], self.goal[:, :2])

    def observed(self) -> tuple[Quantity, ...]:
        def direction(quat: Tensor) -> Tensor:
            yaw = self.yaw(quat)
            return torch.stack([(2 * yaw).cos(), (2 * yaw).sin()], -1)

        return (
            Quantity(Term("bar_pos", 3, "m", "base"), lambda: self.bar),
            Quantity(Term("bar_from_tcp", 3, "m", "base", difference=Difference("bar_pos", "tcp_pos"))),
            Quantity(Term("bar_direction", 2), lambda: direction(self.pose[:, 3:])),
            Quantity(Term("goal", 3, "m", "base"), lambda: self.goal),
            Quantity(Term("goal_from_bar", 3, "m", "base", difference=Difference("goal", "bar_pos"))),
            Quantity(Term("goal_direction", 2), lambda: direction(self.goal_quat)),
            Quantity(Term("turn", 1, "rad"), lambda: column(self.turn())),
        )

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (
            Quantity(Term("bar_vel", 6, "m/s, rad/s"), lambda: self.view.body_qvel("bar")),
            Quantity(Term("way", 1, "m"), lambda: column(self.way())),
        )

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {
            "near": 0.1 * near(distance(self.view.tcp_pos, self.bar), 0.2),
            "way": 0.35 * near(self.way(), 0.1),
            "turn": 0.25 * near(self.turn().abs(), 0.4),
            "at_goal": 0.3 * success,
        }

    def success(self) -> Tensor:
        return (self.way() < self.config.success_m) & (self.turn().abs() < self.config.success_rad)

    def expert(self) -> Tensor:
        """Push the end, or the face of an end, that is farthest from where it should be, from behind."""
        tcp, yaw, turn = self.view.tcp_pos, self.yaw(self.pose[:, 3:]), self.turn()
        along = torch.stack([-yaw.sin(), yaw.cos()], -1)
        across = torch.stack([yaw.cos(), yaw.sin()], -1)
        to = yaw + turn
        goal_along = torch.stack([-to.sin(), to.cos()], -1)
        way = self.goal[:, :2] - self.bar[:, :2]
        ends = [way + side * LENGTH_M * (goal_along - along) for side in (1, -1)]
        errors = torch.stack([(end * across).sum(-1) for end in ends] + [(way * along).sum(-1)], -1)  # [N, 3]
        # keep to the push that the tool is placed for, unless it is done
        sign = errors.sign()
        spots, heads = [], []
        for i, side in enumerate((0.75, -0.75)):
            head = across * sign[:, i : i + 1]
            spots.append(self.bar[:, :2] + side * LENGTH_M * along - head * (WIDTH_M + 0.02))
            heads.append(head)
        head = along * sign[:, 2:]
        spots.append(self.bar[:, :2] - head * (LENGTH_M + 0.02))
        heads.append(head)
        spots, heads = torch.stack(spots, 1), torch.stack(heads, 1)
        placed = (distance(tcp[:, None, :2], spots) < 0.02) & (tcp[:, 2:] < 0.04)
        chosen = (errors.abs() + 0.5 * placed * (errors.abs() > 0.008)).argmax(-1)
        rows = torch.arange(len(tcp), device=tcp.device)
        spot, head, ready = spots[rows, chosen], heads[rows, chosen], placed[rows, chosen]
        over = distance(tcp[:, :2], spot) < 0.015
        height = torch.where(over | ready, 0.02, torch.full_like(yaw, 0.09))
        spot = torch.where((over | ready | (tcp[:, 2] > 0.065)).unsqueeze(-1), spot, tcp[:, :2])
        spot = torch.where(ready.unsqueeze(-1), spot + 0.03 * head, spot)
        done = self.success()
        target = torch.cat(
            [torch.where(done.unsqueeze(-1), tcp[:, :2], spot), column(torch.where(done, 0.09, height))], -1
        )
        return move_towards(self.view, target, gripper=-torch.ones_like(yaw))
