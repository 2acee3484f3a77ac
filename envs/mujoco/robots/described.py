"""A robot from a YAML file (``RobotFile``): its MJCF gets what simulations and tasks need, by rule.

MJCF ──► root alone, without parts ──► base ──► servos ──► site tcp, collision bits, options ──► GripperArm
"""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import mujoco
import numpy as np

from embodied.core.errors import UserError, one_line, unknown_name
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import ROBOTS, ControlConfig
from embodied.envs.mujoco.robot_file import (
    Place,
    Servo,
    control_options,
    mjcf_path,
    read_robot,
    robot_path,
    robot_scale,
)
from embodied.envs.mujoco.robots.base import Robot
from embodied.envs.mujoco.robots.gripper_arm import GripperArm
from embodied.envs.mujoco.robots.home import check_home
from embodied.envs.mujoco.robots.jaws import measure_jaws

BIT = mujoco.mjtDisableBit
NEEDED = BIT.mjDSBL_CONTACT | BIT.mjDSBL_GRAVITY | BIT.mjDSBL_ACTUATION | BIT.mjDSBL_CONSTRAINT | BIT.mjDSBL_SENSOR
HELD_BOX = (0.2, 0.7)  # share of the workspace along each axis
GRIPPER = "gripper/"  # with which the names of a gripper's MJCF of its own begin
HELD_POSES, HELD_MISS_M = 256, 0.005
FINGER_FRICTION = [1, 0.02, 0.0001]  # sliding, torsional and rolling, of fingers whose geoms have no priority
CRITICAL = [0.02, 1.0]  # time constant (s) and damping ratio of their contacts
STIFFNESS, DAMPING = 1000.0, 100.0  # of servos without gains, per inertia of the joint, 1/s^2 and 1/s
SLIDES_M = 0.001  # how far a gap may be from twice the position of fingers that slide


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
        self.path, self.name, self.mjcf = path, path.stem, mjcf_path(path, file.mjcf)
        self.finger_open_m, self.finger_closed_m = gripper.open, gripper.closed
        self.finger_scale = 1 / max(abs(gripper.open), abs(gripper.closed))
        self.scale, self.impratio = robot_scale(str(path)), file.impratio
        self._home: Mapping[str, float] = file.home
        self._inertias: dict[str, float] = {}
        names = [self.model.joint(joint).name for joint in self.parts.arm.joints]
        self.home_qpos = np.array(self._of_joints("home", self._home, names))
        self.home_spread = self.held_spread = np.full(len(names), file.spread)
        if file.max_velocity:
            self.max_velocity = np.array(self._of_joints("max_velocity", file.max_velocity, names))
        ends = self.model.jnt_range[self.parts.gripper.joints[0]] if self.gripper_unit == "rad" else ()
        self.finger_max_m = float(max([gripper.open, *ends]))
        check_home(self, file)
        slides = self.model.jnt_type[self.parts.arm.joints] == mujoco.mjtJoint.mjJNT_SLIDE
        self.joint_unit = ", ".join("m" if slide else "rad" for slide in slides) if slides.any() else "rad"
        used = {self.model.actuator(actuator).name for actuator in self.parts.gripper.servos}
        if others := used - set(gripper.actuators):
            allowed = "the arm's and the gripper's: list it under gripper.actuators, or delete it from the MJCF"
            raise UserError(f"robot {path.name}: actuators: got {', '.join(sorted(others))} too, allowed: {allowed}")
        if missing := set(gripper.actuators) - used:
            raise unknown_name(f"actuator in gripper of robot {path.name}", min(missing), used)
        jaws = measure_jaws(self.model, self.parts, self.fingers, gripper.closed, gripper.open, self.home_qpos)
        if abs((gap_m := jaws.gap_K[-1]) - (got_m := gripper.opening_m or 2 * gripper.open)) > 0.1 * gap_m:
            got = f"{'got' if gripper.opening_m else 'by default twice open,'} {got_m:.3f}, measured: {gap_m:.3f}"
            raise UserError(f"robot {path.name}: gripper.opening_m: {got}: write opening_m: {gap_m:.3f}")
        self.thin_along_y = bool(jaws.reach_3[1] < jaws.reach_3[0])
        sliding = self.parts.direct and self.gripper_unit == "m"
        # where they meet, or where their last way begins, if they do not close further
        if sliding and np.abs(jaws.gap_K - 2 * jaws.command_K).max() <= SLIDES_M:
            self.finger_touch_m = 0.0 if gripper.closed < 0 else float(jaws.command_K[1])
        else:
            meet_m = max(0.0, jaws.gap_K[1])
            self.jaws, self.finger_touch_m = jaws, float(np.interp(meet_m, jaws.gap_K, jaws.command_K))

    @cached_property
    def model(self) -> mujoco.MjModel:
        """The robot without table and objects. UserError for what its MJCF refers to and lacks, such as a mesh."""
        try:
            return self.spec().compile()
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"robot {self.name}: {self.mjcf.name}: {one_line(error)}") from error

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
            chosen = (rng.uniform("held_pose", 0.0, 1.0) * len(self.held_qpos)).astype(int)
            qpos_nJ[held_n] = self.held_qpos[chosen[held_n]]
        return qpos_nJ

    def spec(self) -> mujoco.MjSpec:
        file, spec = self.file, read_mjcf(self.name, self.mjcf)
        world = spec.worldbody
        if file.keyframe:
            self._home = self._positions(spec, file.keyframe)
        for thing in (*spec.keys, *spec.sensors):
            spec.delete(thing)
        if file.root:
            self._find(world.bodies, "body", file.root)
            beside = [body for body in world.bodies if body.name != file.root]
            for thing in (*beside, *world.geoms, *world.sites, *world.cameras, *world.lights):
                spec.delete(thing)
        for number, body in enumerate(spec.bodies):
            body.name = body.name or f"body{number}"
        for name in file.without:
            spec.delete(self._find(spec.bodies, "body", name))
        for body in world.bodies:
            body.pos = np.add(body.pos, file.base_m)
        if file.gripper.mount is not None:
            body, pos, quat = self._place(spec, file.gripper.mount)
            mjcf, frame = mjcf_path(self.path, file.gripper.mjcf), body.add_frame(pos=pos, quat=quat)
            attach_gripper(spec, self.name, mjcf, frame)
        for name in file.gripper.bodies:
            self._find(spec.bodies, "body", name)
        self._add_tool(spec)
        if file.camera is not None:
            body, pos, quat = self._place(spec, file.camera)
            body.add_camera(name="wrist", pos=pos, quat=quat, fovy=file.camera.fovy_deg)
        for name, servo in file.servos.items():
            joint = self._find(spec.joints, "joint", name)
            if servo.armature is not None:
                joint.armature = servo.armature
        inertia = self._inertia(spec) if any(servo.kp is None for servo in file.servos.values()) else {}
        for name, servo in file.servos.items():
            add_servo(spec, spec.joint(name), servo, inertia.get(name, 0.0))
        for name, (other, _) in file.gripper.links.items():
            self._find(spec.joints, "joint", name), self._find(spec.joints, "joint", other)
        add_links(spec, file.gripper.links)
        for geom in spec.geoms:
            if geom.contype or geom.conaffinity:
                geom.contype, geom.conaffinity = 1, 2
                if geom.parent.name in self.fingers and not geom.priority:
                    geom.priority, geom.condim, geom.friction, geom.solref = 1, 4, FINGER_FRICTION, CRITICAL
        if file.weightless:
            for body in spec.bodies[1:]:
                body.gravcomp = 1
        spec.option.timestep, spec.option.integrator = file.timestep_s, mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        spec.option.cone, spec.option.gravity = mujoco.mjtCone.mjCONE_ELLIPTIC, [0, 0, -9.81]
        spec.option.disableflags &= ~NEEDED
        spec.option.disableflags |= BIT.mjDSBL_ISLAND | BIT.mjDSBL_AUTORESET
        return spec

    def _inertia(self, spec: mujoco.MjSpec) -> dict[str, float]:
        """Return the inertia of each joint with the arm at home and all other joints at 0, kg m^2 or kg."""
        if not self._inertias:
            model = spec.compile()
            data = mujoco.MjData(model)
            for name, position in self._home.items():
                data.joint(self._find(spec.joints, "joint", name).name).qpos = position
            mujoco.mj_forward(model, data)
            full_VV = np.zeros((model.nv, model.nv))
            mujoco.mj_fullM(model, data, full_VV)
            dofs = zip(range(model.njnt), model.jnt_dofadr, strict=True)
            self._inertias = {model.joint(i).name: float(full_VV[dof, dof]) for i, dof in dofs}
        return self._inertias

    def _add_tool(self, spec: mujoco.MjSpec) -> None:
        body, pos, quat = self._place(spec, self.file.tool)
        carried, beyond = body, {joint.name: joint for joint in spec.joints}
        while carried is not None:
            beyond = {name: joint for name, joint in beyond.items() if joint.parent != carried}
            carried = carried.parent
        for joint in beyond.values():
            if (armature := self.file.gripper.armature) is not None:
                joint.armature = armature
            if (damping := self.file.gripper.damping) is not None:
                joint.damping = [damping, 0, 0]
        if self.file.tool.site == "tcp":
            if (self.file.tool.pos_m, self.file.tool.quat) != (Place.pos_m, Place.quat):
                raise UserError(f"robot {self.name}: tool: site tcp is the tool as it is, without pos_m and quat")
        else:
            body.add_site(name="tcp", pos=pos, quat=quat, size=[0.005] * 3, group=4)

    def _place(self, spec: mujoco.MjSpec, place: Place) -> tuple[Any, Any, Any]:
        """Return the body that a place is in, with position and quaternion there."""
        if not place.site:
            return self._find(spec.bodies, "body", place.body), place.pos_m, place.quat
        parent = self._find(spec.sites, "site", place.site).parent
        site, pos, quat = spec.compile().site(place.site), np.zeros(3), np.zeros(4)  # euler and frames are resolved
        mujoco.mju_rotVecQuat(pos, np.array(place.pos_m), site.quat)
        mujoco.mju_mulQuat(quat, site.quat, np.array(place.quat))
        return parent, site.pos + pos, quat

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


