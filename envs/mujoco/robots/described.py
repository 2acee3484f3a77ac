"""A robot from a YAML file (``RobotFile``): its MJCF gets what simulations and tasks need, by rule.

MJCF ──► root alone, without parts ──► base ──► servos ──► site tcp, collision bits, options ──► GripperArm
"""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from embodied.core.errors import UserError, one_line, unknown_name
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import ROBOTS, ControlConfig
from embodied.envs.mujoco.robot_file import Servo, control_options, mjcf_path, read_robot, robot_path, robot_scale
from embodied.envs.mujoco.robots.base import Robot
from embodied.envs.mujoco.robots.gripper_arm import GripperArm
from embodied.envs.mujoco.robots.jaws import measure_jaws

HELD_BOX = (0.2, 0.7)  # share of the workspace along each axis
HELD_POSES, HELD_MISS_M = 256, 0.005


def build_robot(name: str, control: Mapping[str, Any]) -> Robot:
    """Return a robot by the name of its class or file, or by its file's path."""
    path = robot_path(name)
    build: Any = ROBOTS[name].build if path is None else partial(DescribedArm, path)
    robot: Robot = build(control_options(name, control))
    return robot


class DescribedArm(GripperArm):
    """The robot of a YAML file. UserError for a part that its MJCF lacks, with the nearest name."""

    def __init__(self, path: Path, config: ControlConfig) -> None:
        super().__init__(config)
        file = self.file = read_robot(path)
        gripper, self.fingers = file.gripper, file.gripper.bodies
        self.name, self.mjcf = path.stem, mjcf_path(path, file)
        self.finger_open_m, self.finger_closed_m, self.finger_max_m = gripper.open, gripper.closed, gripper.open
        self.finger_scale = 1 / max(abs(gripper.open), abs(gripper.closed))
        self.scale = robot_scale(str(path))
        self._home: Mapping[str, float] = file.home
        names = [self.model.joint(joint).name for joint in self.parts.arm.joints]
        self.home_qpos = np.array(self._of_joints("home", self._home, names))
        self.home_spread = self.held_spread = np.full(len(names), file.spread)
        if file.max_velocity:
            self.max_velocity = np.array(self._of_joints("max_velocity", file.max_velocity, names))
        slides = self.model.jnt_type[self.parts.arm.joints] == mujoco.mjtJoint.mjJNT_SLIDE
        self.joint_unit = ", ".join("m" if slide else "rad" for slide in slides) if slides.any() else "rad"
        used = {self.model.actuator(actuator).name for actuator in self.parts.gripper.servos}
        if others := used - set(gripper.actuators):
            allowed = "the arm's and the gripper's"
            raise UserError(f"robot {path.name}: actuators: got {', '.join(sorted(others))} too, allowed: {allowed}")
        if missing := set(gripper.actuators) - used:
            raise unknown_name(f"actuator in gripper of robot {path.name}", min(missing), used)
        if self.gripper_unit == "rad":
            self.jaws = measure_jaws(self.model, self.parts.gripper, self.fingers, gripper.closed, gripper.open)
            self.finger_touch_m = float(np.interp(0.0, self.jaws.gap_K, self.jaws.position_K))
            if abs((gap_m := self.jaws.gap_K[-1]) - (gripper.opening_m or 0.0)) > 0.1 * gap_m:
                got = gripper.opening_m or "null"
                raise UserError(f"robot {path.name}: gripper.opening_m: got {got}, needed: {gap_m:.3f}, as measured")

    @cached_property
    def held_qpos(self) -> np.ndarray:
        """Joint positions for the tool anywhere over the table, at which episodes with a held object start, [K, J]."""
        low, high = np.array(self.workspace_m)
        points_K3 = low + (high - low) * np.random.default_rng(0).uniform(*HELD_BOX, (HELD_POSES, 3))
        qpos_KJ, miss_K = self.reach_for(points_K3)
        return qpos_KJ[miss_K < HELD_MISS_M]

    def start_qpos(self, rng: EpisodeRng, held_n: np.ndarray) -> np.ndarray:
        qpos_nJ = super().start_qpos(rng, held_n)
        if held_n.any():
            chosen = (rng.uniform("held", 0.0, 1.0) * len(self.held_qpos)).astype(int)
            qpos_nJ[held_n] = self.held_qpos[chosen[held_n]]
        return qpos_nJ

    def spec(self) -> mujoco.MjSpec:
        try:
            spec = mujoco.MjSpec.from_file(str(self.mjcf))
        except ValueError as error:
            raise UserError(f"robot {self.name}: {self.mjcf}: {one_line(error)}") from error
        file, world = self.file, spec.worldbody
        if file.keyframe:
            self._home = self._positions(spec, file.keyframe)
        for thing in (*spec.keys, *spec.sensors):
            spec.delete(thing)
        if file.root:
            self._find(world.bodies, "body", file.root)
            beside = [body for body in world.bodies if body.name != file.root]
            for thing in (*beside, *world.geoms, *world.sites, *world.cameras, *world.lights):
                spec.delete(thing)
        for name in file.without:
            spec.delete(self._find(spec.bodies, "body", name))
        for body in world.bodies:
            body.pos = np.add(body.pos, file.base_m)
        for name, servo in file.servos.items():
            add_servo(spec, self._find(spec.joints, "joint", name), servo)
        for name in file.gripper.bodies:
            self._find(spec.bodies, "body", name)
        self._add_tool(spec)
        for geom in spec.geoms:
            if geom.contype or geom.conaffinity:
                geom.contype, geom.conaffinity = 1, 2
        if file.weightless:
            for body in spec.bodies[1:]:
                body.gravcomp = 1
        spec.option.timestep, spec.option.integrator = file.timestep_s, mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
        spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND | mujoco.mjtDisableBit.mjDSBL_AUTORESET
        return spec

    def _add_tool(self, spec: mujoco.MjSpec) -> None:
        tool = self.file.tool
        if tool.site:
            site = self._find(spec.sites, "site", tool.site)
            body, pos, quat = site.parent, site.pos, site.quat
        else:
            body, pos, quat = self._find(spec.bodies, "body", tool.body), tool.pos_m, tool.quat
        if tool.site != "tcp":
            body.add_site(name="tcp", pos=pos, quat=quat, size=[0.005] * 3, group=4)
        kind = mujoco.mjtSensor.mjSENS_FRAMELINVEL
        spec.add_sensor(name="tcp_vel", type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname="tcp")

    def _find(self, things: Any, kind: str, name: str) -> Any:
        """Return the thing called ``name``. UserError with the nearest name."""
        named = {thing.name: thing for thing in things}
        if name not in named:
            raise unknown_name(f"{kind} in robot {self.name}", name, filter(None, named))
        return named[name]

    def _positions(self, spec: mujoco.MjSpec, name: str) -> dict[str, float]:
        """Return the joint positions of a keyframe by the joints' names."""
        self._find(spec.keys, "keyframe", name)
        model = spec.compile()
        qpos = model.key(name).qpos
        return {model.joint(i).name: float(qpos[at]) for i, at in enumerate(model.jnt_qposadr)}

    def _of_joints(self, key: str, values: Mapping[str, float], names: list[str]) -> list[float]:
        """Return a number per joint of the arm. UserError for one that is missing or not the arm's."""
        for name in values:
            if name not in names and not (key == "home" and self.file.keyframe):
                raise unknown_name(f"joint in {key} of robot {self.name}", name, names)
        if missing := [name for name in names if name not in values]:
            raise UserError(f"robot {self.name}: {key}: lacks {', '.join(missing)}")
        return [values[name] for name in names]


def add_servo(spec: mujoco.MjSpec, joint: Any, servo: Servo) -> None:
    """Add a position servo to a joint, in place of its actuator."""
    for actuator in [each for each in spec.actuators if each.target == joint.name]:
        spec.delete(actuator)
    force = [-servo.force, servo.force]
    actuator = spec.add_actuator(
        name=joint.name, trntype=mujoco.mjtTrn.mjTRN_JOINT, target=joint.name, ctrlrange=joint.range, forcerange=force
    )
    actuator.set_to_position(kp=servo.kp, kv=servo.kd)
    if servo.armature is not None:
        joint.armature = servo.armature
