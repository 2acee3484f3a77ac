"""Description of an environment: observations, actions, rate, time limit, instructions and outcomes.

It is complete before an environment is built. Policies are built from an ``EnvSpec`` and data sets are checked against
it. Nothing here imports torch or a simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TRAIN = "train"
"""Split of the instructions that are trained on."""
SUCCESS = "success"
"""Outcome that evaluations report for environments that have it."""

Source = Literal["external", "measured", "kinematics", "command"]
"""Source of a quantity on a robot's computer.

external: perception or a person. measured: the robot's encoders. kinematics: measured joints and the robot's geometry.
command: the last command that was sent.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A quantity computed from other terms: ``of + offset - minus``, with zeros for missing entries."""

    of: str
    minus: str
    """Names of the terms."""
    offset: tuple[float, ...] = ()
    """Constant that is added, in the unit of the terms."""


@dataclass(frozen=True, slots=True)
class Term:
    """One part of ``obs["state"]`` or ``obs["privileged"]``."""

    name: str
    size: int
    unit: str = ""
    """SI unit of an entry before scaling, such as m, rad or m/s; empty if it is dimensionless."""
    frame: str = ""
    """Coordinate frame of the entries, such as base or tool; empty if there is none."""
    scale: float = 1.0
    """Observed number = scale * quantity in ``unit``."""
    source: Source = "external"
    difference: Difference | None = None
    """Terms that the quantity is computed from; then ``source`` has no meaning."""
    meaning: str = ""
    """Quantity and order of its entries, in words; empty if the name and ``difference`` say it."""

    @property
    def entry_names(self) -> tuple[str, ...]:
        """Names of the entries: ``tcp_pos[0]``, ``tcp_pos[1]``, ..."""
        return tuple(f"{self.name}[{i}]" for i in range(self.size))

    def derive(self, parts: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the quantity that ``difference`` describes, [..., size]. parts: quantities by name, [..., size]."""
        rule = self.difference
        assert rule is not None
        of, minus = parts[rule.of], parts[rule.minus]
        total = np.zeros((*of.shape[:-1], self.size))
        for sign, piece in ((1.0, of), (1.0, np.array(rule.offset)), (-1.0, minus)):
            size = min(self.size, piece.shape[-1])
            total[..., :size] += sign * piece[..., :size]
        return total


def slices_of(terms: Sequence[Term]) -> dict[str, slice]:
    """Return where each term is in a vector of all of them, by name."""
    ends = accumulate(term.size for term in terms)
    return {term.name: slice(end - term.size, end) for term, end in zip(terms, ends, strict=True)}


@dataclass(frozen=True, slots=True)
class CameraSpec:
    """A camera of an environment: ``obs["images.<name>"]`` is uint8 [N, height, width, 3]."""

    name: str
    height: int
    width: int

    @classmethod
    def square(cls, name: str, size: int) -> CameraSpec:
        return cls(name, size, size)


@dataclass(frozen=True, slots=True)
class ActionTerm:
    """One dimension of a ``Box`` of actions, in [-1, 1]."""

    name: str
    meaning: str = ""
    scale: float = 1.0
    offset: float = 0.0
    unit: str = ""
    """Commanded quantity = offset + scale * action, in ``unit``."""


@dataclass(frozen=True, slots=True)
class Box:
    """Continuous actions: float32 [..., A], each dimension in [-1, 1]. Commanded quantities are offset + scale * x."""

    terms: tuple[ActionTerm, ...]

    @property
    def scale(self) -> NDArray[np.float32]:
        """Commanded quantity per action, [A]."""
        return np.array([term.scale for term in self.terms], np.float32)

    @property
    def offset(self) -> NDArray[np.float32]:
        """Commanded quantity at action 0, [A]."""
        return np.array([term.offset for term in self.terms], np.float32)

    @property
    def size(self) -> int:
        return len(self.terms)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)


