"""From a policy's action to position targets of the joints: the control law that training used, for one arm.

    ee_delta      tool displacement (m), kept in the workspace and vertical ─► damped least squares ─► joint targets
    joint_delta   joint displacements (rad) ─► joint targets
    last entry    wanted finger position (m), followed by at most ``max_step_m`` per control step

Both are relative to the measured pose. numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodied.core.kinematics import Chain, damped_least_squares
from embodied.core.spec import ActionTerm, ArmSpec

Array = NDArray[np.float64]


class ArmController:
    """Turn physical actions into position targets."""

    def __init__(self, arm: ArmSpec, action: tuple[ActionTerm, ...]) -> None:
        self.arm, self.action = arm, action
        self.chain = Chain(arm)
        self.low = np.array([joint.low for joint in arm.joints])
        self.high = np.array([joint.high for joint in arm.joints])
        self.home = np.array([joint.home for joint in arm.joints])

    def targets(self, action_A: NDArray[np.floating], qpos_J: Array, finger_target_m: float) -> tuple[Array, float]:
        """Return joint targets [J] and the next finger target for one control step.

        action: physical units. qpos: measured joint positions. finger_target: the one that was last commanded, m.
        """
        joints = len(self.arm.joints)
        if self.arm.control == "joint_delta":
            delta = np.asarray(action_A[:joints], np.float64)
        else:
            prior = self.arm.posture_gain * (self.home - qpos_J)
            position, rotation, jacobian = self.chain.tool(qpos_J)
            twist = self._twist(action_A, position, rotation)
            delta = damped_least_squares(jacobian[..., None], twist[:, None], prior[:, None], self.arm.damping)[:, 0]
        step_m = self.arm.gripper.max_step_m
        finger_m = finger_target_m + float(np.clip(action_A[-1] - finger_target_m, -step_m, step_m))
        return np.clip(qpos_J + delta, self.low, self.high), finger_m

    def _twist(self, action_A: NDArray[np.floating], position: Array, rotation: Array) -> Array:
        """Return the commanded displacement [6] (m, rad) of the tool."""
        target = np.clip(position + action_A[:3], self.arm.workspace_low_m, self.arm.workspace_high_m)
        yaw = np.arctan2(rotation[1, 0], rotation[0, 0])
        turn = float(action_A[3]) if self.arm.rotation else -yaw
        # the cross product of the tool's z axis and (0, 0, -1) turns the tool downwards
        return np.array([*(target - position), -rotation[1, 2], rotation[0, 2], turn])
