"""A robot arm with a parallel gripper and position actuators, and its simulations on the CPU and on any device.

    action ──► pose, measured or true ──► joint targets ──► minus encoder offset ──► backlash ──► ctrl

A subclass of ``GripperArm`` gives the MJCF and a few numbers, as ``Panda`` does. Actions in [-1, 1] become actuator
targets by one law (``ArmLaw``): in numpy for ``AttachedArm``, in torch for ``DeviceArm``.
"""

from functools import partial
from typing import Any, TypeVar

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.arm import ArmLaw, Chain, ToolPose, cross
from embodied.envs.mujoco.robots.base import Measurement, Simulations, live
from embodied.envs.mujoco.robots.gripper_description import GripperDescription
from embodied.envs.mujoco.robots.parts import Parts, at

LAG = 0.15  # share of a displacement that experts add to the last targets, behind which servos lag
Numbers = TypeVar("Numbers", np.ndarray, Tensor)


class GripperArm(GripperDescription):
    """A described arm that simulations can attach."""

    def attach(self, batch: Batch) -> "AttachedArm":
        return AttachedArm(batch, self)

    def attach_tensors(self, batch: Simulations) -> "DeviceArm":
        return DeviceArm(batch, self)


class GripperState:
    """State of the arm for tasks, and the movements of experts; see ``embodied.envs.mujoco.robots.base.ArmState``.

    An arm action is relative to the present pose. So the controller's only state is the fingers' target, which is in
    ``ctrl`` and observed. With backlash the joints' last targets are state too, and they are in ``ctrl``. If actions
    add to the last targets, those before the backlash are in ``wanted_NJ``.
    """

    def __init__(self, batch: Simulations, robot: GripperDescription) -> None:
        model = batch.model
        self.robot, self.config, self.scale = robot, robot.config, robot.scale
        self.from_target = robot.config.from_target
        self.num_joints, self.lead = robot.num_joints, 2.3 if self.from_target else 1.0
        self.side_rad = np.pi / 2 if robot.thin_along_y else 0.0
        self._qpos, self._qvel, self._ctrl = (live(batch.bind(name)) for name in ("qpos", "qvel", "ctrl"))
        self.prefix, self.arms = robot.prefix, ()
        self.parts = Parts(model, self._qpos.device, robot.prefix)
        self.encoder_offset_NJ: Tensor | None = None
        self.backlash_NJ: Tensor | None = None
        self.wanted_NJ: Tensor | None = None
        self.move_scale = np.array([term.scale for term in robot.action.terms[:-1]])  # of all entries but the gripper
        self.tcp_site = model.site(f"{robot.prefix}tcp").id
        self.tcp_pos = live(batch.bind("site_xpos"))[:, self.tcp_site]
        self.tcp_mat = live(batch.bind("site_xmat"))[:, self.tcp_site]
        self._meet_13 = None if robot.jaws is None else robot.jaws.hold(self.tcp_pos.new_zeros(1))[1]

    @property
    def joint_pos(self) -> Tensor:
        return self._qpos[:, self.parts.arm.qpos]

    @property
    def joint_vel(self) -> Tensor:
        return self._qvel[:, self.parts.arm.qvel]

    @property
    def tcp_vel(self) -> Tensor:
        return tool_velocity(live(self.jacobian()), self.joint_vel.T).T.to(self._qpos)

    def jacobian(self) -> Any:
        """Return the Jacobian of the tool centre point, translation above rotation, float64 [6, J, N].

        Column i is (axis_i x (point - anchor_i), axis_i) for a hinge and (axis_i, 0) for a slide.
        """
        raise NotImplementedError

    @property
    def finger_qpos(self) -> Tensor:
        return self._qpos[:, self.parts.gripper.qpos]

    @property
    def gripper_pos(self) -> Tensor:
        return self.finger_qpos.mean(dim=1, keepdim=True)

    @property
    def finger_qvel(self) -> Tensor:
        return self._qvel[:, self.parts.gripper.qvel]

    @property
    def finger_targets(self) -> Tensor:
        return self._ctrl[:, self.parts.gripper.ctrl]

    def joint_targets(self) -> Tensor:
        """Return the last joint targets as they were sent to the robot, which reads its own encoders, [N, J]."""
        sent_NJ = self._ctrl[:, self.parts.arm.ctrl] if self.wanted_NJ is None else self.wanted_NJ
        return sent_NJ if self.encoder_offset_NJ is None else sent_NJ + self.encoder_offset_NJ

    def commanded(self) -> Measurement:
        """Return the pose that the last targets ask for."""
        target_NJ = self.joint_targets().double()
        return self.measurement(target_NJ, torch.zeros_like(target_NJ), self.finger_targets[:, :1])

    def measurement(self, qpos_NJ: Tensor, qvel_NJ: Tensor, finger_N1: Tensor) -> Measurement:
        raise NotImplementedError

    def observe(self, measured: Measurement | None = None) -> dict[str, Tensor]:
        state = {
            "joint_pos": self.joint_pos, "joint_vel": self.joint_vel, "fingers": self.finger_qpos,
            "finger_target": self.finger_targets[:, :1], "tcp_pos": self.tcp_pos,
        }  # fmt: skip
        if self.from_target:
            state["joint_target"] = self.joint_targets()
        if measured is None:
            return state | {"tcp_vel": self.tcp_vel}
        seen = {
            "joint_pos": measured.joint_pos_JN, "joint_vel": measured.joint_vel_JN,
            "fingers": measured.finger_1N.expand(self.finger_qpos.shape[1], -1), "tcp_pos": measured.tool_3N,
            "tcp_vel": tool_velocity(measured.jacobian_6JN, measured.joint_vel_JN),
        }  # fmt: skip
        return state | {name: value.T for name, value in seen.items()}

    def reset(self, ids: np.ndarray | Tensor, qpos_nJ: np.ndarray | Tensor) -> None:
        arm, gripper, open_qpos = self.parts.arm, self.parts.gripper, self._qpos.new_tensor(self.robot.open_qpos)
        self._qpos[at(ids, arm.qpos)] = self._ctrl[at(ids, arm.ctrl)] = torch.as_tensor(qpos_nJ)
        if self.wanted_NJ is not None:
            self.wanted_NJ[ids] = torch.as_tensor(qpos_nJ).to(self.wanted_NJ)
        self._qpos[at(ids, self.parts.linked)] = open_qpos
        self._ctrl[at(ids, gripper.ctrl)] = self.robot.finger_open_m

    def hold(self, ids: Tensor, half_width_n: Tensor) -> Tensor:
        qpos_nL, middle_n3 = half_width_n.unsqueeze(-1), half_width_n.new_zeros(len(ids), 3)
        if self.robot.jaws is not None:
            qpos_nL, middle_n3 = self.robot.jaws.hold(2 * half_width_n)
        self._qpos[at(ids, self.parts.linked)] = qpos_nL
        self._ctrl[at(ids, self.parts.gripper.ctrl)] = self.robot.finger_touch_m
        return middle_n3

    def tip(self) -> Tensor:
        return self.tcp_pos if self._meet_13 is None else self._from_tool(self._meet_13)

    def above(self, width_m: float | Tensor) -> Tensor:
        if self.robot.jaws is None:
            return self.tcp_pos
        gap_n = torch.as_tensor((width_m + self.robot.gap_m[1]) / 2).to(self.tcp_pos).reshape(-1)
        return self._from_tool(self.robot.jaws.hold(gap_n)[1])

    def _from_tool(self, offset_n3: Tensor) -> Tensor:
        """Return the points at offsets in the tool's frame, [N, 3]."""
        return self.tcp_pos + (self.tcp_mat.reshape(-1, 3, 3) * offset_n3.unsqueeze(1)).sum(-1)

    def squeezing(self) -> Tensor:
        touch_m, sign = self.robot.finger_touch_m, 1 if self.robot.finger_open_m > self.robot.finger_closed_m else -1
        still = self.finger_qvel.abs().amax(dim=-1) < self.robot.finger_travel / 8
        return (sign * self.finger_targets[:, 0] < sign * touch_m) & still

    def finger_goal(self, gripper: Numbers) -> Numbers:
        """Return the finger position (m) that gripper actions ask for: 1 open, -1 closed."""
        closed_m, open_m = self.robot.finger_closed_m, self.robot.finger_open_m
        return closed_m + (open_m - closed_m) * (gripper + 1) / 2

    def opening(self) -> Tensor:
        closed_m, open_m = self.robot.finger_closed_m, self.robot.finger_open_m
        return (self.finger_targets[:, 0] - closed_m) / (open_m - closed_m)

    def move_tool(self, displacement_N3: Tensor, turn_N: Tensor, gripper_N: Tensor, limit_N1: Tensor) -> Tensor:
        config, share = self.config, LAG if self.from_target else 1.0
        step = (displacement_N3 * share / config.delta_m).clamp(-limit_N1, limit_N1)
        turn = (turn_N.unsqueeze(-1) * share / config.delta_rad).clamp(-limit_N1, limit_N1)
        move = torch.cat([step, turn], dim=-1) if config.rotation else step
        if config.mode == "joint_delta":
            scale = [config.delta_m] * 3 + [config.delta_rad] * config.rotation
            move = (self.joint_moves(move.double() * move.new_tensor(scale)) / config.delta_rad).clamp(-1, 1)
        return torch.cat([move, gripper_N.to(move.dtype).unsqueeze(-1)], dim=-1).float()

    def joint_moves(self, move_NM: Tensor) -> Tensor:
        """Return the displacements of the joints (rad) for those of the tool (m, rad), [N, J]."""
        raise NotImplementedError


