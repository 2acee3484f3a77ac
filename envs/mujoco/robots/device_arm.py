"""A ``GripperArm`` in simulations on any device: actions in [-1, 1] to actuator targets, in torch.

The same controller as ``AttachedArm``, without encoders and gears. It computes in float64: the least squares of a pose
that is almost singular would lose most digits of float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.envs.mujoco.arrays import Simulations, live
from embodied.envs.mujoco.robots.gripper_state import GripperState

if TYPE_CHECKING:
    from embodied.envs.mujoco.robots.gripper_arm import GripperArm


class DeviceArm(GripperState):
    """Turn actions into ``ctrl`` of a batch; see ``embodied.envs.mujoco.robots.base.TensorArm``."""

    def __init__(self, batch: Simulations, robot: GripperArm) -> None:
        super().__init__(batch, robot)
        model, joints = batch.model, self.num_joints
        self.ctrl = live(batch.bind("ctrl"))
        self.xaxis, self.xanchor = (live(batch.bind(name))[:, :joints] for name in ("xaxis", "xanchor"))
        self.slide_J1 = self._tensor(model.jnt_type[:joints] == mujoco.mjtJoint.mjJNT_SLIDE).bool().unsqueeze(-1)
        self.low_J, self.high_J = self._tensor(model.actuator_ctrlrange[:joints]).unbind(-1)
        self.home_J = self._tensor(robot.home_qpos)
        self.workspace_low_3 = self._tensor(self.config.workspace_low_m)
        self.workspace_high_3 = self._tensor(self.config.workspace_high_m)

    def observe(self) -> dict[str, Tensor]:
        return self.true_state()

    def reset(self, ids: Tensor, qpos_nJ: Tensor) -> None:
        joints = self.num_joints
        self.joint_pos[ids], self.ctrl[ids, :joints] = qpos_nJ, qpos_nJ
        self.finger_qpos[ids], self.ctrl[ids, joints:] = self.robot.finger_open_m, self.robot.finger_open_m

    def apply(self, action_NA: Tensor) -> None:
        """Write the actuator targets for actions [N, A] in [-1, 1]; see ``AttachedArm.apply``."""
        action, qpos, rate = action_NA.double(), self.joint_pos.double(), self.config.gripper_m
        if self.config.mode == "joint_delta":
            delta = action[:, : self.num_joints] * self.config.delta_rad
        else:
            prior = self.config.posture_gain * (self.home_J - qpos)
            delta = damped_least_squares(self._jacobian(), self._twist(action), prior, self.config.damping)
        self.ctrl[:, : self.num_joints] = (qpos + delta).clamp(self.low_J, self.high_J).to(self.ctrl.dtype)
        closed_m, open_m = self.robot.finger_closed_m, self.robot.finger_open_m
        finger = closed_m + (open_m - closed_m) * (action[:, -1:] + 1) / 2
        self.finger_targets += (finger - self.finger_targets).clamp(-rate, rate).to(self.ctrl.dtype)

    def _tensor(self, numbers: object) -> Tensor:
        return torch.as_tensor(np.asarray(numbers), dtype=torch.float64, device=self.joint_pos.device)

    def _jacobian(self) -> Tensor:
        """Return the geometric Jacobian of the tool centre point, [N, J, 6]: translation before rotation."""
        axis, lever = self.xaxis.double(), (self.tcp_pos[:, None] - self.xanchor).double()
        linear = torch.where(self.slide_J1, axis, torch.linalg.cross(axis, lever))
        return torch.cat([linear, torch.where(self.slide_J1, 0.0, axis)], -1)

    def _twist(self, action: Tensor) -> Tensor:
        """Return the commanded displacement [N, 6] (m, rad), with the tool kept in the workspace and vertical."""
        position, frame = self.tcp_pos.double(), self.tcp_mat.double()
        target = position + action[:, :3] * self.config.delta_m
        target = target.clamp(self.workspace_low_3, self.workspace_high_3)
        yaw = torch.atan2(frame[:, 3], frame[:, 0])
        turn = action[:, 3] * self.config.delta_rad if self.config.rotation else -yaw
        return torch.cat([target - position, torch.stack([-frame[:, 5], frame[:, 2], turn], -1)], -1)


def damped_least_squares(jacobian_NJ6: Tensor, twist_N6: Tensor, prior_NJ: Tensor, damping: float) -> Tensor:
    """Return joint displacements [N, J]; see ``embodied.core.kinematics.damped_least_squares``.

    Sums are written out, because the order of summation of a matrix product may depend on N.
    """
    gram = (jacobian_NJ6[..., :, None] * jacobian_NJ6[..., None, :]).sum(1)
    gram = gram + damping**2 * torch.eye(6, dtype=gram.dtype, device=gram.device)
    residual = twist_N6 - (jacobian_NJ6 * prior_NJ[..., None]).sum(1)
    factor = torch.linalg.cholesky_ex(gram).L
    weight_N6 = torch.cholesky_solve(residual[..., None], factor).squeeze(-1)
    return prior_NJ + (jacobian_NJ6 * weight_N6[:, None]).sum(-1)
