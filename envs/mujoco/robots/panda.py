"""The Panda as an action space: actions in [-1, 1] to actuator targets, for all envs of a batch at once."""

from __future__ import annotations

from typing import Literal

import numpy as np
from mujoco.batch import Batch

from embodied.core.options import config_dataclass
from embodied.core.spec import ActionTerm, Box

# Gripper down, tool centre point at (0.615, 0, 0.17).
HOME_QPOS = np.array([0, np.pi / 8, 0, -5 * np.pi / 8, 0, 3 * np.pi / 4, np.pi / 4])
FINGER_OPEN_M, FINGER_CLOSED_M = 0.04, -0.01  # target of each finger; below 0 so that closing squeezes
NUM_ARM = 7


@config_dataclass
class ControlConfig:
    """How actions move the arm."""

    mode: Literal["ee_delta", "joint_delta"] = "ee_delta"
    """ee_delta: Cartesian displacement of the tool centre point, gripper kept vertical. joint_delta: of the joints."""
    delta_m: float = 0.06
    """Displacement of the target from the present position at action 1."""
    delta_rad: float = 0.15
    """Rotation, or displacement of each joint, at action 1."""
    gripper_m: float = 0.01
    """How far each finger's target may move in a control step; closing from open takes about five of them."""
    rotation: bool = False
    """With ee_delta, add a rotation about the vertical as the action before the gripper."""
    damping: float = 0.03
    """Damping of the least-squares inverse kinematics."""
    posture_gain: float = 0.03
    """How strongly the null space is pulled to the home posture, per control step."""
    workspace_low_m: tuple[float, float, float] = (0.25, -0.35, 0.012)
    """One corner of the box that the tool centre point's target stays in."""
    workspace_high_m: tuple[float, float, float] = (0.75, 0.35, 0.45)
    """The opposite corner."""


def action_space(config: ControlConfig) -> Box:
    """What actions command under ``config``, the gripper last."""
    move = [ActionTerm(f"d{axis}", f"tool along {axis} of the base", config.delta_m, unit="m") for axis in "xyz"]
    if config.rotation:
        move.append(ActionTerm("dyaw", "tool about the vertical", config.delta_rad, unit="rad"))
    if config.mode == "joint_delta":
        move = [
            ActionTerm(f"djoint{i + 1}", f"joint {i + 1} from its present angle", config.delta_rad, unit="rad")
            for i in range(NUM_ARM)
        ]
    half_m, centre_m = (FINGER_OPEN_M - FINGER_CLOSED_M) / 2, (FINGER_OPEN_M + FINGER_CLOSED_M) / 2
    return Box((*move, ActionTerm("gripper", "target of each finger, 1 open and -1 closed", half_m, centre_m, "m")))


