"""Inverse kinematics of many arms at once. The batch is the last axis, so every operation is vectorised over it."""

from __future__ import annotations

import numpy as np


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
