"""A ``GripperArm`` in simulations on any device: actions in [-1, 1] to actuator targets, in torch.

The same law as that of ``AttachedArm``, without encoders and gears. It computes in float64: the least squares of a pose
that is almost singular would lose most digits of float32.
"""

from __future__ import annotations

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.core.arm.control import ArmLaw, ToolPose
from embodied.envs.mujoco.arrays import Simulations, live
from embodied.envs.mujoco.robots.gripper_description import GripperDescription
from embodied.envs.mujoco.robots.gripper_state import GripperState


class DeviceArm(GripperState):
    """Turn actions into ``ctrl`` of a batch; see ``embodied.envs.mujoco.robots.base.TensorArm``."""

    def __init__(self, batch: Simulations, robot: GripperDescription) -> None:
        super().__init__(batch, robot)
        model, joints = batch.model, self.num_joints
        self.ctrl = live(batch.bind("ctrl"))
        self.xaxis, self.xanchor = (live(batch.bind(name))[:, :joints] for name in ("xaxis", "xanchor"))
        self.slide_J1 = self._tensor(model.jnt_type[:joints] == mujoco.mjtJoint.mjJNT_SLIDE).bool().unsqueeze(-1)
        self.law = ArmLaw(robot.kinematics, torch, self._tensor, damped_least_squares)
        self.move_scale_M = self._tensor(self.move_scale)

    def observe(self) -> dict[str, Tensor]:
        return self.true_state()

    def reset(self, ids: Tensor, qpos_nJ: Tensor) -> None:
        joints = self.num_joints
        self.joint_pos[ids], self.ctrl[ids, :joints] = qpos_nJ, qpos_nJ
        self.finger_qpos[ids], self.ctrl[ids, joints:] = self.robot.finger_open_m, self.robot.finger_open_m

    def apply(self, action_NA: Tensor) -> None:
        """Write the actuator targets for actions [N, A] in [-1, 1]; see ``AttachedArm.apply``."""
        action, joints = action_NA.double(), self.num_joints
        move_MN = (action[:, :-1] * self.move_scale_M).T
        target_JN = self.law.joint_targets(move_MN, self.joint_pos.double().T, self._tool)
        self.ctrl[:, :joints] = target_JN.T.to(self.ctrl.dtype)
        goal = self.finger_goal(action[:, -1:])
        self.finger_targets += self.law.finger_step(goal, self.finger_targets).to(self.ctrl.dtype)

    def _tensor(self, numbers: object) -> Tensor:
        return torch.as_tensor(np.asarray(numbers), dtype=torch.float64, device=self.joint_pos.device)

    def _tool(self) -> ToolPose:
        return ToolPose(self.tcp_pos.double().T, self.tcp_mat.double().T, self._jacobian())

    def _jacobian(self) -> Tensor:
        """Return the geometric Jacobian of the tool centre point, [6, J, N]: translation above rotation."""
        axis, lever = self.xaxis.double(), (self.tcp_pos[:, None] - self.xanchor).double()
        linear = torch.where(self.slide_J1, axis, torch.linalg.cross(axis, lever))
        return torch.cat([linear, torch.where(self.slide_J1, 0.0, axis)], -1).permute(2, 1, 0)


def damped_least_squares(jacobian_6JN: Tensor, twist_6N: Tensor, prior_JN: Tensor, damping: float) -> Tensor:
    """Return joint displacements [J, N]; see ``embodied.core.arm.kinematics.damped_least_squares``.

    Sums are written out, because the order of summation of a matrix product may depend on N.
    """
    jacobian_NJ6, prior_NJ = jacobian_6JN.permute(2, 1, 0), prior_JN.T
    gram = (jacobian_NJ6[..., :, None] * jacobian_NJ6[..., None, :]).sum(1)
    gram = gram + damping**2 * torch.eye(6, dtype=gram.dtype, device=gram.device)
    residual = twist_6N.T - (jacobian_NJ6 * prior_NJ[..., None]).sum(1)
    factor = torch.linalg.cholesky_ex(gram).L
    weight_N6 = torch.cholesky_solve(residual[..., None], factor).squeeze(-1)
    return (prior_NJ + (jacobian_NJ6 * weight_N6[:, None]).sum(-1)).T
