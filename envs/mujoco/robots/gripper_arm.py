"""An arm with a parallel gripper and position actuators: actions in [-1, 1] to actuator targets, for all envs at once.

``GripperArm`` is a robot (``envs.mujoco.robots.base``); a subclass gives the MJCF and a few numbers, as ``Panda`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.kinematics import cross, damped_least_squares
from embodied.core.options import config_dataclass
from embodied.core.spec import ActionTerm, ArmSpec, Box, GripperSpec, Term
from envs.common.seeding import EpisodeRng
from envs.mujoco.arrays import readonly
from envs.mujoco.robots.arm_spec import joint_specs


@config_dataclass
class ControlConfig:
    """How actions move the arm."""

    mode: Literal["ee_delta", "joint_delta"] = "ee_delta"
    """ee_delta: actions displace the tool centre point, gripper kept vertical. joint_delta: they displace joints."""
    delta_m: float = 0.06
    """Displacement of the tool at action 1."""
    delta_rad: float = 0.15
    """Rotation, or displacement of each joint, at action 1."""
    gripper_m: float = 0.01
    """Greatest movement of each finger's target per control step; closing from open takes about five steps."""
    rotation: bool = False
    """With ee_delta, add a rotation about the vertical as the action before the gripper."""
    damping: float = 0.03
    """Damping of the least-squares inverse kinematics."""
    posture_gain: float = 0.03
    """Share of the distance to the home posture that the null space moves per control step."""
    workspace_low_m: tuple[float, float, float] = (0.25, -0.35, 0.012)
    """One corner of the box that the tool centre point's target stays in."""
    workspace_high_m: tuple[float, float, float] = (0.75, 0.35, 0.45)
    """The opposite corner."""

    def __post_init__(self) -> None:
        if self.rotation and self.mode != "ee_delta":
            raise UserError(f"rotation: got true with mode={self.mode}, allowed with mode=ee_delta only")