def read_mjcf(robot: str, path: Path) -> mujoco.MjSpec:
    """Read an MJCF file. Of assets with the same name the first one counts. UserError for a file that is not valid."""
    try:
        return mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        if "repeated name" not in str(error):
            raise UserError(f"robot {robot}: {path}: {one_line(error)}") from error
    root = ElementTree.parse(path).getroot()
    for assets in root.iter("asset"):
        names: set[tuple[str, str]] = set()
        for asset in list(assets):
            if (name := (asset.tag, asset.get("name", asset.get("file", "")))) in names:
                assets.remove(asset)
            names.add(name)
    spec = mujoco.MjSpec.from_string(ElementTree.tostring(root, encoding="unicode"))
    spec.modelfiledir = str(path.parent)
    return spec


def attach_gripper(spec: mujoco.MjSpec, robot: str, path: Path, frame: Any) -> None:
    """Add a gripper's MJCF. If it does not name the unit of angles, it has that of the arm's, as where files merge."""
    gripper = read_mjcf(robot, path)
    if not any(each.get("angle") for each in ElementTree.parse(path).iter("compiler")):
        gripper.compiler.degree = spec.compiler.degree
    for thing in (*gripper.keys, *gripper.sensors):
        gripper.delete(thing)
    spec.attach(gripper, frame=frame, prefix=GRIPPER)


