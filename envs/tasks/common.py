"""Pieces that several tasks share: what the robot always observes, and moves that experts are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.spec import Term
from envs.common.seeding import EpisodeRng
from envs.mujoco.robots.panda import ControlConfig
from envs.tasks.base import ObjectTaskConfig, View, column

FINGER_SCALE = 25.0  # observed finger positions are about 1 when open
ROBOT_TERMS = (
    Term("joint_pos", 7, "rad"),
    Term("joint_vel", 7, "rad/s"),
    Term("fingers", 2, "m", scale=FINGER_SCALE),
    Term("finger_target", 1, "m", scale=FINGER_SCALE),
    Term("tcp_pos", 3, "m", "base"),
    Term("tcp_vel", 3, "m/s", "base"),
)  # what the robot knows of itself


def cube_terms(name: str) -> tuple[Term, ...]:
    """The terms of ``cube_state``."""
    return (
        Term(f"{name}_pos", 3, "m", "base"),
        Term(f"{name}_from_tcp", 3, "m", "base"),
        Term(f"{name}_rotation", 6, frame="base"),
    )


def cube_privileged_terms(name: str) -> tuple[Term, ...]:
    """The terms of ``cube_privileged``."""
    return Term(f"{name}_grasped", 1), Term(f"{name}_touched", 1), Term(f"{name}_vel", 6, "m/s, rad/s")


def arm_state(view: View) -> dict[str, Tensor]:
    """The quantities of ``ROBOT_TERMS``."""
    return {
        "joint_pos": view.arm_qpos,
        "joint_vel": view.arm_qvel,
        "fingers": view.finger_qpos,
        "finger_target": view.finger_target,
        "tcp_pos": view.tcp_pos,
        "tcp_vel": view.tcp_vel,
    }


def cube_state(view: View, name: str) -> dict[str, Tensor]:
    """Pose of a cube: position, position seen from the tool centre point (m), and rotation, as the first two columns
    of its matrix (Zhou et al. 2019)."""
    pose = view.body_qpos(name)
    return {
        f"{name}_pos": pose[:, :3],
        f"{name}_from_tcp": pose[:, :3] - view.tcp_pos,
        f"{name}_rotation": view.cube_axes(name),
    }


def cube_privileged(view: View, name: str) -> dict[str, Tensor]:
    """What only a simulator knows of a cube: whether it is grasped or touched, and its velocity."""
    return {
        f"{name}_grasped": column(view.grasped(name)),
        f"{name}_touched": column(view.touched(name)),
        f"{name}_vel": view.body_qvel(name),
    }


def out_of_reach(config: ObjectTaskConfig, *positions: Tensor) -> Tensor | None:
    """Whether any of the objects at positions [N, 3] has left the arm's workspace to a side, bool [N].

    None unless the task's option ``fail_out_of_reach`` asks for it.
    """
    if not config.fail_out_of_reach:
        return None
    control = config.control
    low, high = (torch.tensor(c[:2]).double() for c in (control.workspace_low_m, control.workspace_high_m))
    return torch.stack([((p[:, :2] < low) | (p[:, :2] > high)).any(-1) for p in positions]).any(0)


def held(view: View, name: str) -> Tensor:
    """The cube is grasped, and squeezed until it has turned between the fingers, bool [N]. Lifted earlier it slips."""
    squeezed = (view.finger_target < 0.0).squeeze(-1) & (view.qvel[:, 7:9].abs().amax(dim=-1) < 0.005)
    return view.grasped(name) & (squeezed | (view.body_qpos(name)[:, 2] > 0.024))


def grasp_reward(view: View, name: str) -> Tensor:
    """Between 0 and 1, [N]: half for closing the fingers while the cube is between them, half for the grasp."""
    return 0.5 * view.between(name) * (1 - view.opening()) + 0.5 * view.grasped(name)


def move_towards(
    view: View,
    target: Tensor,
    control: ControlConfig,
    gripper: Tensor,
    gain: float = 2.0,
    limit: Tensor | float = 1.0,
) -> Tensor:
    """Expert action [N, A] that drives the tool centre point to target [N, 3] with gripper command [N].

    Only for ``ee_delta``; a proportional step, because the arm covers part of a displacement in one control step.
    limit: greatest arm action, [N] or a number; what is held fast slips when it is moved fast.
    """
    if control.mode != "ee_delta":
        raise UserError(f"control.mode: the scripted experts need ee_delta, got '{control.mode}'")
    step = (target - view.tcp_pos) * gain / control.delta_m
    limit = torch.as_tensor(limit, dtype=step.dtype).reshape(-1, 1)
    step = step.clamp(-limit, limit)
    yaw = [torch.zeros(len(target), 1, dtype=step.dtype)] if control.rotation else []
    return torch.cat([step, *yaw, gripper.to(step.dtype).unsqueeze(-1)], dim=-1).float()


def grasp_move(view: View, name: str, control: ControlConfig, hover_m: float = 0.08) -> tuple[Tensor, Tensor]:
    """Target [N, 3] and gripper command [N] of an expert that wants to have the cube between its fingers.

    Hover above the cube, descend when aligned, close when around it. Where the cube is already held the target is the
    present pose and the gripper stays closed.
    """
    cube = view.body_qpos(name)[:, :3]
    offset = cube - view.tcp_pos
    aligned = offset[:, :2].norm(dim=-1) < 0.012
    around = aligned & (offset[:, 2].abs() < 0.012)
    target = cube.clone()
    target[:, 2] += torch.where(aligned | (offset[:, :2].norm(dim=-1) < 0.02) & (offset[:, 2] > -0.03), 0.0, hover_m)
    closing = around | view.grasped(name)
    return target, torch.where(closing, -1.0, 1.0)


def put_cube_in_hand(view: View, name: str, ids: Tensor, half_width_m: float | Tensor) -> None:
    """Put the cube of envs ``ids`` [n] at the tool centre point, square to the fingers, which close on it.

    half_width_m: from its centre to each finger, a number or [n, 1].
    """
    half_yaw = torch.atan2(view.tcp_mat[ids, 3], view.tcp_mat[ids, 0]) / 2
    pose = torch.zeros(len(ids), 7, dtype=torch.float64)
    pose[:, :3], pose[:, 3], pose[:, 6] = view.tcp_pos[ids], half_yaw.cos(), half_yaw.sin()
    view.body_qpos(name)[ids] = pose
    view.finger_qpos[ids] = half_width_m
    view.finger_targets[ids] = 0.0


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
    stand(view, name, ids, rng, torch.from_numpy(rng.uniform(f"{name}_pos", list(low_m), list(high_m))), half_size_m)


def stand(
    view: View,
    name: str,
    ids: Tensor,
    rng: EpisodeRng,
    position: Tensor,
    half_height_m: float | Tensor,
    yaw_rad: float = torch.pi / 4,
) -> None:
    """Put the object of envs ``ids`` [n] upright on the table at position [n, 2], turned by up to ``yaw_rad``; a cube
    looks the same beyond 45 degrees."""
    half_angle = torch.from_numpy(rng.uniform(f"{name}_yaw", -yaw_rad / 2, yaw_rad / 2))
    pose = torch.zeros(len(ids), 7, dtype=torch.float64)
    pose[:, :2], pose[:, 2] = position, half_height_m
    pose[:, 3], pose[:, 6] = half_angle.cos(), half_angle.sin()
    view.body_qpos(name)[ids] = pose
    view.body_qvel(name)[ids] = 0