@dataclass(frozen=True, slots=True)
class Discrete:
    """A choice between n actions: int64 [..., 1], from 0 to n - 1."""

    names: tuple[str, ...]
    """Names of the choices; n of them."""

    @property
    def size(self) -> int:
        """Number A of entries of an action: one, the index of the choice."""
        return 1

    @property
    def n(self) -> int:
        return len(self.names)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of choices of each entry of an action, as ``MultiDiscrete`` has it."""
        return (self.n,)

    @property
    def entry_names(self) -> tuple[str, ...]:
        return ("choice",)


@dataclass(frozen=True, slots=True)
class MultiDiscrete:
    """Several choices at once, one in each dimension: int64 [..., A], entry i from 0 to ``counts[i] - 1``."""

    entry_names: tuple[str, ...]
    """Names of the dimensions; A of them."""
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.counts)


ActionSpace = Box | Discrete | MultiDiscrete


@dataclass(frozen=True, slots=True)
class JointSpec:
    """One joint of an arm with its position controller. Limits and ``home`` are positions: rad (hinge) or m (slide)."""

    name: str
    kind: Literal["hinge", "slide"]
    pos_m: tuple[float, float, float]
    quat: tuple[float, float, float, float]
    """Pose of the joint's frame in that of the joint before it (of the base for the first one), (w, x, y, z)."""
    axis: tuple[float, float, float]
    """Axis in the joint's own frame, a unit vector."""
    low: float
    high: float
    max_velocity: float
    """Largest speed, unit/s."""
    max_effort: float
    """Largest torque (N m) or force (N) of the actuator."""
    stiffness: float
    damping: float
    """Gains kp and kd of the position controller."""
    home: float


@dataclass(frozen=True, slots=True)
class GripperSpec:
    """A gripper with one command. Positions are distances of each finger from the point where the fingers meet, m.

    Of a gripper whose joints turn, they are the positions of these joints, rad.
    """

    open_m: float
    """Target of each finger when the gripper is open."""
    closed_m: float
    """Target of each finger when the gripper is closed; below 0 squeezes."""
    max_step_m: float
    """Largest movement of the target in one control step."""
    max_position_m: float
    """Position of each finger when the gripper is open as far as it can."""
    position_unit: Literal["m", "rad"] = "m"
    """Unit of all positions."""
    fingers: int = 2
    """Number of positions that are observed: a robot reports one, which counts for all."""


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """A robot arm with a gripper, and how actions move it: all that a robot's computer needs to execute actions."""

    joints: tuple[JointSpec, ...]
    """Joints from the base to the tool, J of them."""
    tool_pos_m: tuple[float, float, float]
    tool_quat: tuple[float, float, float, float]
    """Pose of the tool centre point in the frame of the last joint, (w, x, y, z)."""
    gripper: GripperSpec
    """The gripper, which the last entry of an action commands."""
    control: Literal["ee_delta", "joint_delta"]
    """Meaning of the other entries: displacements of the tool or of the joints."""
    rotation: bool
    """Whether the entry before the gripper turns the tool about the vertical (``ee_delta`` only)."""
    damping: float
    """Damping of the least-squares inverse kinematics."""
    posture_gain: float
    """Share of the distance to the home posture that the null space moves per control step."""
    workspace_low_m: tuple[float, float, float]
    workspace_high_m: tuple[float, float, float]
    """Corners of the box that the tool centre point's target stays in, base frame."""
    orientation: Literal["vertical", "free"] = "vertical"
    """Orientation of the tool with ``ee_delta``; free: it is vertical as far as its position allows it."""
    from_target: bool = False
    """Whether displacements are from the pose of the last joint targets; else they are from the measured pose."""


Arms = Mapping[str, ArmSpec]
"""One arm, or two of a kind, by what their names begin with: nothing, or ``left_`` and ``right_``."""


def arms_of(arm: ArmSpec | None, right_arm: ArmSpec | None) -> Arms:
    """Return the arms of a description by what their names begin with; none without ``arm``."""
    if arm is None:
        return {}
    return {"": arm} if right_arm is None else {"left_": arm, "right_": right_arm}


def joints_of(arms: Arms) -> dict[str, JointSpec]:
    """Return the joints of all arms by their names, which begin as those of their arm do, base to tool."""
    return {f"{side}{joint.name}": joint for side, arm in arms.items() for joint in arm.joints}


ADDED: Mapping[str, Any] = {
    field.name: field.default for cls in (ArmSpec, GripperSpec) for field in fields(cls) if field.default is not MISSING
} | {"right_arm": None, "right_gripper": None}
"""Fields that were added to descriptions of arms, with the values of the descriptions that lack them."""


