"""Functions that several tasks share: observations of cubes, their start positions, and moves of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.view import View
from embodied.envs.tasks.base import ObjectTaskConfig, Task, column

ROTATION = "first two columns of the rotation matrix: x axis, then y axis of the object"


def cube_terms(name: str) -> tuple[Term, ...]:
    """Return the terms of ``cube_state``."""
    return (
        Term(f"{name}_pos", 3, "m", "base", meaning=f"x, y, z of the centre of {name}"),
        Term(f"{name}_from_tcp", 3, "m", "base", difference=Difference(f"{name}_pos", "tcp_pos")),
        Term(f"{name}_rotation", 6, frame="base", meaning=ROTATION),
    )


def cube_privileged_terms(name: str) -> tuple[Term, ...]:
    """Return the terms of ``cube_privileged``."""
    return Term(f"{name}_grasped", 1), Term(f"{name}_touched", 1), Term(f"{name}_vel", 6, "m/s, rad/s")


def cube_state(view: View, name: str) -> dict[str, Tensor]:
    """Return a cube's position, its position relative to the tool centre point (m), and its rotation.

    The rotation is given by the first two columns of its matrix (Zhou et al. 2019).
    """
    pose = view.body_qpos(name)
    return {
        f"{name}_pos": pose[:, :3],
        f"{name}_from_tcp": pose[:, :3] - view.tcp_pos,
        f"{name}_rotation": view.cube_axes(name),
    }


def cube_privileged(view: View, name: str) -> dict[str, Tensor]:
    """Return the privileged quantities of a cube: whether it is grasped or touched, and its velocity."""
    return {
        f"{name}_grasped": column(view.grasped(name)),
        f"{name}_touched": column(view.touched(name)),
        f"{name}_vel": view.body_qvel(name),
    }


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
    stand(view, name, ids, rng, view.tensor(rng.uniform(f"{name}_pos", list(low_m), list(high_m))), half_size_m)


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
