"""An arm with a parallel gripper and position actuators, before it is simulated."""

from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np

from embodied.core.arm import ArmLaw, Chain, ToolPose
from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, ArmSpec, Box, GripperSpec, JointSpec, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import ControlConfig, Scale
from embodied.envs.mujoco.robots.jaws import Jaws
from embodied.envs.mujoco.robots.parts import FINGERS, Parts, Place, is_servo
from embodied.envs.rendering.coarse import primitive_looks

IK_STEPS = 60
TURN = 2 * np.pi  # how far from home a joint without limits may be, rad or m


class GripperDescription:
    """A robot with J joints between its base and the site ``tcp``, and a gripper, all with position actuators.

    Joints are hinges (rad) or slides (m), from the base to the tool. See ``parts.Parts`` and ``base.Robot``.
    """

    name: str
    mjcf: Path
    visual: Path | None = None
    fingers: tuple[str, str] = FINGERS
    prefix: str = ""
    aside_m: float = 0.0
    """Of one of two robots (pair.py): with what its names in a scene begin, and where along y it stands."""
    home_qpos: np.ndarray
    """Joint positions [J], gripper pointing down: episodes start near them, and the null space is pulled to them."""
    home_spread: np.ndarray
    """Greatest distance of each joint from home at the start of an episode, [J]."""
    held_spread: np.ndarray
    """``home_spread`` of episodes that start with the object in the gripper, [J]."""
    joint_unit: str = "rad"
    """Unit of the joint positions; one unit per joint, with commas between them, if the joints differ."""
    finger_open_m: float
    """Target of each finger when the gripper is open."""
    finger_closed_m: float
    """Target of each finger when the gripper is closed; below 0, so that closing squeezes."""
    finger_touch_m: float = 0.0
    """Target of each finger beyond which they squeeze: where they meet, or just before the end of their way."""
    jaws: Jaws | None = None
    """Fingers that do not slide; None: a finger's position is its distance from the middle."""
    thin_along_y: bool = False
    """Whether the closed fingers reach less far along the tool's y axis than along its x axis."""
    scale: Scale = Scale()
    impratio: float | None = None
    finger_max_m: float = 0.04
    """Position of each finger when the gripper is open as far as it can."""
    max_velocity: np.ndarray | None = None
    """Largest speed of each joint, unit/s, [J]; None: not known, and policies cannot be exported to the robot."""
    finger_scale: float = 25.0
    """Scale of observed finger positions; they are about 1 when open."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.workspace_m = config.workspace_low_m, config.workspace_high_m

    @property
    def open_qpos(self) -> np.ndarray:
        """Positions of all joints but the arm's when the gripper is open, [L]."""
        return np.array([self.finger_open_m]) if self.jaws is None else self.jaws.qpos_KL[-1]

    @property
    def finger_travel(self) -> float:
        """How far the gripper's joints move from open to where the fingers meet, m or rad."""
        if self.jaws is None:
            return self.finger_open_m - self.finger_touch_m
        touch_L = [np.interp(0.0, self.jaws.gap_K, qpos_K) for qpos_K in self.jaws.qpos_KL.T]
        return float(np.abs(self.jaws.qpos_KL[-1] - touch_L).max())

    def spec(self) -> mujoco.MjSpec:
        """Return the robot without table and objects."""
        return mujoco.MjSpec.from_file(str(self.mjcf))

    @cached_property
    def model(self) -> mujoco.MjModel:
        """The robot without table and objects."""
        return self.spec().compile()

    @cached_property
    def coarse(self) -> mujoco.MjModel:
        """The few geoms that policies' cameras show: its own, meshes as fitted primitives."""
        return primitive_looks(self.model, self.scale.reach)

    @cached_property
    def parts(self) -> Parts:
        """Where its joints and actuators are in ``model``."""
        return Parts(self.model)

    @property
    def num_joints(self) -> int:
        """Number J of the arm's joints."""
        return len(self.home_qpos)

    @property
    def gripper_unit(self) -> Literal["m", "rad"]:
        """Unit of the gripper's joints: m if they slide, rad if they turn."""
        slides = self.model.jnt_type[self.parts.gripper.joints] == mujoco.mjtJoint.mjJNT_SLIDE
        return "m" if slides.all() else "rad"

    @property
    def terms(self) -> tuple[Term, ...]:
        fingers, grip = "distance of each finger from the point where they meet", self.parts.gripper
        unit = self.gripper_unit
        if unit == "rad":
            fingers = "position of the gripper's joints"
        joint_vel_unit = ", ".join(f"{unit}/s" for unit in self.joint_unit.split(", "))
        target = Term("joint_target", self.num_joints, self.joint_unit, source="command", meaning="their last targets")
        return (
            Term("joint_pos", self.num_joints, self.joint_unit, source="measured", meaning="joints, base to tool"),
            Term("joint_vel", self.num_joints, joint_vel_unit, source="measured", meaning="joints, base to tool"),
            Term("fingers", len(grip.joints), unit, scale=self.finger_scale, source="measured", meaning=fingers),
            Term("finger_target", 1, unit, scale=self.finger_scale, source="command", meaning="their last target"),
            Term("tcp_pos", 3, "m", "base", source="kinematics", meaning="x, y, z of the tool centre point"),
            Term("tcp_vel", 3, "m/s", "base", source="kinematics", meaning="velocity of the tool centre point"),
            *((target,) if self.config.from_target else ()),
        )

    @property
    def action(self) -> Box:
        config = self.config
        move = [ActionTerm(f"d{axis}", f"tool along {axis} of the base", config.delta_m, unit="m") for axis in "xyz"]
        if config.rotation:
            move.append(ActionTerm("dyaw", "tool about the vertical", config.delta_rad, unit="rad"))
        if config.mode == "joint_delta":
            units = (self.joint_unit.split(", ") * self.num_joints)[: self.num_joints]
            present = {"rad": "from its present angle", "m": "from its present position"}
            move = [
                ActionTerm(f"djoint{i + 1}", f"joint {i + 1} {present[unit]}", config.delta_rad, unit=unit)
                for i, unit in enumerate(units)
            ]
        open_m, closed_m = self.finger_open_m, self.finger_closed_m
        meaning = "target of each finger, 1 open and -1 closed"
        gripper = ActionTerm("gripper", meaning, (open_m - closed_m) / 2, (open_m + closed_m) / 2, self.gripper_unit)
        return Box((*move, gripper))

    @property
    def arm(self) -> ArmSpec | None:
        """The arm; None: policies cannot be exported, because a speed or the position of its gripper is not known."""
        return None if self.lacks else self.kinematics

    @property
    def lacks(self) -> str:
        """What policies cannot be exported without; empty if there is nothing."""
        servos = all(is_servo(self.model, servo) for servo in self.parts.gripper.servos)
        known = {"max_velocity": self.max_velocity is not None, "position servos on the joints of its gripper": servos}
        return " and ".join(name for name in known if not known[name])

    @cached_property
    def kinematics(self) -> ArmSpec:
        """The arm; unknown speeds are 1, on which neither its kinematics nor its control law depend."""
        config, speeds = self.config, np.ones(self.num_joints) if self.max_velocity is None else self.max_velocity
        fingers_m = self.finger_open_m, self.finger_closed_m, config.gripper_m, self.finger_max_m
        return ArmSpec(
            *joint_specs(self.model, self.parts.arm, self.home_qpos.tolist(), speeds.tolist()),
            GripperSpec(*fingers_m, self.gripper_unit, len(self.parts.gripper.joints)),
            config.mode, config.rotation, config.damping, config.posture_gain, *self.workspace_m,
            config.orientation, config.from_target,
        )  # fmt: skip

    @property
    def of_tool(self) -> ArmSpec:
        """The arm if actions displaced its tool."""
        return replace(self.kinematics, control="ee_delta")

    @property
    def gap_m(self) -> tuple[float, float]:
        if self.jaws is None:
            return 2 * self.finger_closed_m, 2 * self.finger_open_m
        return float(self.jaws.gap_K[0]), float(self.jaws.gap_K[-1])

    @property
    def home_tool_m(self) -> np.ndarray:
        return Chain(self.kinematics).tool(self.home_qpos)[0]

    def reach_for(self, points_n3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        law, chain = ArmLaw(self.of_tool), Chain(self.kinematics)
        qpos_Jn, move_4n = np.repeat(self.home_qpos[:, None], len(points_n3), 1), np.zeros((4, len(points_n3)))
        for _ in range(IK_STEPS):
            position_3n, rotation, jacobian = chain.tools(qpos_Jn)
            move_4n[:3] = (points_n3.T - position_3n).clip(-self.config.delta_m, self.config.delta_m)
            pose = partial(ToolPose, position_3n, rotation.reshape(9, -1), jacobian)
            qpos_Jn = law.joint_targets(move_4n, qpos_Jn, pose)
        return qpos_Jn.T, np.linalg.norm(points_n3.T - chain.tools(qpos_Jn)[0], axis=0)

    def start_qpos(self, rng: EpisodeRng, held_n: np.ndarray) -> np.ndarray:
        spread = np.where(held_n[:, None], self.held_spread, self.home_spread)
        signed = rng.uniform(f"{self.prefix}arm", [-1.0] * self.num_joints, [1.0] * self.num_joints)
        return np.asarray(self.home_qpos + spread * signed)


def joint_specs(
    model: mujoco.MjModel, arm: Place, home: list[float], max_velocity: list[float]
) -> tuple[tuple[JointSpec, ...], Any, Any]:
    """Return the joints of the arm in a model, and position and orientation of the tool in the last joint's frame.

    home, max_velocity: a number per joint. A servo without damping has that of its joint. A joint that neither its
    servo nor itself limits may be ``TURN`` from home. UserError if a body has several joints of which a hinge has a
    reference position (``ref``), which no ``JointSpec`` holds.
    """
    data = mujoco.MjData(model)
    if len(arm.joints) != len(home):
        raise UserError(f"home: got {len(home)} numbers, needed: {len(arm.joints)}, one per joint of the arm")
    ref_J = model.qpos0[arm.qpos]
    data.qpos[arm.qpos] = 0.0
    mujoco.mj_kinematics(model, data)
    pos, mat = np.zeros(3), np.eye(3)
    joints = []
    for i, servo, ref, at, speed in zip(arm.joints, arm.servos, ref_J, home, max_velocity, strict=True):
        slide, body = model.jnt_type[i] == mujoco.mjtJoint.mjJNT_SLIDE, model.jnt_bodyid[i]
        if ref and not slide and model.body_jntnum[body] > 1:
            raise UserError(f"joint '{model.joint(i).name}': ref: allowed with one joint per body")
        frame, anchor = data.xmat[body].reshape(3, 3), data.xanchor[i] - data.xaxis[i] * ref * slide
        offset, turn = mat.T @ (anchor - pos), mat.T @ frame
        pos, mat = anchor, frame.copy()
        limits = model.jnt_range[i] if model.jnt_limited[i] else (at - TURN, at + TURN)
        limits = model.actuator_ctrlrange[servo] if model.actuator_ctrllimited[servo] else limits
        joints.append(
            JointSpec(
                name=model.joint(i).name,
                kind="slide" if slide else "hinge",
                pos_m=tuple(offset.tolist()),
                quat=_quat(turn),
                axis=tuple(model.jnt_axis[i].tolist()),
                low=float(limits[0]),
                high=float(limits[1]),
                max_velocity=speed,
                max_effort=float(model.actuator_forcerange[servo, 1]),
                stiffness=float(model.actuator_gainprm[servo, 0]),
                damping=float(-model.actuator_biasprm[servo, 2] or model.dof_damping[model.jnt_dofadr[i]]),
                home=at,
            )
        )
    site = model.site("tcp").id
    tool_pos, tool_mat = mat.T @ (data.site_xpos[site] - pos), mat.T @ data.site_xmat[site].reshape(3, 3)
    return tuple(joints), tuple(tool_pos.tolist()), _quat(tool_mat)


def _quat(matrix: np.ndarray) -> Any:
    """Return the quaternion (w, x, y, z) of a rotation matrix."""
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, matrix.reshape(-1))
    return tuple(quat.tolist())
