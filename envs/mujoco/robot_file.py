"""A robot as a YAML file: which MJCF, what in it is the robot, and how it starts and moves. Imports no simulator."""

import json
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

import embodied
from embodied.core.errors import UserError, one_line, unknown_name
from embodied.core.options import NonNegative, Positive, config_dataclass, from_mapping
from embodied.core.user_files import find_file
from embodied.envs.mujoco.config import ROBOTS, ControlConfig, Scale
from embodied.envs.mujoco.mjcf_files import hashes

FOLDER = Path(embodied.__file__).parent / "configs" / "robot"
Vector = tuple[float, float, float]
PANDA_OPENING_M = 0.08
STEPS_TO_CLOSE = 5  # control steps in which a gripper closes
OF_OTHERS = ("max_velocity", "randomization", "perturbation")  # keys that the simulation of a task does not depend on


@config_dataclass
class Place:
    """A site of the MJCF, or a place in a body."""

    site: str = ""
    """Name of a site."""
    body: str = ""
    """Name of a body, without ``site``."""
    pos_m: Vector = (0.0, 0.0, 0.0)
    """Position in the body, or from the site in its frame."""
    quat: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """Orientation in the body, or relative to the site, (w, x, y, z)."""

    def __post_init__(self) -> None:
        if bool(self.site) == bool(self.body):
            raise UserError(f"place: got site '{self.site}' and body '{self.body}', needed: one of them")


@config_dataclass
class CameraPlace(Place):
    """A camera that moves with the robot; it looks along its -z axis, with +y up in the image."""

    fovy_deg: Annotated[float, Field(gt=0, lt=180)] = 58.0
    """Vertical field of view."""


@config_dataclass
class Gripper:
    """The gripper. All its actuators get the same command: m or rad, or what actuators of another kind understand."""

    actuators: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of its actuators."""
    open: float
    """Command that opens it."""
    closed: float
    """Command that closes it; a servo squeezes thin objects too if this is beyond where the fingers meet."""
    bodies: tuple[str, str]
    """The two bodies that touch a held object; one of them may not move."""
    opening_m: Positive | None = None
    """Gap between the bodies at ``open``; null: twice ``open``, as of two fingers that slide."""
    object_m: Positive | None = None
    """Opening that objects are made for, where short fingers need smaller ones; null: ``opening_m``."""
    mjcf: str = ""
    """MJCF of the gripper, written as that of the arm, if it has one of its own; its names begin with ``gripper/``."""
    mount: Place | None = None
    """Where on the arm the origin of the gripper's MJCF is."""

    links: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Joints that follow another one, in place of the MJCF's tendons over them: its name, and movement per its own."""
    armature: NonNegative | None = None
    """Inertia at each of its joints, kg m^2 or kg; null: as in the MJCF."""
    damping: NonNegative | None = None
    """Damping of each of its joints, N m s/rad or N s/m; null: as in the MJCF."""

    def __post_init__(self) -> None:
        if self.open == self.closed:
            raise UserError(f"gripper: got {self.open:g} for open and for closed, needed: two commands")
        if bool(self.mjcf) != bool(self.mount):
            raise UserError("gripper: mjcf, mount: needed: both or none of them")


@config_dataclass
class Servo:
    """A position servo, which replaces the actuator of a joint if there is one."""

    force: Positive
    """Greatest torque or force, N m or N."""
    kp: Positive | None = None
    """Stiffness, N m/rad or N/m; null: 1000/s^2 times the inertia of the joint at home, that of the Panda's servos."""
    kd: NonNegative | None = None
    """Damping, N m s/rad or N s/m; null: a tenth of the stiffness, per second."""
    armature: NonNegative | None = None
    """Inertia of the motor at the joint, kg m^2 or kg; null: as in the MJCF."""


