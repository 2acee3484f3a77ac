"""How wide two fingers are open, and where between them an object is held: measured on their geoms.

The gripper is brought to commands from open to closed. Where its joints follow from one another, by equality
constraints, tendons or springs, it is simulated until it stands still.
"""

from itertools import product
from typing import NamedTuple

import mujoco
import numpy as np
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.mujoco.robots.parts import Parts

POSITIONS = 33  # of the gripper at which gaps are measured
FAR_M = 1.0  # beyond which distances are not measured
SETTLE_S = 2.0  # longest time that a command is simulated
STILL, DIVERGED = 1e-3, 1e3  # greatest speeds of joints that stand still, and of a simulation that works, rad/s or m/s
CLOSES_M = 1e-3  # least difference of the gaps at open and closed
ALONG = 0.9  # least cosine between the line from finger to finger and an axis of the tool, x or y


class Jaws(NamedTuple):
    """Gaps between two fingers at K commands of the gripper, from closed to open."""

    gap_K: np.ndarray
    """Distance between the fingers, m; below 0 where they overlap."""
    command_K: np.ndarray
    """Command of the gripper's actuators."""
    qpos_KL: np.ndarray
    """Positions of the joints that are not the arm's (``Parts.linked``)."""
    middle_K3: np.ndarray
    """Middle of the gap, as far along the line between the fingers, in the tool's frame, m."""
    reach_3: np.ndarray
    """How far the closed fingers reach from the tool along its x and its y axis to either side, and along z, m."""

    def hold(self, width_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the joint positions [n, L] that hold objects this wide (m), and the objects' centres, [n, 3], m."""
        columns = np.column_stack([self.qpos_KL, self.middle_K3]).T
        found = [np.interp(width_n.cpu().numpy(), self.gap_K, column_K) for column_K in columns]
        qpos_Ln, centre_3n = width_n.new_tensor(np.array(found[:-3])), width_n.new_tensor(np.array(found[-3:]))
        return qpos_Ln.T, centre_3n.T


def measure_jaws(
    model: mujoco.MjModel, parts: Parts, fingers: tuple[str, str], closed: float, open: float, home_J: np.ndarray
) -> Jaws:
    """Measure the gaps from ``closed`` to ``open``, with the arm at home.

    UserError for a finger without a geom that touches objects, and for fingers that touch at ``open`` or are ``FAR_M``
    apart, that are not nearer at ``closed``, or that close along neither x nor y of the tool.
    """
    data, touching = mujoco.MjData(model), model.geom_contype | model.geom_conaffinity
    geoms = [np.flatnonzero((model.geom_bodyid == model.body(name).id) & (touching != 0)) for name in fingers]
    for name, found in zip(fingers, geoms, strict=True):
        if not len(found):
            raise UserError(f"gripper.bodies: '{name}' has no geom that touches objects, needed: one or more")
    data.qpos[parts.arm.qpos], site = home_J, model.site("tcp").id
    commands_K = np.linspace(closed, open, POSITIONS)
    gaps, qpos, middles, lines = [], [], [], []
    line_6 = np.zeros(6)
    for command in commands_K[::-1]:
        settle(model, data, parts, command, home_J)
        distances = {pair: mujoco.mj_geomDistance(model, data, *pair, FAR_M, None) for pair in product(*geoms)}
        nearest = min(distances, key=lambda pair: distances[pair])
        gaps.append(mujoco.mj_geomDistance(model, data, *nearest, FAR_M, line_6))
        mat = data.site_xmat[site].reshape(3, 3)
        along = line_6[3:] - line_6[:3]
        along /= max(float(np.linalg.norm(along)), 1e-9)
        middle = (line_6[:3] + line_6[3:]) / 2 - data.site_xpos[site]
        middles.append(mat.T @ along * (middle @ along))
        lines.append(mat.T @ along)
        qpos.append(data.qpos[parts.linked].copy())
    if gaps[0] >= FAR_M:
        got = f"got {open:g}, at which the fingers are {FAR_M:g} m apart or more"
        raise UserError(f"gripper.open: {got}: is it in mm or degrees? Needed: m or rad, as the MJCF has it")
    if gaps[-1] > max(gaps[0] - CLOSES_M, 0.0):
        got = f"the gap between the bodies is {gaps[0]:.3f} m at open and {gaps[-1]:.3f} m at closed"
        remedy = "swap them, or link fingers that move the same way (gripper.links)"
        raise UserError(f"gripper.open, gripper.closed: {got}, needed: a larger one at open: {remedy}")
    if gaps[0] <= 0.0:
        raise UserError(f"gripper.bodies: {' and '.join(fingers)} touch at open: name the bodies of the pads")
    if max(abs((line := lines[POSITIONS // 4])[:2])) < ALONG:
        axis = ", ".join(f"{x:.2f}" for x in line)
        raise UserError(f"tool: the gripper closes along ({axis}) of the tool, needed: along x or y")
    qpos_KL, middle_K3 = np.array(qpos[::-1]), np.array(middles[::-1])
    corners = [corner for geom in np.concatenate(geoms) for corner in box_corners(model, data, geom)]
    reach_3 = (np.array(corners) - data.site_xpos[site]) @ data.site_xmat[site].reshape(3, 3)
    reach_3[:, :2] = np.abs(reach_3[:, :2])
    return Jaws(np.maximum.accumulate(gaps[::-1]), commands_K, qpos_KL, middle_K3, reach_3.max(0))


def box_corners(model: mujoco.MjModel, data: mujoco.MjData, geom: int) -> np.ndarray:
    """Return the corners of a geom's bounding box, [8, 3], m."""
    centre, half = model.geom_aabb[geom].reshape(2, 3)
    signs_83 = np.array(list(product((-1, 1), repeat=3)))
    corners_83: np.ndarray = (centre + half * signs_83) @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]
    return corners_83


def settle(model: mujoco.MjModel, data: mujoco.MjData, parts: Parts, command: float, home_J: np.ndarray) -> None:
    """Bring the gripper to a command, with the arm at home."""
    if parts.direct:
        data.qpos[parts.gripper.qpos] = command
        mujoco.mj_kinematics(model, data)
        return
    data.ctrl[parts.arm.ctrl], data.ctrl[parts.gripper.ctrl] = home_J, command
    for step in range(round(SETTLE_S / model.opt.timestep)):
        mujoco.mj_step(model, data)
        data.qpos[parts.arm.qpos], data.qvel[parts.arm.qvel] = home_J, 0.0
        if (speed := np.abs(data.qvel).max()) > DIVERGED:
            raise UserError("gripper: its simulation diverges, needed: armature and damping for its joints")
        if step > POSITIONS and speed < STILL:
            break
    mujoco.mj_kinematics(model, data)
