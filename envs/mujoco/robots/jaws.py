"""How wide two fingers are open, and where between them an object is held: measured on their geoms."""

from itertools import product
from typing import NamedTuple

import mujoco
import numpy as np
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.mujoco.robots.parts import Place

POSITIONS = 33  # of the gripper at which gaps are measured
FAR_M = 1.0  # beyond which distances are not measured


class Jaws(NamedTuple):
    """Gaps between two fingers at K positions of the gripper, from closed to open."""

    gap_K: np.ndarray
    """Distance between the fingers, m; below 0 where they overlap."""
    position_K: np.ndarray
    """Position of the gripper's joints, in their unit."""
    middle_K3: np.ndarray
    """Middle of the gap, as far along the line between the fingers, in the tool's frame, m."""

    def hold(self, width_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions [n] that hold objects this wide (m), and the objects' centres, [n, 3], m."""
        columns = np.column_stack([self.position_K, self.middle_K3]).T
        found = [np.interp(width_n.cpu().numpy(), self.gap_K, column_K) for column_K in columns]
        position_n, centre_3n = width_n.new_tensor(found[0]), width_n.new_tensor(np.array(found[1:]))
        return position_n, centre_3n.T


def measure_jaws(model: mujoco.MjModel, gripper: Place, fingers: tuple[str, str], closed: float, open: float) -> Jaws:
    """Measure the gaps from ``closed`` to ``open``. UserError for a finger without a geom that touches objects."""
    data, touching = mujoco.MjData(model), model.geom_contype | model.geom_conaffinity
    geoms = [np.flatnonzero((model.geom_bodyid == model.body(name).id) & (touching != 0)) for name in fingers]
    for name, found in zip(fingers, geoms, strict=True):
        if not len(found):
            raise UserError(f"gripper.bodies: '{name}' has no geom that touches objects, needed: one or more")
    positions_K, gaps, middles = np.linspace(closed, open, POSITIONS), [], []
    line_6, site = np.zeros(6), model.site("tcp").id
    for position in positions_K:
        data.qpos[gripper.qpos] = position
        mujoco.mj_kinematics(model, data)
        distances = {pair: mujoco.mj_geomDistance(model, data, *pair, FAR_M, None) for pair in product(*geoms)}
        nearest = min(distances, key=lambda pair: distances[pair])
        gaps.append(mujoco.mj_geomDistance(model, data, *nearest, FAR_M, line_6))
        along = line_6[3:] - line_6[:3]
        along /= max(float(np.linalg.norm(along)), 1e-9)
        middle = (line_6[:3] + line_6[3:]) / 2 - data.site_xpos[site]
        middles.append(data.site_xmat[site].reshape(3, 3).T @ along * (middle @ along))
    return Jaws(np.maximum.accumulate(gaps), positions_K, np.array(middles))
