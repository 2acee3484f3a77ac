"""What several tasks share: observations of cubes, their start positions, reward terms, and moves of experts."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.options import config_dataclass
from embodied.core.spec import Difference, StartStage, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import RED, add_cube
from embodied.envs.mujoco.view import View
from embodied.envs.tasks.base import ObjectTaskConfig, Quantity, Task, column, near

ROTATION = "first two columns of the rotation matrix: x axis, then y axis of the object"


def cube_quantities(task: Task, name: str) -> tuple[Quantity, ...]:
    """Return position, position relative to the tool centre point, and rotation of the cube ``name``.

    The rotation is given by the first two columns of its matrix (Zhou et al. 2019).
    """
    position = Term(f"{name}_pos", 3, "m", "base", meaning=f"x, y, z of the centre of {name}")
    return (
        Quantity(position, lambda: task.view.body_qpos(name)[:, :3]),
        Quantity(Term(f"{name}_from_tcp", 3, "m", "base", difference=Difference(f"{name}_pos", "tcp_pos"))),
        Quantity(Term(f"{name}_rotation", 6, frame="base", meaning=ROTATION), lambda: task.view.cube_axes(name)),
    )


def cube_contacts(task: Task, name: str) -> tuple[Quantity, ...]:
    """Return what the critic sees of the cube ``name``: whether it is grasped or touched, and its velocity."""
    return (
        Quantity(Term(f"{name}_grasped", 1), lambda: column(task.view.grasped(name))),
        Quantity(Term(f"{name}_touched", 1), lambda: column(task.view.touched(name))),
        Quantity(Term(f"{name}_vel", 6, "m/s, rad/s"), lambda: task.view.body_qvel(name)),
    )


@config_dataclass
class CubeConfig(ObjectTaskConfig):
    """Options of tasks with a red cube. ``low`` and ``high`` are corners of an area (x, y) or of a box (x, y, z)."""

    cube_half_m: float = 0.02
    """Half the red cube's edge."""
    cube_mass_kg: float = 0.064
    """Mass of the red cube."""
    cube_low_m: tuple[float, float] = (0.45, -0.15)
    """Area of the table where the red cube starts."""
    cube_high_m: tuple[float, float] = (0.65, 0.15)
    """Opposite corner of that area."""


class CubeTask(Task):
    """A task with a red cube, which ``reset`` puts on the table."""

    config: CubeConfig
    cubes: tuple[str, ...] = ("cube",)
    """Names of all cubes, of which the critic sees the contacts and none may leave the workspace."""

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_cube(spec, "cube", self.config.cube_half_m, self.config.cube_mass_kg, RED)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.cube, self.cube_vel = view.body_qpos("cube")[:, :3], view.body_qvel("cube")[:, :3]

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        place_cube(
            self.view, "cube", ids, rng, self.config.cube_low_m, self.config.cube_high_m, self.config.cube_half_m
        )

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return tuple(quantity for name in self.cubes for quantity in cube_contacts(self, name))

    def failure(self) -> Tensor | None:
        return out_of_reach(self, *(self.view.body_qpos(name)[:, :3] for name in self.cubes))


class GraspedCubeTask(CubeTask):
    """A task whose cube is grasped, and may start in the hand."""

    @property
    def stages(self) -> tuple[StartStage, ...]:
        return (StartStage("held", self.config.held_starts),)

    def put_in_hand(self, ids: Tensor) -> None:
        put_cube_in_hand(self.view, "cube", ids, self.config.cube_half_m)


def draw(view: View, rng: EpisodeRng, stream: str, low_m: Sequence[float], high_m: Sequence[float]) -> Tensor:
    """Draw points uniformly from an area or a box between opposite corners, [n, 2 or 3]."""
    return view.tensor(rng.uniform(stream, list(low_m), list(high_m)))


