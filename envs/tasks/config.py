"""Options of the tasks, and of what several tasks share."""

from dataclasses import Field, asdict, field, fields
from pathlib import Path
from typing import Any, ClassVar, cast

from embodied.core.errors import UserError
from embodied.core.options import Fraction, Positive, PositiveInt, config_dataclass
from embodied.core.user_files import find_file
from embodied.envs.mujoco.config import SIDES, Scale
from embodied.envs.mujoco.mjcf_files import hashes
from embodied.envs.mujoco.robot_file import FOLDER, control_options, robot_hashes, robot_path, robot_scale
from embodied.envs.tasks.words import Words as Words
from embodied.envs.tasks.words import default_words

SLOTS = ("target", "distractor_1", "distractor_2")
PANDA_SPEED = 1.2  # m/s of the Panda's tool at action 1
GRASP_M = 0.03  # greatest half width between fingers that open to 0.04 m on each side


class OfPanda(int):
    """A default time limit, control steps: an object of its own, so that the same number can be given."""


@config_dataclass
class TaskConfig:
    """Options that every task has.

    Default lengths are for the Panda. Those of another robot are multiples of them: those in ``as_objects`` by the
    opening of its gripper, masses by the cube of that, all others by the reach of its workspace. A robot whose tool
    needs more time for its way has a longer time limit.
    """

    as_objects: ClassVar[tuple[str, ...]] = ("cube_half_m", "base_half_m", "handle_half_m")
    """Names of lengths that follow the opening of the gripper, as objects do."""

    robot: str = "panda"
    """Name of the robot, or the path of its YAML file."""
    robot_sha256: str = ""
    """Hash of the robot's files, which a run keeps: with others it cannot go on. Empty: that of the present ones."""
    scene: str = ""
    """Path of an MJCF file with furniture and obstacles, or empty."""
    scene_sha256: str = ""
    """Hash of that file, kept as ``robot_sha256`` is."""
    task_sha256: str = ""
    """Hash of the task's own Python file, which a run keeps; empty for a task of this project."""
    control: dict[str, Any] = field(default_factory=dict)
    """The robot's options, which say how actions move it; for the Panda those of ``ControlConfig``."""
    max_episode_steps: PositiveInt = OfPanda(80)
    """Time limit, control steps."""
    control_dt_s: float = 0.05
    """Length of a control step, s."""
    held_starts: Fraction = 0.0
    """Share of the training episodes that start with the object already in the hand, anywhere over the table.

    So the steps after the grasp are learned from the first minute. Evaluations have no such starts. A start-state
    distribution wider than the task's helps exploration (Kakade and Langford 2002; reverse curriculum: Florensa et al.
    2017).
    """

    def __init_subclass__(cls) -> None:
        steps = vars(cls).get("max_episode_steps")
        if isinstance(steps, int):
            cls.max_episode_steps = OfPanda(steps)
        elif isinstance(steps, Field) and isinstance(steps.default, int):
            steps.default = OfPanda(steps.default)

    def __post_init__(self) -> None:
        if (path := robot_path(self.robot)) and path.parent != FOLDER:
            object.__setattr__(self, "robot", str(path))  # evaluations may run in another directory
        if self.scene:
            object.__setattr__(self, "scene", str(find_file("scene", self.scene)))
        scene = Path(self.scene)
        of_scene = hashes([scene.read_bytes()], [scene]) if self.scene else ("",)
        for part, present in {"robot": robot_hashes(self.robot), "scene": of_scene}.items():
            kept = getattr(self, f"{part}_sha256")
            if kept not in ("", *present):
                what, cure = f"{part} {getattr(self, part)}", f"undo the change, or name a copy: {part}_file=<path>"
                raise UserError(f"{what}: its files are not those that the run was made with: {cure}")
            object.__setattr__(self, f"{part}_sha256", kept or present[0])
        control = control_options(self.robot, self.control)
        object.__setattr__(self, "control", asdict(control))  # defaults included
        scale = robot_scale(self.robot)
        for option in fields(self):
            value, default = getattr(self, option.name), cast(Any, option.default)
            factor = scale.of(option.name, self.as_objects)
            if factor != 1 and value is default:  # a user's numbers are other objects
                scaled = tuple(factor * x for x in value) if isinstance(value, tuple) else factor * value
                object.__setattr__(self, option.name, scaled)

        if isinstance(steps := self.max_episode_steps, OfPanda):
            # as long as the way takes, but no shorter than for the Panda: a gripper needs its time
            speed = control.delta_m / self.control_dt_s / PANDA_SPEED
            factor = 1.0 if path is None else max(1.0, scale.reach / speed)
            object.__setattr__(self, "max_episode_steps", round(steps * factor))

    def substeps(self, timestep_s: float) -> int:
        """Return the number of physics steps in a control step; UserError unless it is whole."""
        substeps = round(self.control_dt_s / timestep_s)
        if substeps < 1 or abs(substeps * timestep_s - self.control_dt_s) > 1e-9:
            allowed = f"multiples of the physics step, {timestep_s}"
            raise UserError(f"control_dt_s: got {self.control_dt_s}, allowed: {allowed}")
        return substeps


