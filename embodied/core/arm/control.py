"""The control law of an arm: from an action to position targets. One formulation for numpy and for torch.

    ee_delta      tool displacement (m), kept in the workspace and vertical ─► damped least squares ─► joint targets
    joint_delta   joint displacements (rad) ─► joint targets
    gripper       wanted finger position (m), followed by at most ``max_step_m`` per control step

Displacements are relative to the measured pose. Training and robots use this law: the simulated arms compute it for all
envs, a robot's computer for one arm. Every array has the batch last. No torch is imported here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from embodied.core.arm.kinematics import damped_least_squares
from embodied.core.spec import ArmSpec

Array = Any
"""An array of numpy or a tensor of torch, float64."""


class ToolPose(NamedTuple):
    """Where the tools of N arms are."""

    position_3N: Array
    """Tool centre point, base frame, m."""
    frame_9N: Array
    """Rotation matrix of the tool by rows: its x axis is entries 0, 3 and 6, its z axis 2, 5 and 8."""
    jacobian_6JN: Array
    """Jacobian of the tool, translation above rotation."""


class ArmLaw:
    """The law of one arm for arrays of a library.

    xp: ``numpy`` or ``torch``. array: makes an array of numbers. least_squares: its ``damped_least_squares``.
    """

    def __init__(
        self,
        arm: ArmSpec,
        xp: Any = np,
        array: Callable[[Any], Array] = np.asarray,
        least_squares: Callable[[Array, Array, Array, float], Array] = damped_least_squares,
    ) -> None:
        self.arm, self.xp, self.least_squares = arm, xp, least_squares
        self.low_J1, self.high_J1, self.home_J1 = (
            array([[getattr(joint, name)] for joint in arm.joints]) for name in ("low", "high", "home")
        )
        self.workspace_low_31 = array([[bound] for bound in arm.workspace_low_m])
        self.workspace_high_31 = array([[bound] for bound in arm.workspace_high_m])

    def joint_targets(self, move_MN: Array, qpos_JN: Array, tool: Callable[[], ToolPose]) -> Array:
        """Return joint targets [J, N].

        move: the action without the gripper, m and rad. tool: returns the measured pose; called with ``ee_delta``.
        """
        if self.arm.control == "joint_delta":
            delta_JN = move_MN
        else:
            pose, prior_JN = tool(), self.arm.posture_gain * (self.home_J1 - qpos_JN)
            delta_JN = self.least_squares(pose.jacobian_6JN, self._twist(move_MN, pose), prior_JN, self.arm.damping)
        return (qpos_JN + delta_JN).clip(self.low_J1, self.high_J1)

    def finger_step(self, wanted_m: Array, target_m: Array) -> Array:
        """Return the movement of the fingers' target, m: towards the wanted one, at a limited rate.

        So the noise of exploration does not drop a held object.
        """
        step_m = self.arm.gripper.max_step_m
        return (wanted_m - target_m).clip(-step_m, step_m)

    def _twist(self, move_MN: Array, pose: ToolPose) -> Array:
        """Return the commanded displacement [6, N] (m, rad), with the tool kept in the workspace and vertical."""
        frame = pose.frame_9N
        target_3N = (pose.position_3N + move_MN[:3]).clip(self.workspace_low_31, self.workspace_high_31)
        turn_N = move_MN[3] if self.arm.rotation else -self.xp.arctan2(frame[3], frame[0])
        # the cross product of the tool's z axis and (0, 0, -1) turns the tool downwards
        turns_3N = self.xp.stack([-frame[5], frame[2], turn_N])
        return self.xp.concatenate([target_3N - pose.position_3N, turns_3N])
