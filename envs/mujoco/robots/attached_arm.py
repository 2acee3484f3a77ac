"""A ``GripperArm`` in the simulations of a batch: actions in [-1, 1] to actuator targets, for all envs at once.

action ──► pose, measured or true ──► joint targets ──► minus encoder offset ──► backlash ──► ctrl
"""

from __future__ import annotations

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.arm.control import ArmLaw, ToolPose
from embodied.core.arm.kinematics import cross
from embodied.envs.mujoco.robots.backlash import backlash
from embodied.envs.mujoco.robots.base import Measurement
from embodied.envs.mujoco.robots.gripper_description import GripperDescription
from embodied.envs.mujoco.robots.gripper_state import GripperState


class AttachedArm(GripperState):
    """Turn actions into ``ctrl`` of a batch; see ``embodied.envs.mujoco.robots.base.EncodedArm``."""

    def __init__(self, batch: Batch, robot: GripperDescription) -> None:
        super().__init__(batch, robot)
        model = batch.model
        self.batch = batch
        self.encoder_offset_NJ: np.ndarray | None = None
        self.backlash_NJ: np.ndarray | None = None
        self.chain, self.law = robot.chain, ArmLaw(robot.kinematics)
        self.qpos, self.ctrl = batch.bind("qpos"), batch.bind("ctrl")
        self.site_xpos, self.site_xmat = batch.bind("site_xpos"), batch.bind("site_xmat")
        self.xaxis, self.xanchor = batch.bind("xaxis"), batch.bind("xanchor")
        self.slides = np.flatnonzero(model.jnt_type[: self.num_joints] == mujoco.mjtJoint.mjJNT_SLIDE)

    def observe(self, measured: Measurement | None = None) -> dict[str, Tensor]:
        if measured is None:
            return self.true_state()
        velocity_3N = (measured.jacobian_6JN[:3] * measured.joint_vel_NJ.T).sum(1)
        found = {
            "joint_pos": measured.joint_pos_NJ,
            "joint_vel": measured.joint_vel_NJ,
            "fingers": np.repeat(measured.finger_N1, 2, axis=1),
            "tcp_pos": measured.tool_3N.T,
            "tcp_vel": velocity_3N.T,
        }
        target = self.finger_targets[:, :1]
        return {"finger_target": target, **{name: torch.from_numpy(value) for name, value in found.items()}}

    def measurement(self, qpos_NJ: np.ndarray, qvel_NJ: np.ndarray, finger_N1: np.ndarray) -> Measurement:
        """Compute the measured pose from readings of the encoders."""
        return Measurement(qpos_NJ, qvel_NJ, finger_N1, *self.chain.tools(qpos_NJ.T.copy()))

    def reset(self, ids: np.ndarray, qpos_nJ: np.ndarray) -> None:
        self.qpos[ids, : self.num_joints] = qpos_nJ
        self.qpos[ids, self.num_joints : self.num_joints + 2] = self.robot.finger_open_m
        self.ctrl[ids, : self.num_joints] = qpos_nJ
        self.ctrl[ids, self.num_joints :] = self.robot.finger_open_m

    def apply(self, action_NA: np.ndarray, ids: np.ndarray | None, measured: Measurement | None = None) -> None:
        """Write the actuator targets for actions [N, A] in [-1, 1] of the envs ``ids`` (None: all).

        ``site_xpos`` and ``qpos`` must be current. The gripper action is the desired opening, 1 open and -1 closed. The
        fingers' target moves towards it at a limited rate, so that noise does not drop a held object.
        Targets are computed for all N: selecting rows first costs more than it saves.
        measured: pose that the targets are relative to; None is the true one.
        """
        joints = self.num_joints
        qpos = self.qpos[:, :joints] if measured is None else measured.joint_pos_NJ
        ctrl = np.empty_like(self.ctrl)
        move_MN = (action_NA[:, :-1] * self.move_scale).T
        target = self.law.joint_targets(move_MN, qpos.T, lambda: self._tool(measured)).T
        if self.encoder_offset_NJ is not None:  # the robot's own controller reads the same encoders
            target -= self.encoder_offset_NJ
        if self.backlash_NJ is not None:
            target = backlash(self.ctrl[:, :joints], target, self.backlash_NJ)
        ctrl[:, :joints] = target
        before = self.ctrl[:, joints:]
        ctrl[:, joints:] = before + self.law.finger_step(self.finger_goal(action_NA[:, -1:]), before)
        if ids is None:
            self.ctrl[:] = ctrl
        else:
            self.ctrl[ids] = ctrl[ids]

    def _tool(self, measured: Measurement | None) -> ToolPose:
        """Return the pose of the tools that the targets are relative to."""
        if measured is None:
            position_N3, frame_N9 = self.site_xpos[:, self.tcp_site], self.site_xmat[:, self.tcp_site]
            return ToolPose(position_N3.T, frame_N9.T, self._jacobian())
        return ToolPose(measured.tool_3N, measured.rotation_33N.reshape(9, -1), measured.jacobian_6JN)

    def _jacobian(self) -> np.ndarray:
        """Return the geometric Jacobian of the tool centre point, [6, J, N]: translation rows above rotation rows.

        Column i is (axis_i x (point - anchor_i), axis_i) for a hinge and (axis_i, 0) for a slide. These arrays are
        current already. The engine's ``Batch.jac`` gives the same result, but it runs the kinematics again, and a
        persistent batch then recomputes the first half of its next substep.
        """
        axis = self.xaxis[:, : self.num_joints].T.copy()
        lever = (self.site_xpos[:, None, self.tcp_site] - self.xanchor[:, : self.num_joints]).T.copy()
        jacobian = np.concatenate([cross(axis, lever), axis])
        jacobian[:3, self.slides], jacobian[3:, self.slides] = axis[:, self.slides], 0.0
        return jacobian