@config_dataclass
class Perturbation:
    """Differences of a simulated arm from the one of training; the defaults are none."""

    gains: Positive = 1.0
    """Factor of the stiffness of every position controller of the arm."""
    joint_damping: Positive = 1.0
    """Factor of the joints' viscous damping."""
    joint_friction: NonNegative = 0.0
    """Dry friction of every joint of the arm, N m."""
    object_mass: Positive = 1.0
    """Factor of the mass of every object."""
    object_friction: Positive = 1.0
    """Factor of the sliding friction of the fingers."""
    action_delay_s: NonNegative = 0.0
    """Time from a command to its effect."""
    backlash_rad: NonNegative = 0.0
    """Play between motor and joint: the joint follows once the motor is half of it ahead."""
    encoder_offset_rad: NonNegative = 0.0
    """Largest constant error of each encoder; drawn per episode."""
    joint_noise_rad: NonNegative = 0.0
    """Standard deviation of measured joint positions."""
    velocity_noise_rad_s: NonNegative = 0.0
    """Standard deviation of measured joint velocities."""
    object_noise_m: NonNegative = 0.0
    """Standard deviation of the external quantities in metres."""

    def terms(self) -> dict[str, dict[str, Any]]:
        """Return the constant differences as terms of randomisation with one value each.

        Encoders, noise and backlash act where ``robots.robot_process`` meets the robot's computer, at any of its ticks.
        """
        fields: dict[str, tuple[float, dict[str, Any]]] = {
            "actuator_gainprm": (self.gains, {"names": ["arm"], "column": 0}),
            "dof_damping": (self.joint_damping, {"names": ["arm"]}),
            "dof_frictionloss": (self.joint_friction, {"names": ["arm"], "operation": "add"}),
            "body_mass": (self.object_mass, {"names": ["objects"]}),
            "geom_friction": (self.object_friction, {"names": ["fingers"], "column": 0}),
            "action_delay": (self.action_delay_s, {}),
        }
        return {name: {"field": name, "range": [value, value], **options} for name, (value, options) in fields.items()}


REAL = Perturbation(
    gains=0.8, joint_damping=1.5, joint_friction=0.3, object_mass=1.3, object_friction=0.8, action_delay_s=0.02,
    backlash_rad=0.004, encoder_offset_rad=0.003, joint_noise_rad=0.0005, velocity_noise_rad_s=0.01,
    object_noise_m=0.002,
)  # fmt: skip
"""That of the Panda, and of robots whose file has none."""


@config_dataclass
class RobotFile:
    """A robot: a MJCF with the names of its parts."""

    mjcf: str
    """Path from the YAML's folder, or ``package:path`` in an installed package."""
    tool: Place
    """The tool centre point. Its z axis points away from the gripper, which closes along its x or y axis."""
    gripper: Gripper
    """The gripper."""
    home: dict[str, float] = field(default_factory=dict)
    """Position of each joint of the arm, from which episodes start, by the joint's name."""
    keyframe: str = ""
    """Name of a keyframe of the MJCF, in place of ``home``."""
    root: str = ""
    """Body of the robot, where the MJCF is a whole scene: all beside it is left out."""
    without: tuple[str, ...] = ()
    """Bodies that are left out."""
    camera: CameraPlace | None = None
    """The camera ``wrist``; null: that of the MJCF, if it has one of this name."""
    reach_m: Positive | None = None
    """How far from the base tasks may be; null: to the far edge of the workspace."""
    base_m: Vector = (0.0, 0.0, 0.0)
    """Position of the MJCF's origin; the table's surface is at z = 0."""
    servos: dict[str, Servo] = field(default_factory=dict)
    """Servos by the joint's name, for joints whose actuator is missing or to be replaced."""
    control: dict[str, Any] = field(default_factory=dict)
    """Defaults of ``task.control`` for this robot."""
    weightless: bool = False
    """Whether the robot compensates its own weight; false: the bodies that the MJCF says."""
    spread: NonNegative = 0.05
    """Greatest distance of each joint from home at the start of an episode."""
    max_velocity: dict[str, Positive] = field(default_factory=dict)
    """Largest speed of each joint by its name; without it policies cannot be exported to the robot."""
    timestep_s: Positive = 0.01
    """Physics step."""
    impratio: Positive | None = None
    """MuJoCo's option of this name in tasks with an object to hold: with 10 it slips less. Null: as in the MJCF."""
    randomization: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """What is different for this robot in terms of ``randomization=sim2real``, by the term's name; null removes one."""
    perturbation: Perturbation = REAL
    """How it differs under ``perturbation=real`` (embodied.deploy robot=sim)."""

    def __post_init__(self) -> None:
        if bool(self.home) == bool(self.keyframe):
            raise UserError("home, keyframe: needed: one of them")