def out_of_reach(task: Task, *positions: Tensor) -> Tensor | None:
    """Return whether any of the objects at positions [N, 3] has left the workspace horizontally, bool [N].

    None unless the task's option ``fail_out_of_reach`` is set.
    """
    assert isinstance(task.config, ObjectTaskConfig)
    if not task.config.fail_out_of_reach:
        return None
    low, high = (torch.tensor(corner[:2]).to(positions[0]) for corner in task.robot.workspace_m)
    return torch.stack([((p[:, :2] < low) | (p[:, :2] > high)).any(-1) for p in positions]).any(0)


def firmly_grasped(view: View, name: str) -> Tensor:
    """Return whether the cube is grasped and the fingers have stopped closing on it, bool [N]; before, it would slip.

    A cube above the table counts as soon as it is grasped.
    """
    squeezed = (view.finger_target < 0.0).squeeze(-1) & (view.arm.finger_qvel.abs().amax(dim=-1) < 0.005)
    return view.grasped(name) & (squeezed | (view.body_qpos(name)[:, 2] > 0.024))


def reach_reward(view: View, name: str) -> Tensor:
    """Return a reward in [0, 1] for a tool centre point near the cube, [N]."""
    return near(vector_norm(view.body_qpos(name)[:, :3] - view.tcp_pos, dim=-1), 0.15)


def grasp_reward(view: View, name: str) -> Tensor:
    """Return a reward in [0, 1], [N]: half for closing the fingers around the cube, half for the grasp."""
    return 0.5 * view.between(name) * (1 - view.opening()) + 0.5 * view.grasped(name)


def move_towards(view: View, target: Tensor, gripper: Tensor, gain: float = 2.0, limit: Tensor | float = 1.0) -> Tensor:
    """Return the action [N, A] that moves the tool centre point towards target [N, 3], with gripper command [N].

    gain: factor of the distance, above 1 because the arm covers only part of a displacement in one control step.
    limit: greatest arm action, [N] or a number; a held object slips when it is moved fast. UserError if the robot's
    actions are not displacements of the tool.
    """
    displacement = (target - view.tcp_pos) * gain
    return view.arm.move_tool(displacement, gripper, view.tensor(limit).reshape(-1, 1))


def grasp_move(view: View, name: str, hover_m: float = 0.08) -> tuple[Tensor, Tensor]:
    """Return target [N, 3] and gripper command [N] of an expert that grasps the cube.

    Hover above the cube, descend when aligned, close when the cube is between the fingers. If the cube is grasped
    already, the gripper stays closed.
    """
    cube = view.body_qpos(name)[:, :3]
    offset = cube - view.tcp_pos
    beside_m = vector_norm(offset[:, :2], dim=-1)
    aligned = beside_m < 0.012
    around = aligned & (offset[:, 2].abs() < 0.012)
    target = cube.clone()
    target[:, 2] += torch.where((beside_m < 0.02) & (offset[:, 2] > -0.03) | aligned, 0.0, hover_m)
    closing = around | view.grasped(name)
    return target, torch.where(closing, -1.0, 1.0)


def put_cube_in_hand(view: View, name: str, ids: Tensor, half_width_m: float | Tensor) -> None:
    """Put the cube of envs ``ids`` [n] at the tool centre point, aligned with the fingers, which close on it.

    half_width_m: distance from its centre to each finger, a number or [n, 1].
    """
    half_yaw = torch.atan2(view.tcp_mat[ids, 3], view.tcp_mat[ids, 0]) / 2
    pose = view.qpos.new_zeros(len(ids), 7)
    pose[:, :3], pose[:, 3], pose[:, 6] = view.tcp_pos[ids], half_yaw.cos(), half_yaw.sin()
    view.body_qpos(name)[ids] = pose
    factor = view.size_factor(name, ids)
    view.arm.finger_qpos[ids] = half_width_m * (factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor)
    view.arm.finger_targets[ids] = 0.0


def place_cube(
    view: View,
    name: str,
    ids: Tensor,
    rng: EpisodeRng,
    low_m: tuple[float, float],
    high_m: tuple[float, float],
    half_size_m: float,
) -> None:
    """Put the cube of envs ``ids`` flat on the table, anywhere in a rectangle and at any angle about the vertical."""
    stand(view, name, ids, rng, draw(view, rng, f"{name}_pos", low_m, high_m), half_size_m)


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