def add_links(spec: mujoco.MjSpec, links: Mapping[str, tuple[str, float]]) -> None:
    """Make joints follow others: by constraints, in place of the tendons over these joints."""
    for tendon in list(spec.tendons):
        if any(wrap.type == mujoco.mjtWrap.mjWRAP_JOINT and wrap.target.name in links for wrap in tendon.path):
            spec.delete(tendon)
    for name, (other, ratio) in links.items():
        equality = spec.add_equality(type=mujoco.mjtEq.mjEQ_JOINT, objtype=mujoco.mjtObj.mjOBJ_JOINT)
        equality.name1, equality.name2, equality.data[:2] = name, other, (0.0, ratio)


def add_servo(spec: mujoco.MjSpec, joint: Any, servo: Servo, inertia: float) -> None:
    """Add a position servo to a joint, in place of its actuator. inertia: of the joint at home, kg m^2 or kg."""
    for actuator in [each for each in spec.actuators if each.target == joint.name]:
        spec.delete(actuator)
    limited = joint.limited != mujoco.mjtLimited.mjLIMITED_FALSE and joint.range[0] < joint.range[1]
    actuator = spec.add_actuator(
        name=joint.name, trntype=mujoco.mjtTrn.mjTRN_JOINT, target=joint.name, forcerange=[-servo.force, servo.force],
        ctrlrange=(0, 0),  # not that of the MJCF's main default
    )  # fmt: skip
    kp = STIFFNESS * inertia if servo.kp is None else servo.kp
    kv = DAMPING * kp / STIFFNESS if servo.kd is None else servo.kd
    actuator.set_to_position(kp=kp, kv=kv, inheritrange=float(limited))  # the joint's range may still be in degrees
