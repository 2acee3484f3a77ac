"""The control law of training (embodied.core.arm.control) for one arm, in physical units. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm.control import ArmLaw, ToolPose
from embodied.core.arm.kinematics import Chain
from embodied.core.spec import ActionTerm, ArmSpec

Array = NDArray[np.float64]


class ArmController:
    """Turn physical actions into position targets."""

    def __init__(self, arm: ArmSpec, action: tuple[ActionTerm, ...]) -> None:
        self.arm, self.action = arm, action
        self.chain, self.law = Chain(arm), ArmLaw(arm)

    def targets(self, action_A: NDArray[np.floating], qpos_J: Array, finger_target_m: float) -> tuple[Array, float]:
        """Return joint targets [J] and the next finger target for one control step.

        action: physical units. qpos: measured joint positions. finger_target: the one that was last commanded, m.
        """
        action = np.asarray(action_A, np.float64)
        qpos_J1 = np.asarray(qpos_J, np.float64)[:, None]

        def tool() -> ToolPose:
            position, rotation, jacobian = self.chain.tools(qpos_J1)
            return ToolPose(position, rotation.reshape(9, 1), jacobian)

        targets: Array = self.law.joint_targets(action[:-1, None], qpos_J1, tool)[:, 0]
        return targets, float(finger_target_m + self.law.finger_step(action[-1], finger_target_m))
