"""What several tasks share: tasks with objects, cubes, goals and trays; reward terms; moves of experts."""

from collections.abc import Sequence

import mujoco
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from embodied.core.errors import UserError
from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import RED, add_cube, add_goal
from embodied.envs.mujoco.view import View, per_state
from embodied.envs.tasks.base import Quantity, Task, column, distance, near, progress
from embodied.envs.tasks.config import CubeConfig, GoalConfig, ObjectTaskConfig, PlacingConfig

ROTATION = "first two columns of the rotation matrix: x axis, then y axis of the object"


def cube_quantities(task: Task, name: str, tool: str = "tcp_pos") -> tuple[Quantity, ...]:
    """Return position, position relative to the tool centre point, and rotation (Zhou et al. 2019) of a cube."""
    position = Term(f"{name}_pos", 3, "m", "base", meaning=f"x, y, z of the centre of {name}")
    rotation = Term(f"{name}_rotation", 6, frame="base", meaning=ROTATION)
    return (
        Quantity(position, lambda: task.view.position(name)),
        Quantity(Term(f"{name}_from_tcp", 3, "m", "base", difference=Difference(f"{name}_pos", tool))),
        Quantity(rotation, lambda: task.view.sensor(f"{name}_x_axis", 2)),
    )


def cube_contacts(task: Task, name: str) -> tuple[Quantity, ...]:
    """Return what the critic sees of the cube ``name``: whether it is grasped or touched, and its velocity."""
    return (
        Quantity(Term(f"{name}_grasped", 1), lambda: column(task.view.grasped(name))),
        Quantity(Term(f"{name}_touched", 1), lambda: column(task.view.touched(name))),
        Quantity(Term(f"{name}_vel", 6, "m/s, rad/s"), lambda: task.view.body_qvel(name)),
    )


class ObjectTask(Task):
    """A task with objects on the table, the first of which is the one to move."""

    config: ObjectTaskConfig
    objects: tuple[str, ...]
    """Bodies of which the critic sees the contacts and none may leave the workspace."""

    def bind(self, view: View) -> None:
        super().bind(view)
        self.object = view.body_qpos(self.objects[0])[:, :3]
        self.object_vel = view.body_qvel(self.objects[0])[:, :3]

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return tuple(quantity for name in self.objects for quantity in cube_contacts(self, name))

    def failure(self) -> Tensor | None:
        """Return whether an object has left the workspace horizontally, bool [N]; None without that option."""
        if not self.config.fail_out_of_reach:
            return None
        low, high = (self.view.constant(tuple(corner[:2])) for corner in self.robot.workspace_m)
        places = [self.view.body_qpos(name)[:, :2] for name in self.objects]
        return torch.stack([((place < low) | (place > high)).any(-1) for place in places]).any(0)


class CubeTask(ObjectTask):
    """A task with a red cube, which ``reset`` puts on the table."""

    config: CubeConfig
    objects: tuple[str, ...] = ("cube",)

    def __init__(self, config: CubeConfig) -> None:
        super().__init__(config)
        if self.held_object:
            check_gap(self, "cube_half_m", config.cube_half_m)

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_cube(spec, "cube", self.config.cube_half_m, self.config.cube_mass_kg, RED)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.cube, self.half_width_m = self.object, self.config.cube_half_m

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        position = draw(self.view, rng, "cube_pos", self.config.cube_low_m, self.config.cube_high_m)
        stand(self.view, "cube", ids, rng, position, self.config.cube_half_m)


class GoalTask(Task):
    """A task with a goal, shown as a green sphere. A base class after this one adds the objects."""

    config: GoalConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        add_goal(spec, "goal", self.config.success_m)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.goal = view.mocap("goal")

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        goal = draw(self.view, rng, "goal", self.config.goal_low_m, self.config.goal_high_m)
        self.goal[ids] = pad(goal, (0, 3 - goal.shape[1]))