class GripperArm:
    """A robot whose first J joints are the arm's and whose next two are the fingers', each with a position actuator.

    See ``envs.mujoco.robots.base.Robot``. Joints are hinges (rad) or slides (m), in the MJCF's order; the actuators are
    in the order of the joints.
    """

    name: ClassVar[str]
    mjcf: ClassVar[Path]
    visual: ClassVar[Path | None] = None
    coarse: ClassVar[Path | None] = None
    home_qpos: ClassVar[np.ndarray]
    """Joint positions [J], gripper pointing down: episodes start near them, and the null space is pulled to them."""
    home_spread: ClassVar[np.ndarray]
    """Greatest distance of each joint from home at the start of an episode, [J]."""
    held_spread: ClassVar[np.ndarray]
    """``home_spread`` of episodes that start with the object in the gripper, [J]."""
    joint_unit: ClassVar[str] = "rad"
    """Unit of the joint positions; one unit per joint, with commas between them, if the joints differ."""
    finger_open_m: ClassVar[float]
    """Target of each finger when the gripper is open."""
    finger_closed_m: ClassVar[float]
    """Target of each finger when the gripper is closed; below 0, so that closing squeezes."""
    finger_max_m: ClassVar[float] = 0.04
    """Position of each finger when the gripper is open as far as it can."""
    max_velocity: ClassVar[np.ndarray | None] = None
    """Largest speed of each joint, unit/s, [J]; None: not known, and policies cannot be exported to the robot."""
    finger_scale: ClassVar[float] = 25.0
    """Scale of observed finger positions; they are about 1 when open."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.workspace_m = config.workspace_low_m, config.workspace_high_m

    @property
    def num_joints(self) -> int:
        """Number J of the arm's joints."""
        return len(self.home_qpos)

    @property
    def terms(self) -> tuple[Term, ...]:
        joint_vel_unit = ", ".join(f"{unit}/s" for unit in self.joint_unit.split(", "))
        return (
            Term("joint_pos", self.num_joints, self.joint_unit, source="measured"),
            Term("joint_vel", self.num_joints, joint_vel_unit, source="measured"),
            Term("fingers", 2, "m", scale=self.finger_scale, source="measured"),
            Term("finger_target", 1, "m", scale=self.finger_scale, source="command"),
            Term("tcp_pos", 3, "m", "base", source="kinematics"),
            Term("tcp_vel", 3, "m/s", "base", source="kinematics"),
        )

    @property
    def action(self) -> Box:
        config = self.config
        move = [ActionTerm(f"d{axis}", f"tool along {axis} of the base", config.delta_m, unit="m") for axis in "xyz"]
        if config.rotation:
            move.append(ActionTerm("dyaw", "tool about the vertical", config.delta_rad, unit="rad"))
        if config.mode == "joint_delta":
            move = [
                ActionTerm(f"djoint{i + 1}", f"joint {i + 1} from its present angle", config.delta_rad, unit="rad")
                for i in range(self.num_joints)
            ]
        half_m, centre_m = (
            (self.finger_open_m - self.finger_closed_m) / 2,
            (self.finger_open_m + self.finger_closed_m) / 2,
        )
        return Box((*move, ActionTerm("gripper", "target of each finger, 1 open and -1 closed", half_m, centre_m, "m")))

    @property
    def arm(self) -> ArmSpec | None:
        if self.max_velocity is None:
            return None
        home, speed = tuple(map(float, self.home_qpos)), tuple(map(float, self.max_velocity))
        joints, tool_pos_m, tool_quat = joint_specs(self.mjcf, home, speed)
        config = self.config
        gripper = GripperSpec(self.finger_open_m, self.finger_closed_m, config.gripper_m, self.finger_max_m)
        return ArmSpec(
            joints,
            tool_pos_m,
            tool_quat,
            gripper,
            config.mode,
            config.rotation,
            config.damping,
            config.posture_gain,
            config.workspace_low_m,
            config.workspace_high_m,
        )

    def start_qpos(self, rng: EpisodeRng, held_n: np.ndarray) -> np.ndarray:
        spread = np.where(held_n[:, None], self.held_spread, self.home_spread)
        low, high = [-1.0] * self.num_joints, [1.0] * self.num_joints
        qpos: np.ndarray = self.home_qpos + spread * rng.uniform("arm", low, high)
        return qpos

    def attach(self, batch: Batch) -> AttachedArm:
        return AttachedArm(batch, self)


