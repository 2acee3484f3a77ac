"""Press a spring-loaded button that stands somewhere on the table."""

from __future__ import annotations

import mujoco
import torch
from torch import Tensor

from embodied.core.options import PositiveInt, config_dataclass
from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.view import View
from embodied.envs.tasks.base import Quantity, Task, column, distance, near
from embodied.envs.tasks.common import draw, move_towards
from embodied.envs.tasks.config import TaskConfig

TOP_M = 0.07  # height of the button's top when it is not pressed


@config_dataclass
class PressButtonConfig(TaskConfig):
    """Options of PressButton."""

    max_episode_steps: PositiveInt = 50
    low_m: tuple[float, float] = (0.4, -0.2)
    high_m: tuple[float, float] = (0.6, 0.2)
    travel_m: float = 0.02
    pressed_m: float = 0.015
    """Way of the button that counts as pressed."""


class PressButton(Task):
    name = "press_button"
    instruction = "press the red button"
    config: PressButtonConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        base = spec.worldbody.add_body(name="button_base", mocap=True)
        base.add_geom(
            type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.05, 0.05, 0.015], pos=[0, 0, 0.015], rgba=[0.3, 0.3, 0.35, 1]
        )
        button = base.add_body(name="button", pos=[0, 0, TOP_M - 0.015], gravcomp=1)
        button.add_joint(
            name="button",
            type=mujoco.mjtJoint.mjJNT_SLIDE,
            axis=[0, 0, -1],
            range=[0, self.config.travel_m],
            limited=True,
            stiffness=100,
            damping=2,
            armature=0.1,
        )
        button.add_geom(
            type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=[0.03, 0.015, 0], mass=0.02, rgba=[0.85, 0.2, 0.15, 1]
        )

    def bind(self, view: View) -> None:
        super().bind(view)
        self.base = view.mocap("button_base")
        self.way = view.qpos[:, view.model.joint("button").qposadr[0]]
        self.up = view.tensor([0.0, 0.0, TOP_M])

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.base[ids, :2] = draw(self.view, rng, "base", self.config.low_m, self.config.high_m)

    def top(self) -> Tensor:
        top = self.base + self.up
        return torch.cat([top[:, :2], top[:, 2:] - column(self.way)], -1)

    def distance(self) -> Tensor:
        return distance(self.top(), self.view.tcp_pos)

    def observed(self) -> tuple[Quantity, ...]:
        return (
            Quantity(Term("button_top", 3, "m", "base"), self.top),
            Quantity(Term("button_from_tcp", 3, "m", "base", difference=Difference("button_top", "tcp_pos"))),
            Quantity(Term("button_way", 1, "m", scale=50.0), lambda: column(self.way)),
        )

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("distance", 1, "m"), lambda: column(self.distance())),)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        pressed = (self.way / self.config.pressed_m).clamp(0, 1)
        return {"near": 0.3 * near(self.distance(), 0.15), "press": 0.3 * pressed, "pressed": 0.4 * success}

    def success(self) -> Tensor:
        return self.way > self.config.pressed_m

    def expert(self) -> Tensor:
        tcp, top = self.view.tcp_pos, self.top()
        over = distance(tcp[:, :2], top[:, :2]) < 0.025
        height = torch.where(over, -0.03, 0.06)
        target = torch.cat([top[:, :2], top[:, 2:] + column(height)], -1)
        return move_towards(self.view, target, gripper=-torch.ones_like(tcp[:, 0]))