class AttachedArm(GripperState):
    """The arm in a batch on the CPU; see ``embodied.envs.mujoco.robots.base.Arm``."""

    def __init__(self, batch: Batch, robot: GripperDescription) -> None:
        super().__init__(batch, robot)
        self.chain = Chain(robot.kinematics)
        self.law, self.tool_law = ArmLaw(robot.kinematics), ArmLaw(robot.of_tool)
        self.qpos, self.ctrl = batch.bind("qpos"), batch.bind("ctrl")
        self.site_xpos, self.site_xmat = batch.bind("site_xpos"), batch.bind("site_xmat")
        self.xaxis, self.xanchor = batch.bind("xaxis"), batch.bind("xanchor")
        self.slides = np.flatnonzero(batch.model.jnt_type[self.parts.arm.joints] == mujoco.mjtJoint.mjJNT_SLIDE)

    def measurement(self, qpos_NJ: Tensor, qvel_NJ: Tensor, finger_N1: Tensor) -> Measurement:
        pose = map(torch.from_numpy, self.chain.tools(qpos_NJ.numpy().T.copy()))
        return Measurement(qpos_NJ.T, qvel_NJ.T, finger_N1.T, *pose)

    def apply(self, action_NA: np.ndarray, ids: np.ndarray | None, measured: Measurement | None = None) -> None:
        """Write the actuator targets. ``site_xpos`` and ``qpos`` must be current.

        The fingers' target moves at a limited rate towards the desired opening, so that noise does not drop a held
        object. Targets are computed for all N: selecting rows first costs more than it saves.
        """
        arm, gripper = self.parts.arm, self.parts.gripper
        target = self._targets_of(self.law, (action_NA[:, :-1] * self.move_scale).T, measured)[0].T
        if self.encoder_offset_NJ is not None:  # the robot's own controller reads the same encoders
            target -= self.encoder_offset_NJ.numpy()
        rows = slice(None) if ids is None else ids
        if self.wanted_NJ is not None:
            self.wanted_NJ.numpy()[rows] = target[rows]
        if self.backlash_NJ is not None:
            target = backlash(self.ctrl[:, arm.ctrl], target, self.backlash_NJ.numpy())
        fingers = self.ctrl[:, gripper.ctrl]
        fingers = fingers + self.law.finger_step(self.finger_goal(action_NA[:, -1:]), fingers)
        self.ctrl[at(rows, arm.ctrl)], self.ctrl[at(rows, gripper.ctrl)] = target[rows], fingers[rows]

    def joint_moves(self, move_NM: Tensor) -> Tensor:
        target_JN, qpos_JN = self._targets_of(self.tool_law, move_NM.numpy().T, None)
        return torch.from_numpy(target_JN - qpos_JN).T

    def _targets_of(
        self, law: ArmLaw, move_MN: np.ndarray, measured: Measurement | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the joint targets [J, N] of a law, and the joint positions that displacements are relative to."""
        measured = self.commanded() if self.from_target else measured
        qpos_JN = self.qpos[:, self.parts.arm.qpos].T if measured is None else measured.joint_pos_JN.numpy()
        return law.joint_targets(move_MN, qpos_JN, lambda: self._tool(measured)), qpos_JN

    def _tool(self, measured: Measurement | None) -> ToolPose:
        if measured is None:
            position_N3, frame_N9 = self.site_xpos[:, self.tcp_site], self.site_xmat[:, self.tcp_site]
            return ToolPose(position_N3.T, frame_N9.T, self.jacobian())
        return ToolPose(*(value.numpy() for value in tool_pose(measured)))

    def jacobian(self) -> np.ndarray:
        """See ``GripperState.jacobian``. ``Batch.jac`` would run the kinematics again."""
        ids = self.parts.arm.ids
        axis, point = self.xaxis[:, ids].T.copy(), self.site_xpos[:, self.tcp_site].T[:, None]
        jacobian = np.concatenate([cross(axis, np.subtract(point, self.xanchor[:, ids].T, order="C")), axis])
        if len(self.slides):
            jacobian[:3, self.slides], jacobian[3:, self.slides] = axis[:, self.slides], 0.0
        return jacobian


class DeviceArm(GripperState):
    """The arm in simulations on any device; see ``embodied.envs.mujoco.robots.base.TensorArm``.

    It computes in float64: the least squares of a pose that is almost singular would lose most digits of float32.
    """

    def __init__(self, batch: Simulations, robot: GripperDescription) -> None:
        super().__init__(batch, robot)
        self.ctrl, joints = self._ctrl, self.parts.arm.joints
        self.xaxis, self.xanchor = live(batch.bind("xaxis")), live(batch.bind("xanchor"))
        self.slide_J1 = self._tensor(batch.model.jnt_type[joints] == mujoco.mjtJoint.mjJNT_SLIDE).bool().unsqueeze(-1)
        self.law, self.tool_law = (
            ArmLaw(arm, torch, self._tensor, damped_least_squares) for arm in (robot.kinematics, robot.of_tool)
        )
        self.chain = Chain(robot.kinematics, torch, self._tensor)
        self.move_scale_M = self._tensor(self.move_scale)

    def measurement(self, qpos_NJ: Tensor, qvel_NJ: Tensor, finger_N1: Tensor) -> Measurement:
        qpos_JN, qvel_JN, finger_1N = (value.double().T for value in (qpos_NJ, qvel_NJ, finger_N1))
        return Measurement(qpos_JN, qvel_JN, finger_1N, *self.chain.tools(qpos_JN))

    def apply(self, action_NA: Tensor, measured: Measurement | None = None) -> None:
        """Write the actuator targets for actions [N, A] in [-1, 1]; see ``AttachedArm.apply``."""
        action, arm = action_NA.double(), self.parts.arm
        target = self._targets_of(self.law, (action[:, :-1] * self.move_scale_M).T, measured)[0].T
        if self.encoder_offset_NJ is not None:
            target = target - self.encoder_offset_NJ
        if self.wanted_NJ is not None:
            self.wanted_NJ.copy_(target)
        if self.backlash_NJ is not None:
            target = backlash(self.ctrl[:, arm.ctrl].double(), target, self.backlash_NJ)
        self.ctrl[:, arm.ctrl] = target.to(self.ctrl.dtype)
        goal = self.finger_goal(action[:, -1:])
        step = self.law.finger_step(goal, self.finger_targets).to(self.ctrl.dtype)
        self.ctrl[:, self.parts.gripper.ctrl] += step

    def joint_moves(self, move_NM: Tensor) -> Tensor:
        target_JN, qpos_JN = self._targets_of(self.tool_law, move_NM.T, None)
        return (target_JN - qpos_JN).T

    def _targets_of(self, law: ArmLaw, move_MN: Tensor, measured: Measurement | None) -> tuple[Tensor, Tensor]:
        """See ``AttachedArm._targets_of``."""
        measured = self.commanded() if self.from_target else measured
        qpos_JN = self.joint_pos.double().T if measured is None else measured.joint_pos_JN
        tool = self._tool if measured is None else partial(tool_pose, measured)
        return law.joint_targets(move_MN, qpos_JN, tool), qpos_JN

    def _tensor(self, numbers: object) -> Tensor:
        return torch.as_tensor(np.asarray(numbers), dtype=torch.float64, device=self._qpos.device)

    def _tool(self) -> ToolPose:
        return ToolPose(self.tcp_pos.double().T, self.tcp_mat.double().T, self.jacobian())

    def jacobian(self) -> Tensor:
        ids = self.parts.arm.ids
        axis, lever = self.xaxis[:, ids].double(), (self.tcp_pos[:, None] - self.xanchor[:, ids]).double()
        linear = torch.where(self.slide_J1, axis, torch.linalg.cross(axis, lever))
        return torch.cat([linear, torch.where(self.slide_J1, 0.0, axis)], -1).permute(2, 1, 0)


def tool_pose(measured: Measurement) -> ToolPose:
    return ToolPose(measured.tool_3N, measured.rotation_33N.reshape(9, -1), measured.jacobian_6JN)


def tool_velocity(jacobian_6JN: Tensor, joint_vel_JN: Tensor) -> Tensor:
    """Return the velocity of the tool centre point, float64 [3, N], summed over joints in an order without N."""
    velocity_3N = jacobian_6JN.new_zeros(3, jacobian_6JN.shape[2])
    for column_6N, speed_N in zip(jacobian_6JN.unbind(1), joint_vel_JN, strict=True):
        velocity_3N = velocity_3N + column_6N[:3] * speed_N
    return velocity_3N


def backlash(output: Numbers, value: Numbers, width: Numbers | float) -> Numbers:
    """Return the next output of the hysteresis operator "play" (Krasnosel'skii and Pokrovskii 1989).

    The output follows the input ``value`` when it is half the ``width`` ahead, and stands still otherwise.
    """
    return output.clip(value - width / 2, value + width / 2)


def damped_least_squares(jacobian_6JN: Tensor, twist_6N: Tensor, prior_JN: Tensor, damping: float) -> Tensor:
    """Return joint displacements [J, N]; see ``embodied.core.arm.damped_least_squares``.

    Sums and elimination are written out: a matrix product's order of summation may depend on N, and a GPU cannot record
    a solver that waits for it.
    """
    rows = len(twist_6N)
    eye_66 = torch.eye(rows, dtype=jacobian_6JN.dtype, device=jacobian_6JN.device)
    gram_66N = (jacobian_6JN[:, None] * jacobian_6JN).sum(2) + damping**2 * eye_66[..., None]
    residual_6N = twist_6N - (jacobian_6JN * prior_JN).sum(1)
    system_67N = torch.cat([gram_66N, residual_6N[:, None]], 1)
    for k in range(rows):  # Gauss-Jordan
        pivot_7N = system_67N[k] / system_67N[k, k]
        system_67N = system_67N - (system_67N[:, k] - eye_66[:, k, None])[:, None] * pivot_7N
    displacement_JN: Tensor = prior_JN + (jacobian_6JN * system_67N[:, None, rows]).sum(0)
    return displacement_JN