def described(value: Any) -> dict[str, Any]:
    """Return a dataclass with an arm as JSON values. ``ADDED`` fields with these values are left out, as ever."""
    return asdict(value, dict_factory=lambda pairs: {k: v for k, v in pairs if k not in ADDED or v != ADDED[k]})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a task."""

    text: str
    goal: str
    """Name of the goal; paraphrases share it."""
    split: str = TRAIN
    """``train``, or the name of a split that is not trained on."""


@dataclass(frozen=True, slots=True)
class StartStage:
    """A later stage of a task that an episode can start from, for instance with the object in the gripper."""

    name: str
    share: float
    """Share of training episodes that start from the stage by default. Evaluations never do."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Interface of an environment to policies and data sets."""

    task: str
    state: tuple[Term, ...]
    """Parts of ``obs["state"]``, float32 [N, S], in order."""
    action: ActionSpace
    control_dt_s: float
    """Duration of one control step: seconds between two actions."""
    max_episode_steps: int
    """Time limit, control steps."""
    privileged: tuple[Term, ...] = ()
    """Parts of ``obs["privileged"]``, float32 [N, P]: simulator state for critics alone."""
    cameras: tuple[CameraSpec, ...] = ()
    """Cameras whose images are observed; empty if a policy gets only the state vector."""
    instructions: tuple[Instruction, ...] = ()
    """All instructions of the task; ``obs["instruction"]``, int64 [N], indexes them. Empty if it has none."""
    stages: tuple[StartStage, ...] = ()
    """Stages beyond the ordinary start from which an episode can start; ``EpisodePlans.stage_n`` counts them from 1."""
    action_mask: bool = False
    """Whether ``obs["action_mask"]`` says which choices are allowed: bool [N, C], C the sum of ``action.counts``, the
    choices of the first dimension first. It holds for the next action alone. Never for a ``Box``."""
    outcomes: tuple[str, ...] = (SUCCESS,)
    """Names of predicates of a state that are recorded for every episode; empty for a simulator without any."""
    repeats: Literal["all", "first", "none"] = "all"
    """Which episodes are functions of their plans and actions. first: only the first episode of an env seed, in an env
    that is built for it, as in evaluations; for simulators that are seeded only when they are built. none: no episode,
    because the simulator declares itself not deterministic."""
    robot: str = ""
    """Manufacturer and model of the robot that acts, as data sets name it; empty where there is none."""
    arm: ArmSpec | None = None
    """The robot's arm, if a policy can be exported to it; None for simulators without one."""
    right_arm: ArmSpec | None = None
    """The right one of two arms of a kind; then ``arm`` is the left one. Both are in the frame of the table. Names in
    ``state`` and ``action`` begin with ``left_`` or ``right_``; an action has all of the left one first."""
    descriptions: tuple[str, ...] = ()
    """Descriptions, in words, of everything that a camera can show; empty if the images are not labelled."""
    assumed: tuple[str, ...] = ()
    """Which of ``control_dt_s`` and ``max_episode_steps`` the simulator does not state."""
    images: tuple[str, ...] = ()
    """Names of the cameras whose images the simulator's own observation has; the default cameras of its task."""

    @property
    def arms(self) -> Arms:
        return arms_of(self.arm, self.right_arm)

    @property
    def state_dim(self) -> int:
        """Size S of ``obs["state"]``."""
        return sum(term.size for term in self.state)

    @property
    def state_scale(self) -> NDArray[np.float32]:
        """Number in ``obs["state"]`` per physical one, [S]."""
        return np.array([term.scale for term in self.state for _ in range(term.size)], np.float32)

    @property
    def privileged_dim(self) -> int:
        """Size P of ``obs["privileged"]``."""
        return sum(term.size for term in self.privileged)

    @property
    def action_dim(self) -> int:
        return self.action.size

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.action.names if isinstance(self.action, Box) else self.action.entry_names

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(name for term in self.state for name in term.entry_names)

    @property
    def has_success(self) -> bool:
        """Whether ``success`` is an outcome, so that episodes have a success rate."""
        return SUCCESS in self.outcomes

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape for one env and type of each observation by key, without ``instruction``."""
        found: dict[str, tuple[tuple[int, ...], str]] = {"state": ((self.state_dim,), "float32")}
        if self.privileged:
            found["privileged"] = (self.privileged_dim,), "float32"
        for camera in self.cameras:
            found[f"images.{camera.name}"] = (camera.height, camera.width, 3), "uint8"
        if self.action_mask and not isinstance(self.action, Box):
            found["action_mask"] = (sum(self.action.counts),), "bool"
        return found

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(instruction.text for instruction in self.instructions)

    @property
    def goals(self) -> tuple[str, ...]:
        return tuple(instruction.goal for instruction in self.instructions)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(instruction.split for instruction in self.instructions)

    @classmethod
    def of_sizes(
        cls,
        task: str,
        *,
        state: int,
        action: int,
        privileged: int = 0,
        control_dt_s: float = 0.05,
        max_episode_steps: int = 50,
        **fields: Any,
    ) -> EnvSpec:
        """Build a spec from sizes alone, without names and units of the entries. fields: others of the spec."""
        return cls(
            task=task,
            state=(Term("state", state),),
            action=Box(tuple(ActionTerm(f"action[{i}]") for i in range(action))),
            control_dt_s=control_dt_s,
            max_episode_steps=max_episode_steps,
            privileged=(Term("privileged", privileged),) if privileged else (),
            **fields,
        )