@config_dataclass
class ObjectTaskConfig(TaskConfig):
    """Options of tasks with objects on the table."""

    fail_out_of_reach: bool = False
    """End an episode as a failure when an object has left the arm's workspace, instead of letting the time run out."""


@config_dataclass
class CubeConfig(ObjectTaskConfig):
    """Options of tasks with a red cube. ``low`` and ``high`` are corners of an area (x, y) or of a box (x, y, z)."""

    cube_half_m: float = 0.02
    """Half the red cube's edge."""
    cube_mass_kg: float = 0.064
    """Mass of the red cube."""
    cube_low_m: tuple[float, float] = (0.45, -0.15)
    """Area of the table where the red cube starts."""
    cube_high_m: tuple[float, float] = (0.65, 0.15)
    """Opposite corner of that area."""


@config_dataclass
class GoalConfig(TaskConfig):
    """Options of tasks with a goal. ``low`` and ``high`` are opposite corners of a box, or of an area of the table."""

    goal_low_m: tuple[float, ...] = (0.45, -0.15, 0.12)
    """Where the goal may be: x, y, z, or x, y on the table."""
    goal_high_m: tuple[float, ...] = (0.65, 0.15, 0.3)
    """Opposite corner."""
    success_m: float = 0.03
    """Greatest distance from the goal that counts as success."""


@config_dataclass
class PlacingConfig(ObjectTaskConfig):
    """Options of tasks that place an object in a tray."""

    held_starts: Fraction = 0.3
    tray_half_m: float = 0.08
    """Half width of the space between the walls."""
    wall_m: float = 0.065
    """Height of the walls."""
    carry_m: float = 0.1
    """Height of the object's centre at which it passes the wall with some clearance."""
    rest_speed_m_s: float = 0.05
    """Greatest speed of an object at rest."""


@config_dataclass
class ReachConfig(GoalConfig):
    """Options of Reach."""

    max_episode_steps: PositiveInt = 40
    goal_low_m: tuple[float, float, float] = (0.35, -0.3, 0.08)
    goal_high_m: tuple[float, float, float] = (0.65, 0.3, 0.4)
    success_m: float = 0.025


@config_dataclass
class DetourConfig(GoalConfig):
    """Options of Detour."""

    max_episode_steps: PositiveInt = 40
    keep_out_m: Positive = 0.04
    """The tool centre point must stay this far from the post's axis, at any height."""
    post_low_m: tuple[float, float] = (0.46, -0.01)
    """Area of the table where the post may stand (x, y)."""
    post_high_m: tuple[float, float] = (0.48, 0.01)
    """Opposite corner of that area."""
    goal_low_m: tuple[float, float, float] = (0.33, -0.03, 0.13)
    goal_high_m: tuple[float, float, float] = (0.36, 0.03, 0.21)
    success_m: float = 0.06


@config_dataclass
class PushConfig(GoalConfig, CubeConfig):
    """Options of Push. The goal is a mark on the table; its distance is horizontal."""

    max_episode_steps: PositiveInt = 64
    cube_half_m: float = 0.025
    cube_mass_kg: float = 0.1
    cube_low_m: tuple[float, float] = (0.42, -0.12)
    cube_high_m: tuple[float, float] = (0.52, 0.12)
    goal_low_m: tuple[float, float] = (0.6, -0.12)
    goal_high_m: tuple[float, float] = (0.7, 0.12)


@config_dataclass
class LiftConfig(GoalConfig, CubeConfig):
    """Options of Lift."""

    max_episode_steps: PositiveInt = 64
    held_starts: Fraction = 0.3
    goal_low_m: tuple[float, float, float] = (0.45, -0.15, 0.12)
    goal_high_m: tuple[float, float, float] = (0.65, 0.15, 0.3)


@config_dataclass
class PickPlaceConfig(PlacingConfig, CubeConfig):
    """Options of PickPlace. The areas of cube and tray do not overlap."""

    cube_low_m: tuple[float, float] = (0.45, -0.2)
    cube_high_m: tuple[float, float] = (0.65, 0.0)
    tray_low_m: tuple[float, float] = (0.45, 0.14)
    """Area of the table where the tray's centre starts."""
    tray_high_m: tuple[float, float] = (0.65, 0.22)
    """Opposite corner of that area."""


