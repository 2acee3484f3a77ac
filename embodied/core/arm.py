"""The arm: kinematics, and the control law from an action to position targets. No torch is imported here.

    ee_delta      tool displacement (m), kept in the workspace and vertical ─► damped least squares ─► joint targets
    joint_delta   joint displacements (rad) ─► joint targets
    gripper       wanted finger position (m), followed by at most ``max_step_m`` per control step

Displacements are relative to the measured pose, or to that of the last targets (``ArmSpec.from_target``). Training and
robots use this law: the simulated arms compute it for all envs, a robot's computer for one arm. Every array has the
batch last, so every operation is vectorised over it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embodied.core.spec import ArmSpec

Array = NDArray[np.float64]
LEVEL = 0.5  # gain with which an arm of few joints turns its tool downwards
AnyArray = Any
"""An array of numpy or a tensor of torch, float64."""


def solve_spd(matrix: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Solve A x = b for many small symmetric positive definite A by Gaussian elimination.

    matrix [d, d, n], of which the upper triangle is read; rhs [d, n] -> [d, n]. Such matrices need no pivoting. With
    the batch last every operation is vectorised over n, several times faster than a LAPACK call per 6 x 6 system.
    """
    d = len(matrix)
    augmented = np.concatenate([matrix, rhs[:, None]], axis=1)
    for k in range(d - 1):
        row = augmented[k, k + 1 :]
        augmented[k + 1 :, k + 1 :] -= (row[:-1] / augmented[k, k])[:, None] * row
    solution = np.empty_like(rhs)
    for k in reversed(range(d)):
        known = (augmented[k, k + 1 : d] * solution[k + 1 :]).sum(0)
        solution[k] = (augmented[k, d] - known) / augmented[k, k]
    return solution


def damped_least_squares(
    jacobian_6vn: np.ndarray, twist_6n: np.ndarray, prior_vn: np.ndarray, damping: float
) -> np.ndarray:
    """Return joint displacements dq [v, n] with J dq near twist (damped), close to ``prior`` in the null space.

    dq = p + J^T (J J^T + damping^2 I)^-1 (twist - J p)   (Wampler 1986; Nakamura and Hanafusa 1986)
    """
    twist_6n, prior_vn = np.ascontiguousarray(twist_6n), np.ascontiguousarray(prior_vn)
    rows = len(twist_6n)  # or 3, of the position alone
    gram = np.zeros((rows, rows, jacobian_6vn.shape[2]))  # its upper triangle
    for i, row in enumerate(jacobian_6vn):
        gram[i, i:] = (row * jacobian_6vn[i:]).sum(1)
        gram[i, i] += damping**2
    residual = twist_6n - (jacobian_6vn * prior_vn).sum(1)
    displacement_vn: np.ndarray = prior_vn + (jacobian_6vn * solve_spd(gram, residual)[:, None]).sum(0)
    return displacement_vn


def cross(a: AnyArray, b: AnyArray, xp: Any = np) -> AnyArray:
    """Return the vector product of a and b, [3, ...], faster than ``np.cross``, which moves axes."""
    return xp.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


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