class AttachedArm:
    """Turn actions into ``ctrl`` of a batch; see ``envs.mujoco.robots.base.Arm``.

    An arm action is relative to the present pose. So the controller's only state is the fingers' target, which is in
    ``ctrl`` and observed.
    """

    def __init__(self, batch: Batch, robot: GripperArm) -> None:
        model = batch.model
        self.robot, self.config = robot, robot.config
        self.batch = batch
        self.num_joints = robot.num_joints
        self.qpos, self.ctrl = batch.bind("qpos"), batch.bind("ctrl")
        self.tcp_site = model.site("tcp").id
        self.site_xpos, self.site_xmat = batch.bind("site_xpos"), batch.bind("site_xmat")
        self.xaxis, self.xanchor = batch.bind("xaxis"), batch.bind("xanchor")
        self.slides = np.flatnonzero(model.jnt_type[: self.num_joints] == mujoco.mjtJoint.mjJNT_SLIDE)
        self.low, self.high = model.actuator_ctrlrange[: self.num_joints].T
        # views that are observed, and that tasks read and write
        qpos, qvel = torch.from_numpy(self.qpos), torch.from_numpy(batch.bind("qvel"))
        joints, fingers = slice(self.num_joints), slice(self.num_joints, self.num_joints + 2)
        self.joint_pos, self.joint_vel = qpos[:, joints], qvel[:, joints]
        self.finger_qpos, self.finger_qvel = qpos[:, fingers], qvel[:, fingers]
        self.finger_targets = torch.from_numpy(self.ctrl)[:, fingers]
        self.tcp_pos = readonly(self.site_xpos)[:, self.tcp_site]
        self.tcp_mat = readonly(self.site_xmat)[:, self.tcp_site]
        velocity = model.sensor("tcp_vel").adr[0]
        self.tcp_vel = readonly(batch.bind("sensordata"))[:, velocity : velocity + 3]

    def observe(self) -> dict[str, Tensor]:
        return {
            "joint_pos": self.joint_pos,
            "joint_vel": self.joint_vel,
            "fingers": self.finger_qpos,
            "finger_target": self.finger_targets[:, :1],
            "tcp_pos": self.tcp_pos,
            "tcp_vel": self.tcp_vel,
        }

    def opening(self) -> Tensor:
        closed_m, open_m = self.robot.finger_closed_m, self.robot.finger_open_m
        return (self.finger_targets[:, 0] - closed_m) / (open_m - closed_m)

    def move_tool(self, displacement_N3: Tensor, gripper_N: Tensor, limit_N1: Tensor) -> Tensor:
        """Return the action of a displacement, see ``Arm``; UserError unless the mode is ``ee_delta``."""
        if self.config.mode != "ee_delta":
            raise UserError(f"control.mode: the scripted experts need ee_delta, got '{self.config.mode}'")
        step = displacement_N3 / self.config.delta_m
        step = step.clamp(-limit_N1, limit_N1)
        yaw = [torch.zeros(len(step), 1, dtype=step.dtype)] if self.config.rotation else []
        return torch.cat([step, *yaw, gripper_N.to(step.dtype).unsqueeze(-1)], dim=-1).float()

    def reset(self, ids: np.ndarray, qpos_nJ: np.ndarray) -> None:
        self.qpos[ids, : self.num_joints] = qpos_nJ
        self.qpos[ids, self.num_joints : self.num_joints + 2] = self.robot.finger_open_m
        self.ctrl[ids, : self.num_joints] = qpos_nJ
        self.ctrl[ids, self.num_joints :] = self.robot.finger_open_m

    def apply(self, action_NA: np.ndarray, ids: np.ndarray | None) -> None:
        """Write the actuator targets for actions [N, A] in [-1, 1] of the envs ``ids`` (None: all).

        ``site_xpos`` and ``qpos`` must be current. The gripper action is the desired opening, 1 open and -1 closed. The
        fingers' target moves towards it at a limited rate, so that noise does not drop a held object.
        Targets are computed for all N: selecting rows first costs more than it saves.
        """
        joints, rate = self.num_joints, self.config.gripper_m
        qpos, ctrl = self.qpos[:, :joints], np.empty_like(self.ctrl)
        if self.config.mode == "joint_delta":
            delta = action_NA[:, :joints] * self.config.delta_rad
        else:
            prior = self.config.posture_gain * (self.robot.home_qpos - qpos)
            twist = self._twist(action_NA)
            delta = damped_least_squares(self._jacobian(), twist, prior.T.copy(), self.config.damping).T
        ctrl[:, :joints] = (qpos + delta).clip(self.low, self.high)
        closed_m, open_m = self.robot.finger_closed_m, self.robot.finger_open_m
        finger = closed_m + (open_m - closed_m) * (action_NA[:, -1:] + 1) / 2
        before = self.ctrl[:, joints:]
        ctrl[:, joints:] = before + (finger - before).clip(-rate, rate)
        if ids is None:
            self.ctrl[:] = ctrl
        else:
            self.ctrl[ids] = ctrl[ids]

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

    def _twist(self, action_NA: np.ndarray) -> np.ndarray:
        """Return the commanded displacement [6, N] (m, rad), with the tool kept in the workspace and vertical."""
        position, frame = self.site_xpos[:, self.tcp_site], self.site_xmat[:, self.tcp_site]
        target = position + action_NA[:, :3] * self.config.delta_m
        target = target.clip(self.config.workspace_low_m, self.config.workspace_high_m)
        twist = np.zeros((6, len(position)))
        twist[:3] = (target - position).T
        # frame is the tool's matrix by rows: its x axis is entries 0, 3, 6, its z axis 2, 5, 8
        twist[3], twist[4] = -frame[:, 5], frame[:, 2]  # z axis x (0, 0, -1): turns the tool's z downwards
        yaw = np.arctan2(frame[:, 3], frame[:, 0])
        twist[5] = action_NA[:, 3] * self.config.delta_rad if self.config.rotation else -yaw
        return twist
