"""Open a drawer: hook its handle and pull it towards the robot."""

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

BOX = mujoco.mjtGeom.mjGEOM_BOX
WOOD, DARK, METAL = [0.75, 0.6, 0.4, 1], [0.45, 0.35, 0.25, 1], [0.7, 0.7, 0.75, 1]
# the front of the closed drawer is at x = -0.1 of the cabinet, the handle's bar 7 cm before it
GRIP = (-0.14, 0.0, 0.06)  # behind the bar of the handle, in the cabinet's frame


@config_dataclass
class OpenDrawerConfig(TaskConfig):
    """Options of OpenDrawer."""

    max_episode_steps: PositiveInt = 80
    low_m: tuple[float, float] = (0.68, -0.12)
    """Lowest x, y of the cabinet's centre."""
    high_m: tuple[float, float] = (0.74, 0.12)
    open_m: float = 0.12
    """Way of the drawer that counts as open."""


class OpenDrawer(Task):
    name = "open_drawer"
    instruction = "open the drawer"
    config: OpenDrawerConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        cabinet = spec.worldbody.add_body(name="cabinet", mocap=True)
        for side in (-1, 1):
            cabinet.add_geom(type=BOX, size=[0.1, 0.01, 0.045], pos=[0, side * 0.13, 0.045], rgba=WOOD)
        cabinet.add_geom(type=BOX, size=[0.1, 0.14, 0.005], pos=[0, 0, 0.095], rgba=WOOD)
        cabinet.add_geom(type=BOX, size=[0.01, 0.12, 0.045], pos=[0.09, 0, 0.045], rgba=WOOD)

        drawer = cabinet.add_body(name="drawer", pos=[0, 0, 0.06])
        drawer.add_joint(
            name="drawer", type=mujoco.mjtJoint.mjJNT_SLIDE, axis=[-1, 0, 0], range=[0, 0.16], limited=True, damping=10
        )
        drawer.add_geom(type=BOX, size=[0.01, 0.11, 0.025], pos=[-0.09, 0, 0], mass=0.3, rgba=DARK)
        drawer.add_geom(type=BOX, size=[0.08, 0.11, 0.005], pos=[0, 0, -0.025], mass=0.3, rgba=DARK)
        for side in (-1, 1):
            drawer.add_geom(type=BOX, size=[0.035, 0.006, 0.006], pos=[-0.135, side * 0.06, 0], mass=0.02, rgba=METAL)
        drawer.add_geom(type=BOX, size=[0.006, 0.066, 0.006], pos=[-0.17, 0, 0], mass=0.05, rgba=METAL)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.cabinet = view.mocap("cabinet")
        self.way = view.qpos[:, view.model.joint("drawer").qposadr[0]]
        self.grip = view.tensor(GRIP)

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.cabinet[ids, :2] = draw(self.view, rng, "cabinet", self.config.low_m, self.config.high_m)

    def handle(self) -> Tensor:
        """Where the tool should be to pull: just behind the handle's bar, [N, 3]."""
        closed = self.cabinet + self.grip
        return torch.cat([closed[:, :1] - column(self.way), closed[:, 1:]], -1)

    def distance(self) -> Tensor:
        return distance(self.handle(), self.view.tcp_pos)

    def observed(self) -> tuple[Quantity, ...]:
        return (
            Quantity(Term("handle", 3, "m", "base"), self.handle),
            Quantity(Term("handle_from_tcp", 3, "m", "base", difference=Difference("handle", "tcp_pos"))),
            Quantity(Term("drawer_way", 1, "m", scale=10.0), lambda: column(self.way)),
        )

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("distance", 1, "m"), lambda: column(self.distance())),)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        opened = (self.way / self.config.open_m).clamp(0, 1)
        return {"near": 0.3 * near(self.distance(), 0.15), "open": 0.4 * opened, "opened": 0.3 * success}

    def success(self) -> Tensor:
        return self.way > self.config.open_m

    def expert(self) -> Tensor:
        tcp, handle = self.view.tcp_pos, self.handle()
        offset = tcp - handle
        over = offset[:, :2].norm(dim=-1) < 0.012
        hooked = (offset[:, 2] < 0.015) & (offset[:, :2].norm(dim=-1) < 0.03)
        target = handle.clone()
        target[:, 2] += torch.where(over, 0.0, 0.07)
        target = torch.where(hooked.unsqueeze(-1), handle + self.view.tensor([-0.08, 0.0, 0.0]), target)
        return move_towards(self.view, target, gripper=-torch.ones_like(tcp[:, 0]))