def solve_spd(matrix: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Solve A x = b for many small symmetric positive definite A by Gauss-Jordan elimination.

    matrix [d, d, n], rhs [d, n] -> [d, n]. Such matrices need no pivoting. With the batch last every operation is one
    stream of vector instructions over n, several times faster than a LAPACK call for each 6 x 6 system.
    """
    d = len(matrix)
    augmented = np.concatenate([matrix, rhs[:, None]], axis=1)
    for k in range(d):
        rest = augmented[:, k + 1 :]  # columns up to k are those of the identity by now, and never read again
        pivot_row = rest[k] / augmented[k, k]
        rest -= augmented[:, k, None] * pivot_row
        rest[k] = pivot_row
    return augmented[:, d]


def damped_least_squares(
    jacobian_6vn: np.ndarray, twist_6n: np.ndarray, prior_vn: np.ndarray, damping: float
) -> np.ndarray:
    """Joint displacement dq [v, n] with J dq = twist as nearly as damping allows, close to ``prior`` in the null space.

    dq = p + J^T (J J^T + damping^2 I)^-1 (twist - J p)   (Wampler 1986; Nakamura and Hanafusa 1986)
    """
    gram = np.zeros((6, 6, jacobian_6vn.shape[2]))
    gram[np.arange(6), np.arange(6)] = damping**2
    for column in jacobian_6vn.swapaxes(0, 1):  # not einsum, whose order of summation depends on n
        gram += column[:, None] * column
    residual = twist_6n - (jacobian_6vn * prior_vn).sum(1)
    return prior_vn + (jacobian_6vn * solve_spd(gram, residual)[:, None]).sum(0)


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Vector product of a and b, [3, ...]; ``np.cross`` spends more on its axes than on its numbers."""
    return np.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


class PandaArm:
    """Turns actions into ``ctrl`` of a batch. An arm action is relative to the present pose, so the controller holds no
    state but the fingers' target, which is in ``ctrl`` and observed."""

    def __init__(self, batch: Batch, config: ControlConfig) -> None:
        model = batch.model
        self.config = config
        self.batch = batch
        self.qpos, self.ctrl = batch.bind("qpos"), batch.bind("ctrl")
        self.tcp_site = model.site("tcp").id
        self.site_xpos, self.site_xmat = batch.bind("site_xpos"), batch.bind("site_xmat")
        self.xaxis, self.xanchor = batch.bind("xaxis"), batch.bind("xanchor")
        self.low, self.high = model.actuator_ctrlrange[:NUM_ARM].T

    @property
    def action_names(self) -> tuple[str, ...]:
        return action_space(self.config).names

    def reset(self, ids: np.ndarray, qpos_n7: np.ndarray) -> None:
        """Put the arm of envs ``ids`` at joint angles qpos [n, 7] with the gripper open, and hold it there."""
        self.qpos[ids, :NUM_ARM] = qpos_n7
        self.qpos[ids, NUM_ARM : NUM_ARM + 2] = FINGER_OPEN_M
        self.ctrl[ids, :NUM_ARM] = qpos_n7
        self.ctrl[ids, NUM_ARM:] = FINGER_OPEN_M

    def apply(self, action_NA: np.ndarray, ids: np.ndarray | None) -> None:
        """Write the actuator targets for actions [N, A] in [-1, 1] of the envs ``ids`` (None: all).

        ``site_xpos`` and ``qpos`` must be current. The gripper action is the opening wanted, 1 open and -1
        closed; the fingers' target follows it at a limited rate, so that noise does not drop what is held.
        Targets are computed for all N: picking rows first costs more than it saves.
        """
        qpos, ctrl, rate = self.qpos[:, :NUM_ARM], np.empty_like(self.ctrl), self.config.gripper_m
        if self.config.mode == "joint_delta":
            delta = action_NA[:, :NUM_ARM] * self.config.delta_rad
        else:
            prior = self.config.posture_gain * (HOME_QPOS - qpos)
            twist = self._twist(action_NA)
            delta = damped_least_squares(self._jacobian(), twist, prior.T.copy(), self.config.damping).T
        ctrl[:, :NUM_ARM] = (qpos + delta).clip(self.low, self.high)
        finger = FINGER_CLOSED_M + (FINGER_OPEN_M - FINGER_CLOSED_M) * (action_NA[:, -1:] + 1) / 2
        before = self.ctrl[:, NUM_ARM:]
        ctrl[:, NUM_ARM:] = before + (finger - before).clip(-rate, rate)
        if ids is None:
            self.ctrl[:] = ctrl
        else:
            self.ctrl[ids] = ctrl[ids]

    def _jacobian(self) -> np.ndarray:
        """Geometric Jacobian of the tool centre point, [6, 7, N]: translation rows above rotation rows.

        Column i is (axis_i x (point - anchor_i), axis_i). The engine's ``Batch.jac`` gives the same but runs the
        kinematics again and makes a persistent batch start its next substep afresh; these arrays are current already.
        """
        axis = self.xaxis[:, :NUM_ARM].T.copy()
        lever = (self.site_xpos[:, None, self.tcp_site] - self.xanchor[:, :NUM_ARM]).T.copy()
        return np.concatenate([cross(axis, lever), axis])

    def _twist(self, action_NA: np.ndarray) -> np.ndarray:
        """Displacement [6, N] (metres, radians) that the action asks for, kept in the workspace and vertical."""
        position, frame = self.site_xpos[:, self.tcp_site], self.site_xmat[:, self.tcp_site]
        target = position + action_NA[:, :3] * self.config.delta_m
        target = target.clip(self.config.workspace_low_m, self.config.workspace_high_m)
        twist = np.zeros((6, len(position)))
        twist[:3] = (target - position).T
        # frame is the tool's matrix by rows: its x axis is entries 0, 3, 6, its z axis 2, 5, 8
        twist[3], twist[4] = -frame[:, 5], frame[:, 2]  # z axis x (0, 0, -1): turns the tool's z downwards
        yaw = np.arctan2(frame[:, 3], frame[:, 0])
        twist[5] = action_NA[:, 3] * self.config.delta_rad if self.config.rotation else -yaw
        return twist