def robot_path(name: str) -> Path | None:
    """Return the YAML file of a robot, None for a registered class. UserError with the nearest name for others."""
    if name in ROBOTS.names():
        return None
    if name.endswith((".yaml", ".yml")):
        return find_file("robot file", name)
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise unknown_name("robot", name, [*ROBOTS.names(), *(other.stem for other in FOLDER.glob("*.yaml"))])
    return path


def read_robot(path: Path) -> RobotFile:
    """Read a robot's YAML file. UserError for bad YAML, and for unknown or wrong keys."""
    return _read(path)[0]


def _read(path: Path) -> tuple[RobotFile, Mapping[str, Any]]:
    """Return a robot, and what its YAML file says, to be hashed."""
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"robot {path}: cannot be read: {one_line(error)}") from error


@cache
def _parsed(path: Path, text: str) -> tuple[RobotFile, Mapping[str, Any]]:
    data = yaml.safe_load(text)
    if not isinstance(data, dict):
        raise UserError(f"robot {path}: got no keys, needed: those of a robot, such as mjcf")
    said = {key: value for key, value in data.items() if key not in OF_OTHERS}
    return from_mapping(RobotFile, data, file=f"robot {path.name}"), said


def mjcf_path(path: Path, mjcf: str) -> Path:
    """Return the MJCF that the YAML at ``path`` calls ``mjcf``. UserError if there is none."""
    package, colon, inside = mjcf.rpartition(":")
    folder = path.parent
    if colon:
        found = find_spec(package) if package.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise UserError(f"robot {path.name}: mjcf: package '{package}' is not installed")
        folder = Path(found.submodule_search_locations[0])
    found_at = folder / inside
    if not found_at.is_file():
        known = [str(x.relative_to(folder)) for x in found_at.parent.glob("*.xml")]
        raise unknown_name(f"mjcf of robot {path.name}", inside, known)
    return found_at


def robot_hashes(name: str) -> tuple[str, ...]:
    """Return hashes of a robot's YAML and MJCF files and of their meshes; an empty one for a robot of a class.

    All but the first are of earlier runs: before the camera was added to the YAML, or before meshes were hashed.
    """
    if (path := robot_path(name)) is None:
        return ("",)
    file, said = _read(path)
    mjcfs = [mjcf_path(path, mjcf) for mjcf in (file.mjcf, file.gripper.mjcf) if mjcf]
    blind = {key: value for key, value in said.items() if key != "camera"}
    yamls = [json.dumps(each, sort_keys=True).encode() for each in (said, blind)]
    contents = [b"\0".join([each, *(mjcf.read_bytes() for mjcf in mjcfs)]) for each in yamls]
    return hashes(contents, mjcfs)


def robot_scale(name: str) -> Scale:
    """Return how the lengths of a robot's tasks follow from its workspace and its gripper; 1 for robots of a class."""
    if (path := robot_path(name)) is None:
        return Scale()
    file, panda = read_robot(path), ControlConfig()
    reach_m = file.reach_m or file.control.get("workspace_high_m", panda.workspace_high_m)[0]
    opening_m = file.gripper.object_m or file.gripper.opening_m or 2 * file.gripper.open
    return Scale(reach_m / panda.workspace_high_m[0], opening_m / PANDA_OPENING_M)


def control_options(robot: str, control: Mapping[str, Any]) -> Any:
    """Return the control options of a robot, with the defaults of its class or file."""
    if (path := robot_path(robot)) is None:
        return from_mapping(ROBOTS[robot].config, control, "control")
    file = read_robot(path)
    rate = {"gripper_m": abs(file.gripper.open - file.gripper.closed) / STEPS_TO_CLOSE}
    return from_mapping(ControlConfig, {**rate, **file.control, **control}, "control")


def robot_randomization(name: str) -> Mapping[str, Any]:
    """Return what a robot's file changes in terms of ``randomization=sim2real``; nothing for robots of a class."""
    path = robot_path(name)
    return {} if path is None else read_robot(path).randomization


def robot_perturbation(name: str) -> Perturbation:
    """Return how a robot differs from the one of training under ``perturbation=real``."""
    path = robot_path(name)
    return REAL if path is None else read_robot(path).perturbation