class Placing(ObjectTask):
    """Put an object into a walled tray, where it must be at rest with no finger on it. ``bind`` sets the attributes."""

    config: PlacingConfig
    tray: Tensor
    """Centre of the tray that the object goes into, [N, 3], m."""
    half_height_m: float | Tensor
    """Half height of the object, a number or [N]."""

    @per_state
    def _above(self) -> Tensor:
        """Return whether the object is within the tray's walls as seen from above, bool [N]."""
        inner = self.config.tray_half_m - self.half_width_m / 2
        return (self.object - self.tray)[:, :2].abs().amax(dim=-1) < inner

    @per_state
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
        across = 0.5 * progress(to_tray, 0.6 * self.scale.reach) + 0.5 * near(to_tray, 0.1 * self.scale.reach)
        low = progress(self.object[:, 2] - self.half_height_m, 0.15 * self.scale.reach)
        return {
            "reach": 0.1 * torch.where(inside, 1.0, reach_reward(self.view, name)),
            "grasp": 0.1 * torch.where(inside, 1.0, grasp_reward(self.view, name)),
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
        carry_m, reach = self.config.carry_m, self.scale.reach
        target, gripper = grasp_move(self.view, self.objects[0], self.half_width_m)
        grasped, above, tcp = self.view.grasped(self.objects[0]), self._above(), self.view.tcp_pos
        over_tray = self.tray + torch.tensor([0, 0, carry_m + 0.02 * reach], device=self.tray.device)
        ready = (self.object[:, 2] > carry_m - 0.02 * reach) | above
        way = torch.where(ready.unsqueeze(-1), over_tray, torch.cat([self.object[:, :2], over_tray[:, 2:]], -1))
        target = torch.where(grasped.unsqueeze(-1), tcp + way - self.object, target)
        let_go = (distance(self.object[:, :2], self.tray[:, :2]) < 0.03 * reach) & above | self._inside()
        retreat = torch.cat([tcp[:, :2], torch.full_like(tcp[:, 2:], 0.2 * reach)], dim=-1)
        target = torch.where(let_go.unsqueeze(-1), retreat, target)
        return move_towards(self.view, target, torch.where(let_go, 1.0, gripper), around=self.objects[0])


def check_gap(task: Task, option: str, half_m: float) -> None:
    """Raise UserError unless the gripper closes on an object whose half width is an option."""
    low_m, high_m = task.robot.gap_m
    if not low_m < 2 * half_m < high_m:
        allowed = f"{max(low_m, 0) / 2:.3g} to {high_m / 2:.3g}, which the gripper of {task.robot.name} closes on"
        raise UserError(f"{option}: got {half_m:g}, allowed: {allowed}")


def draw(view: View, rng: EpisodeRng, stream: str, low_m: Sequence[float], high_m: Sequence[float]) -> Tensor:
    """Draw points uniformly from an area or a box between opposite corners, [n, 2 or 3]."""
    return view.tensor(rng.uniform(stream, list(low_m), list(high_m)))


def firmly_grasped(view: View, name: str) -> Tensor:
    """Return whether the cube is grasped and the fingers have stopped closing on it, bool [N]; before, it would slip.

    A cube above the table counts as soon as it is grasped.
    """
    return view.grasped(name) & (view.arm.squeezing() | (view.body_qpos(name)[:, 2] > 0.024 * view.scale.size))


def reach_reward(view: View, name: str) -> Tensor:
    """Return a reward in [0, 1] for a tool centre point near the cube, [N]."""
    return near(distance(view.position(name), view.tcp_pos), 0.15 * view.scale.reach)


def grasp_reward(view: View, name: str) -> Tensor:
    """Return a reward in [0, 1], [N]: half for closing the fingers around the cube, half for the grasp."""
    return 0.5 * view.between(name) * (1 - view.arm.opening()) + 0.5 * view.grasped(name)


def move_towards(
    view: View,
    target: Tensor,
    gripper: Tensor,
    limit: Tensor | float = 1.0,
    around: str | None = None,
    turn: Tensor | None = None,
) -> Tensor:
    """Return the action [N, A] that moves the tool centre point towards target [N, 3], with gripper command [N].

    limit: greatest arm action, [N] or a number; a held object slips when it is moved fast. around: a cube that the
    fingers turn to until they have grasped it. turn: yaw in its place, rad [N].
    """
    displacement = (target - view.tcp_pos) * 2.0  # the arm covers only part of a displacement in one control step
    if turn is None:
        turn = torch.zeros_like(gripper) if around is None else view.turn_to(around) * ~view.grasped(around)
    return view.arm.move_tool(displacement, turn * 2.0, gripper, view.tensor(limit).reshape(-1, 1))


def grasp_move(view: View, name: str, half_width_m: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return target [N, 3] and gripper command [N] of an expert that grasps the cube.

    Hover above the cube, descend when aligned, close when it is between the fingers and stay closed.
    """
    cube, size = view.position(name), view.scale.size
    middle = view.arm.above(2 * half_width_m)
    offset = cube - middle
    beside_m = distance(cube[:, :2], middle[:, :2])
    aligned = beside_m < 0.012 * size
    around = aligned & (offset[:, 2].abs() < 0.012 * size)
    target = cube.clone()
    target[:, 2] += torch.where((beside_m < 0.02 * size) & (offset[:, 2] > -0.03 * size) | aligned, 0.0, 0.08 * size)
    return view.tcp_pos + target - middle, torch.where(around | view.grasped(name), -1.0, 1.0)


def stand(
    view: View,
    name: str,
    ids: Tensor,
    rng: EpisodeRng,
    position: Tensor,
    half_height_m: float | Tensor,
    yaw_rad: float = torch.pi / 4,
) -> None:
    """Put the object of envs ``ids`` [n] upright on the table at position [n, 2] with a random yaw.

    yaw_rad: greatest yaw to either side; beyond 45 degrees a cube looks the same.
    """
    half_angle = view.tensor(rng.uniform(f"{name}_yaw", -yaw_rad / 2, yaw_rad / 2))
    pose = view.qpos.new_zeros(len(ids), 7)
    pose[:, :2], pose[:, 2] = position, half_height_m * view.size_factor(name, ids)
    pose[:, 3], pose[:, 6] = half_angle.cos(), half_angle.sin()
    view.body_qpos(name)[ids] = pose
    view.body_qvel(name)[ids] = 0


def on_table(view: View, name: str, half_height_m: float) -> Tensor:
    """Return whether the centre of an object is as high as when it stands on the table, bool [N]."""
    height = view.body_qpos(name)[:, 2] - half_height_m * view.size_factor(name)
    on: Tensor = height.abs() < 0.01 * view.scale.size
    return on
