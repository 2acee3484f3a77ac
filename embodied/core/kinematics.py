"""Kinematics of arms: forward kinematics of one arm, inverse kinematics of many. numpy only.

Batched functions have the batch as the last axis, so every operation is vectorised over it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodied.core.spec import ArmSpec

Array = NDArray[np.float64]


def solve_spd(matrix: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Solve A x = b for many small symmetric positive definite A by Gauss-Jordan elimination.

    matrix [d, d, n], rhs [d, n] -> [d, n]. Such matrices need no pivoting. With the batch last every operation is
    vectorised over n, several times faster than a LAPACK call per 6 x 6 system.
    """
    d = len(matrix)
    augmented = np.concatenate([matrix, rhs[:, None]], axis=1)
    for k in range(d):
        rest = augmented[:, k + 1 :]  # columns up to k are the identity's by now and not read again
        pivot_row = rest[k] / augmented[k, k]
        rest -= augmented[:, k, None] * pivot_row
        rest[k] = pivot_row
    return augmented[:, d]


def damped_least_squares(
    jacobian_6vn: np.ndarray, twist_6n: np.ndarray, prior_vn: np.ndarray, damping: float
) -> np.ndarray:
    """Return joint displacements dq [v, n] with J dq near twist (damped), close to ``prior`` in the null space.

    dq = p + J^T (J J^T + damping^2 I)^-1 (twist - J p)   (Wampler 1986; Nakamura and Hanafusa 1986)
    """
    gram = np.zeros((6, 6, jacobian_6vn.shape[2]))
    gram[np.arange(6), np.arange(6)] = damping**2
    for column in jacobian_6vn.swapaxes(0, 1):  # not einsum, whose order of summation depends on n
        gram += column[:, None] * column
    residual = twist_6n - (jacobian_6vn * prior_vn).sum(1)
    displacement_vn: np.ndarray = prior_vn + (jacobian_6vn * solve_spd(gram, residual)[:, None]).sum(0)
    return displacement_vn


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the vector product of a and b, [3, ...], faster than ``np.cross``, which moves axes."""
    return np.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def matrix_of(quat: tuple[float, float, float, float]) -> Array:
    """Return the rotation matrix [3, 3] of a unit quaternion (w, x, y, z)."""
    w, x, y, z = quat
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def about(axis: Array, angle_rad: float) -> Array:
    """Return the rotation matrix [3, 3] of a turn about a unit axis [3] (Rodrigues)."""
    x, y, z = axis
    skew = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    turn: Array = np.eye(3) + np.sin(angle_rad) * skew + (1 - np.cos(angle_rad)) * (skew @ skew)
    return turn


class Chain:
    """Forward kinematics of one arm (``ArmSpec``), base frame, metres and radians."""

    def __init__(self, arm: ArmSpec) -> None:
        self._joints = [
            (np.array(joint.pos_m), matrix_of(joint.quat), np.array(joint.axis), joint.kind == "slide")
            for joint in arm.joints
        ]
        self._tool_pos, self._tool_mat = np.array(arm.tool_pos_m), matrix_of(arm.tool_quat)

    def tool(self, qpos_J: Array) -> tuple[Array, Array, Array]:
        """Return the tool's position [3], rotation matrix [3, 3] and Jacobian [6, J] at joint positions [J].

        The Jacobian has translation rows above rotation rows. Column i is (axis_i x (tool - anchor_i), axis_i) for a
        hinge and (axis_i, 0) for a slide.
        """
        pos, mat = np.zeros(3), np.eye(3)
        anchors, axes = np.empty((len(self._joints), 3)), np.empty((len(self._joints), 3))
        for i, (offset, frame, axis, slide) in enumerate(self._joints):
            pos, mat = pos + mat @ offset, mat @ frame
            anchors[i], axes[i] = pos, mat @ axis
            if slide:
                pos = pos + axes[i] * qpos_J[i]
            else:
                mat = mat @ about(axis, float(qpos_J[i]))
        pos, mat = pos + mat @ self._tool_pos, mat @ self._tool_mat
        jacobian = np.concatenate([cross(axes.T, (pos - anchors).T), axes.T])
        for i, (*_, slide) in enumerate(self._joints):
            if slide:
                jacobian[:3, i], jacobian[3:, i] = axes[i], 0.0
        return pos, mat, jacobian
