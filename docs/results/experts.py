"""Scripted experts of other people's tasks, for ``embodied.collect expert=docs.results.experts:<function>``.

Each gets the parts of the state by name, [N, size], and returns actions [N, A]. Both reach over the object, descend,
close the gripper and carry the object to its goal. Lengths are in metres.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

GAIN = 10.0  # action per metre that is left


def fetch_pick_and_place(state: Mapping[str, Tensor]) -> Tensor:
    """Expert of ``envpool/FetchPickAndPlaceDense-v1``."""
    tool_N3, object_N3, goal_N3 = state["observation"][:, :3], state["achieved_goal"], state["desired_goal"]
    closed_N = state["observation"][:, 9:11].sum(1) < 0.052  # the object is 0.05 wide
    held_N = closed_N & ((object_N3 - tool_N3).norm(dim=1) < 0.03)
    return carry(tool_N3, object_N3, goal_N3, held_N)


def pick_cube(state: Mapping[str, Tensor]) -> Tensor:
    """Expert of ``maniskill/PickCube-v1`` with ``control_mode=pd_ee_delta_pos``."""
    tool_N3, cube_N3 = state["extra/tcp_pose"][:, :3], state["extra/obj_pose"][:, :3]
    held_N = state["extra/is_grasped"][:, 0] > 0.5
    return carry(tool_N3, cube_N3, state["extra/goal_pos"], held_N)


def carry(tool_N3: Tensor, object_N3: Tensor, goal_N3: Tensor, held_N: Tensor) -> Tensor:
    """Return [N, 4]: a move towards where the tool should be, and the gripper: +1 opens, -1 closes."""
    offset_N3 = object_N3 - tool_N3
    over_N = offset_N3[:, :2].norm(dim=1) < 0.015
    at_N = over_N & (offset_N3[:, 2].abs() < 0.012)
    move_N3 = torch.where(over_N[:, None], offset_N3, offset_N3 + torch.tensor([0.0, 0.0, 0.08]))
    move_N3 = torch.where(held_N[:, None], goal_N3 - object_N3, move_N3)
    gripper_N1 = torch.where(at_N | held_N, -1.0, 1.0)[:, None]
    return torch.cat([GAIN * move_N3, gripper_N1], 1).clamp(-1, 1)
