"""Options of our simulators, robots and objects, and the registry of robots."""

from collections.abc import Collection
from dataclasses import field
from typing import Any, Literal, NamedTuple

from embodied.core.errors import UserError
from embodied.core.options import DeviceName, Positive, PositiveInt, config_dataclass
from embodied.core.registry import Registry
from embodied.envs.mujoco.randomization.terms import RandomizationTerm
from embodied.envs.rendering.config import CameraRandomization

SIDES = ("left", "right")
"""Two robots at one table."""


@config_dataclass
class VaryingConfig:
    """Options of both simulators: what varies between envs, and what is written where one diverges."""

    randomization: dict[str, RandomizationTerm | None] = field(default_factory=dict)
    """Terms of domain randomisation by name; null is no term."""
    camera_randomization: CameraRandomization = field(default_factory=CameraRandomization)
    """How far images vary between episodes."""
    dump_dir: str = "nan_dumps"
    """Directory where the NaN guard writes the states of diverged envs; relative to the run directory."""


@config_dataclass
class SimConfig(VaryingConfig):
    """Options of the simulator."""

    name: Literal["mujoco"] = "mujoco"
    """Simulator."""


@config_dataclass
class WarpConfig(VaryingConfig):
    """Options of the simulator MuJoCo Warp."""

    name: Literal["warp"] = "warp"
    """Simulator."""
    device: DeviceName = "auto"
    """Device of the simulation; auto is that of the learner, ``device=``."""
    max_contacts: PositiveInt = 64
    """Contacts per env, on average over all envs, for which there is memory."""
    max_constraints: PositiveInt = 192
    """Rows of constraints per env for which there is memory; a contact has 3 to 6, a joint at its limit 1."""


@config_dataclass
class Shape:
    """Kind and size of an object."""

    kind: Literal["box", "cylinder", "sphere"]
    """box, cylinder (upright) or sphere."""
    size_m: tuple[Positive, ...]
    """Half sizes of a box; radius and half height of a cylinder; radius of a sphere."""

    def __post_init__(self) -> None:
        length = {"box": 3, "cylinder": 2, "sphere": 1}[self.kind]
        if len(self.size_m) != length:
            raise UserError(f"size_m: got {list(self.size_m)}, a {self.kind} has {length}")

    @property
    def half_width_m(self) -> float:
        """Distance from the centre to a finger that holds the object."""
        return self.size_m[1] if self.kind == "box" else self.size_m[0]

    @property
    def half_height_m(self) -> float:
        """Height of the centre when the object stands on the table."""
        return self.size_m[-1]


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
    """With ee_delta, add a rotation about the vertical as the action before the gripper. Experts turn the tool."""
    orientation: Literal["vertical", "free"] = "vertical"
    """free: with ee_delta, the tool is vertical as far as its position allows it, for arms of fewer than six joints."""
    from_target: bool = False
    """Add displacements to the last joint targets, not to the measured pose, from which an arm with a weight sinks."""
    damping: float = 0.03
    """Damping of the least-squares inverse kinematics."""
    posture_gain: float = 0.03
    """Share of the distance to the home posture that the null space moves per control step."""
    workspace_low_m: tuple[float, float, float] = (0.25, -0.35, 0.012)
    """One corner of the box that the tool centre point's target stays in."""
    workspace_high_m: tuple[float, float, float] = (0.75, 0.35, 0.45)
    """The opposite corner."""


class Scale(NamedTuple):
    """Lengths of a robot's tasks as multiples of those of the Panda's."""

    reach: float = 1.0
    """Of places and ways: how far the robot's workspace reaches."""
    size: float = 1.0
    """Of objects: how wide the gripper opens."""

    def of(self, option: str, as_objects: Collection[str]) -> float:
        """Return the factor of an option by the unit in its name; 1 for one without length or mass.

        as_objects: lengths that follow the size of objects.
        """
        if option.endswith("_kg"):
            return self.size**3
        if option in as_objects:
            return self.size
        return self.reach if option.endswith("_m") else 1.0


ROBOTS: Registry[Any] = Registry("robot")
"""Classes of robots (``embodied.envs.mujoco.robots.base.Robot``), built as ``build(control)``."""
ROBOTS.declare("panda", "embodied.envs.mujoco.robots.panda:Panda", ControlConfig)