@config_dataclass
class StackConfig(CubeConfig):
    """Options of Stack: ``cube`` is the red one, ``base`` the blue one below it. Their areas do not overlap."""

    max_episode_steps: PositiveInt = 96
    held_starts: Fraction = 0.3
    base_half_m: float = 0.025
    """Half the blue cube's edge."""
    base_mass_kg: float = 0.15
    """Mass of the blue cube."""
    cube_low_m: tuple[float, float] = (0.45, -0.18)
    cube_high_m: tuple[float, float] = (0.62, -0.04)
    base_low_m: tuple[float, float] = (0.45, 0.04)
    """Area of the table where the blue cube starts."""
    base_high_m: tuple[float, float] = (0.62, 0.18)
    """Opposite corner of that area."""


@config_dataclass
class TabletopConfig(PlacingConfig):
    """Options of Tabletop."""

    as_objects = (*TaskConfig.as_objects, "wall_m", "carry_m")  # objects stand in the trays

    words: Words = field(default_factory=default_words)
    """Vocabulary of the instructions."""
    object_mass_kg: float = 0.064
    """Mass of every object."""
    cells_x_m: tuple[float, ...] = (0.45, 0.6)
    """x of the cells' centres; each object stands in a cell of its own."""
    cells_y_m: tuple[float, ...] = (-0.11, 0.0, 0.11)
    """y of the cells' centres."""
    jitter_m: tuple[float, float] = (0.02, 0.01)
    """Greatest distance (x, y) of an object from the centre of its cell.

    It leaves room for an open finger between neighbouring objects and next to the trays.
    """
    yaw_rad: float = 0.5
    """Greatest yaw of an object, small enough that fingers do not close on a cube's edges."""
    tray_jitter_m: tuple[float, float] = (0.02, 0.01)
    """Greatest distance (x, y) of a tray from its place."""
    wall_m: float = 0.06
    """Height of the walls: just below the hand when it reaches for the table, hard to drag an object over."""
    fail_tipped: bool = False
    """End an episode as a failure when a target that is taller than wide has been tipped over outside its tray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (scale := robot_scale(self.robot)) != Scale():
            object.__setattr__(self, "words", self.words.scaled(scale, default_words()))
        if len(self.cells_x_m) * len(self.cells_y_m) < len(SLOTS):
            raise UserError(f"cells_x_m, cells_y_m: got too few cells, needed: {len(SLOTS)}, one per object")
        for name, shape in self.words.shapes.items():
            if (half_m := shape.half_width_m) > GRASP_M * scale.size:
                raise UserError(
                    f"words.shapes.{name}: half as wide as {half_m} m, allowed: up to {GRASP_M * scale.size}"
                )


@config_dataclass
class LiftBarConfig(TaskConfig):
    """Options of LiftBar. The bar lies along y, across both robots, with a handle at each end."""

    robot: str = ""
    """Empty: the task is for two."""
    robots: dict[str, str] = field(default_factory=lambda: dict.fromkeys(SIDES, "panda"))
    """The robots ``left`` and ``right``, as ``robot`` of other tasks; twice the same, with the same ``control``."""
    apart_m: Positive = 0.6
    """Distance between the bases of the robots, which stand side by side."""
    max_episode_steps: PositiveInt = 64
    bar_length_m: Positive = 0.6
    """Distance between the middles of the handles."""
    bar_mass_kg: Positive = 0.8
    """Mass of the bar."""
    handle_half_m: Positive = 0.02
    """Half the width of the handles and of the bar; their heights follow."""
    bar_low_m: tuple[float, float] = (0.45, -0.04)
    """Area of the table where the middle of the bar starts."""
    bar_high_m: tuple[float, float] = (0.6, 0.04)
    """Opposite corner of that area."""
    yaw_rad: float = 0.15
    """Greatest turn of the bar to either side at the start."""
    height_m: tuple[float, float] = (0.16, 0.28)
    """Least and greatest height that the handles are to be lifted to."""
    success_m: float = 0.03
    """Greatest distance of a handle from that height, and between the heights of both, that counts as success."""

    def __post_init__(self) -> None:
        if self.robot:
            two = ", ".join(f"{side}: {self.robot}" for side in SIDES)
            raise UserError(f"robot: got {self.robot}, but this task is for two robots: robots={{{two}}}")
        if set(self.robots) != set(SIDES) or len(set(self.robots.values())) > 1:
            got = ", ".join(f"{side}: {name}" for side, name in self.robots.items()) or "none"
            raise UserError(f"robots: got {got}, needed: left and right, twice the same robot")
        object.__setattr__(self, "robot", self.robots[SIDES[0]])
        super().__post_init__()  # which may replace its name by a path
        object.__setattr__(self, "robots", dict.fromkeys(SIDES, self.robot))
        object.__setattr__(self, "robot", "")