class Chain:
    """Forward kinematics of an arm (``ArmSpec``), base frame, metres and radians.

    Inside, the frame of each joint is turned so that its z axis is the joint's axis.
    xp: ``numpy`` or ``torch``. array: makes an array of numbers.
    """

    def __init__(self, arm: ArmSpec, xp: Any = np, array: Callable[[Any], AnyArray] = np.asarray) -> None:
        self.xp, self._joints = xp, []
        before = np.eye(3)  # from the turned frame of the joint before to its own
        for joint in arm.joints:
            aligned = _aligned(np.array(joint.axis))
            step = before @ np.column_stack([np.array(joint.pos_m), matrix_of(joint.quat) @ aligned])
            self._joints.append((array(step), joint.kind == "slide"))
            before = aligned.T
        self._tool = array(before @ np.column_stack([np.array(arm.tool_pos_m), matrix_of(arm.tool_quat)]))
        self._base = array(np.eye(3)[..., None])

    def tool(self, qpos_J: Array) -> tuple[Array, Array, Array]:
        """Return ``tools`` of one arm: position [3], rotation matrix [3, 3] and Jacobian [6, J]."""
        pos, mat, jacobian = self.tools(qpos_J[:, None])
        return pos[..., 0], mat[..., 0], jacobian[..., 0]

    def tools(self, qpos_JN: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Return the tools' positions [3, N], rotation matrices [3, 3, N] and Jacobians [6, J, N] at joint positions.

        A Jacobian has translation rows above rotation rows. Column i is (axis_i x (tool - anchor_i), axis_i) for a
        hinge and (axis_i, 0) for a slide.
        """
        pos, mat, anchors, axes = self._walk(qpos_JN)
        jacobian = self.xp.concatenate([cross(axes, pos[:, None] - anchors, self.xp), axes])
        for i, (_, slide) in enumerate(self._joints):
            if slide:
                jacobian[:3, i], jacobian[3:, i] = axes[:, i], 0.0
        return pos, mat, jacobian

    def points(self, qpos_J: Array) -> Array:
        """Return the points of the arm from the base over every joint to the tool, [J + 2, 3]."""
        pos, _, anchors, _ = self._walk(qpos_J[:, None])
        return np.concatenate([np.zeros((1, 3)), anchors[..., 0].T, pos.T])

    def _walk(self, qpos_JN: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray]:
        """Return position [3, N] and rotation [3, 3, N] of the tools, anchors and axes [3, J, N] of the joints."""
        xp, anchors, axes = self.xp, [], []
        sin, cos = xp.sin(qpos_JN), xp.cos(qpos_JN)
        mat = self._base + xp.zeros_like(qpos_JN[0])
        pos = xp.zeros_like(mat[:, 0])
        for i, (step, slide) in enumerate(self._joints):
            turned = _turn(mat, step)
            pos, mat = pos + turned[:, 0], turned[:, 1:]
            x, y, z = mat[:, 0], mat[:, 1], mat[:, 2]
            anchors.append(pos)
            axes.append(z)
            if slide:
                pos = pos + z * qpos_JN[i]
            else:
                mat = xp.stack([cos[i] * x + sin[i] * y, cos[i] * y - sin[i] * x, z], 1)
        turned = _turn(mat, self._tool)
        return pos + turned[:, 0], turned[:, 1:], xp.stack(anchors, 1), xp.stack(axes, 1)


def _aligned(axis: Array) -> Array:
    """Return a rotation matrix [3, 3] whose z axis is the unit vector ``axis`` [3]."""
    if axis[2] == 1.0:
        return np.eye(3)
    x = np.cross(np.eye(3)[np.abs(axis).argmin()], axis)
    x /= np.linalg.norm(x)
    return np.column_stack([x, np.cross(axis, x), axis])


def _turn(mat_33N: AnyArray, columns_3c: AnyArray) -> AnyArray:
    """Return the columns turned by each matrix, [3, c, N]; not by BLAS, whose order of summation depends on N."""
    total = mat_33N[:, 0, None] * columns_3c[0, :, None]
    for k in (1, 2):
        total += mat_33N[:, k, None] * columns_3c[k, :, None]
    return total


class ToolPose(NamedTuple):
    """Where the tools of N arms are."""

    position_3N: AnyArray
    frame_9N: AnyArray
    """Rotation matrix of the tool by rows: its x axis is entries 0, 3 and 6, its z axis 2, 5 and 8."""
    jacobian_6JN: AnyArray
    """Jacobian of the tool, translation above rotation."""


class ArmLaw:
    """The law of one arm for arrays of a library.

    xp: ``numpy`` or ``torch``. array: makes an array of numbers. least_squares: its ``damped_least_squares``. With a
    free orientation ee_delta controls the position of the tool and, with ``rotation``, its turn about its own axis.
    That axis is vertical as far as position and limits of joints allow it.
    """

    def __init__(
        self,
        arm: ArmSpec,
        xp: Any = np,
        array: Callable[[Any], AnyArray] = np.asarray,
        least_squares: Callable[[AnyArray, AnyArray, AnyArray, float], AnyArray] = damped_least_squares,
    ) -> None:
        self.arm, self.xp, self.least_squares = arm, xp, least_squares
        self.low_J1, self.high_J1, self.home_J1 = (
            array([[getattr(joint, name)] for joint in arm.joints]) for name in ("low", "high", "home")
        )
        self.workspace_low_31 = array([[bound] for bound in arm.workspace_low_m])
        self.workspace_high_31 = array([[bound] for bound in arm.workspace_high_m])

    def joint_targets(self, move_MN: AnyArray, qpos_JN: AnyArray, tool: Callable[[], ToolPose]) -> AnyArray:
        """Return joint targets [J, N]. move: action without the gripper (m, rad).

        qpos: the joint positions that displacements are relative to. tool: returns the tool's pose at these.
        """
        if self.arm.control == "joint_delta":
            delta_JN = move_MN
        else:
            pose, prior_JN = tool(), self.arm.posture_gain * (self.home_J1 - qpos_JN)
            twist = self._twist(move_MN, pose)
            if self.arm.orientation == "free":
                return self._tilting_targets(twist, qpos_JN, pose, prior_JN)
            delta_JN = self.least_squares(pose.jacobian_6JN, twist, prior_JN, self.arm.damping)
        return (qpos_JN + delta_JN).clip(self.low_J1, self.high_J1)

    def _tilting_targets(self, twist_6N: AnyArray, qpos_JN: AnyArray, pose: ToolPose, prior_JN: AnyArray) -> AnyArray:
        """Return joint targets [J, N] that make the tool vertical only where this does not displace it.

        A second solution gives what damping, or joints at their limits, left out of the first.
        """
        xp, jacobian, twist = self.xp, pose.jacobian_6JN[:3], twist_6N[:3]
        turns = pose.jacobian_6JN[3:]
        prior_JN = prior_JN + LEVEL * (turns[:2] * twist_6N[3:5, None]).sum(0)
        if self.arm.rotation:
            spin_JN = -(turns * pose.frame_9N[2::3, None]).sum(0)
            jacobian, twist = xp.concatenate([jacobian, spin_JN[None]]), xp.concatenate([twist, twist_6N[5:]])
        wanted_JN = qpos_JN + self.least_squares(jacobian, twist, prior_JN, self.arm.damping)
        target_JN = wanted_JN.clip(self.low_J1, self.high_J1)
        stuck_JN = target_JN != wanted_JN
        rest = twist - (jacobian * xp.where(stuck_JN, target_JN - qpos_JN, 0.0)).sum(1)
        others = xp.where(stuck_JN, 0.0, jacobian)
        first_JN = xp.where(stuck_JN.any(0), 0.0, target_JN - qpos_JN)
        wanted_JN = qpos_JN + self.least_squares(others, rest, first_JN, self.arm.damping)
        return xp.where(stuck_JN, target_JN, wanted_JN).clip(self.low_J1, self.high_J1)

    def finger_step(self, wanted_m: AnyArray, target_m: AnyArray) -> AnyArray:
        """Return the movement of the fingers' target. Its rate is limited, so that noise drops no held object."""
        step_m = self.arm.gripper.max_step_m
        return (wanted_m - target_m).clip(-step_m, step_m)

    def _twist(self, move_MN: AnyArray, pose: ToolPose) -> AnyArray:
        """Return the commanded displacement [6, N] (m, rad), with the tool kept in the workspace and vertical."""
        frame = pose.frame_9N
        target_3N = (pose.position_3N + move_MN[:3]).clip(self.workspace_low_31, self.workspace_high_31)
        turn_N = move_MN[3] if self.arm.rotation else -self.xp.arctan2(frame[3], frame[0])
        # the cross product of the tool's z axis and (0, 0, -1) turns the tool downwards
        turns_3N = self.xp.stack([-frame[5], frame[2], turn_N])
        return self.xp.concatenate([target_3N - pose.position_3N, turns_3N])
