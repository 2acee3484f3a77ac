"""The protocol of robots: an arm with a parallel gripper at the edge of a table.

    Robot: description without a simulation ── attach(batch) ──► Arm: the robot in every simulation of a batch

The MJCF of a robot has its base at the origin and the table's surface at z = 0. It has an implicit integrator and the
engine's autoreset disabled. Geoms of the robot have contype 1 and conaffinity 2. These names are fixed:

    site tcp                        tool centre point, between the fingers
    bodies left_finger, right_finger   that touch a held object; a robot may name others (``fingers``)
    camera wrist                    needed only if policies use that view
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

import embodied
from embodied.core.spec import ArmSpec, Box, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import Scale
from embodied.envs.mujoco.robots.parts import Parts

ASSETS = Path(embodied.__file__).parent / "assets"


class Simulations(Protocol):
    """N simulations of one model: ``mujoco.batch.Batch`` on the CPU, or ``WarpBatch`` on any device."""

    model: Any

    def bind(self, name: str) -> Any:
        """Return the live array of a field of ``mujoco.MjData``, [N, ...]: of NumPy or of torch."""

    def expand(self, name: str) -> Any:
        """Return the live array of a field of the model, [N, ...]; from now on each simulation has its own values.

        UserError if simulations cannot have values of their own.
        """


def live(array: np.ndarray | Tensor) -> Tensor:
    """Return a tensor over a live array. Tasks must not write to output arrays (torch cannot enforce that)."""
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class Measurement(NamedTuple):
    """Readings of the encoders of N robots, and the pose computed from them, float64; N is the last axis."""

    joint_pos_JN: Tensor
    joint_vel_JN: Tensor
    finger_1N: Tensor
    """Distance of the fingers from the point where they meet, m; the gripper reports one number."""
    tool_3N: Tensor
    """Tool centre point, base frame, m."""
    rotation_33N: Tensor
    jacobian_6JN: Tensor
    """Jacobian of the tool, translation above rotation."""


class ArmState(Protocol):
    """State of a robot in N simulations: views of live arrays, in metres, radians, seconds.

    It can be driven by measurements that differ from the true state, through gears with backlash.
    """

    joint_pos: Tensor
    """Joint positions, [N, J]."""
    joint_vel: Tensor
    """Joint velocities, [N, J]."""
    tcp_pos: Tensor
    """Tool centre point, base frame, [N, 3]."""
    tcp_mat: Tensor
    """Rotation matrix of the tool by rows, [N, 9]."""
    tcp_vel: Tensor
    """Velocity of the tool centre point, [N, 3]."""
    finger_qpos: Tensor
    """Distance of each finger from the point where the fingers meet, [N, G]."""
    finger_qvel: Tensor
    """Velocity of each finger, [N, G]."""
    finger_targets: Tensor
    """Position that each finger is commanded to, [N, G]."""
    scale: Scale
    """Lengths of tasks."""
    prefix: str
    arms: "Sequence[ArmState]"
    """With what the names of one of two robots begin; the arms of both, as one (pair.py). Empty for others."""
    gripper_pos: Tensor
    """Mean position of the fingers, the one number that a gripper reports, [N, 1]."""
    lead: float
    """How many times as far ahead of the tool experts aim when they push."""
    side_rad: float
    """Yaw from the side of the gripper that experts push with, where it is thin, to the tool's x axis."""
    encoder_offset_NJ: Tensor | None
    """Reading of each encoder minus the true position, float64; None: encoders are exact."""
    backlash_NJ: Tensor | None
    """Play between motor and joint, float64; None: there is none."""
    wanted_NJ: Tensor | None
    """Last joint targets before the backlash, float64; None: those in ``ctrl``."""
    from_target: bool
    """Whether actions add to the last targets."""

    def measurement(self, qpos_NJ: Tensor, qvel_NJ: Tensor, finger_N1: Tensor) -> Measurement:
        """Compute the measured pose from readings of the encoders."""

    def observe(self, measured: Measurement | None = None) -> Mapping[str, Tensor]:
        """Return the quantities of ``Robot.terms`` by name, [N, size], as measured (None: the true ones)."""

    def hold(self, ids: Tensor, half_width_n: Tensor) -> Tensor:
        """Close the fingers of envs ``ids`` [n] on objects this wide, without force.

        Return where the objects' centres are between them, [n, 3], in the tool's frame, m.
        """

    def squeezing(self) -> Tensor:
        """Return whether the fingers are commanded to squeeze and do not move, bool [N]."""

    def tip(self) -> Tensor:
        """Return the point where closed fingers meet, base frame, [N, 3]."""

    def above(self, width_m: float | Tensor) -> Tensor:
        """Return the point over the centre of an object this wide from which open fingers go down clear of it, [N, 3].

        It is the tool, or further from a finger that does not move.
        """

    def opening(self) -> Tensor:
        """Return how far the fingers are commanded to open, 0 (closed) to 1 (open), [N]."""

    def move_tool(self, displacement_N3: Tensor, turn_N: Tensor, gripper_N: Tensor, limit_N1: Tensor) -> Tensor:
        """Return the action [N, A] that moves the tool by a displacement (m), at most ``limit`` of an action's range.

        turn: yaw (rad), for robots with ``rotation``. gripper: 1 open, -1 closed.
        """


class Arm(ArmState, Protocol):
    """A robot in the N simulations of a ``mujoco.batch.Batch``; its tensors are float64, on the CPU."""

    ctrl: np.ndarray
    """Position targets of all actuators, [N, nu], live."""
    parts: Parts
    """Where the robot's joints and actuators are in the model."""

    def reset(self, ids: np.ndarray, qpos_nJ: np.ndarray) -> None:
        """Put the arm of envs ``ids`` [n] at joint positions [n, J] with the gripper open, and hold it there."""

    def apply(self, action_NA: np.ndarray, ids: np.ndarray | None, measured: Measurement | None = None) -> None:
        """Command actions [N, A] in [-1, 1] of envs ``ids`` (None: all), relative to the measured (None: true) pose."""


class TensorArm(ArmState, Protocol):
    """A robot in the N simulations of a ``WarpBatch``: everything stays on its device. See ``Arm``."""

    def reset(self, ids: Tensor, qpos_nJ: Tensor) -> None: ...

    def apply(self, action_NA: Tensor, measured: Measurement | None = None) -> None: ...


class Robot(Protocol):
    """A robot before it is simulated: a class that is registered with, and built from, a dataclass of control options.

    An action is in [-1, 1]^A; its last entry opens (1) and closes (-1) the gripper.
    """

    name: str
    """Manufacturer and model, as data sets name robots."""
    visual: Path | None
    """MJCF with the geoms of robot, table and floor that videos show; None: videos show the geoms of ``mjcf``."""
    impratio: float | None
    """MuJoCo's option of this name in tasks with an object to hold; None: as in the robot's MJCF."""
    fingers: tuple[str, ...]
    """The two bodies that touch a held object; of a pair (robots/pair.py) those of both robots, left first."""
    action: Box
    terms: tuple[Term, ...]
    """Quantities that the robot measures; the first entries of ``obs["state"]``."""
    arm: ArmSpec | None
    """The arm as a robot's computer needs it; None: policies cannot be exported to the robot."""
    workspace_m: tuple[tuple[float, float, float], tuple[float, float, float]]
    """Opposite corners of the box that the tool centre point stays in."""
    scale: Scale
    """Lengths of the robot's tasks."""

    @property
    def coarse(self) -> mujoco.MjModel:
        """The few geoms that policies' cameras show of robot, table and floor (groups: assets/franka/coarse.xml)."""

    def spec(self) -> mujoco.MjSpec:
        """Return the robot without table and objects."""

    @property
    def home_tool_m(self) -> np.ndarray:
        """Where the tool centre point is at home, m [3]; of a pair the left one."""

    def reach_for(self, points_n3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return joint positions [n, J] for the tool at points (m), and by how far they miss them, m [n]."""

    @property
    def gap_m(self) -> tuple[float, float]:
        """How far the fingers are apart when closed, below 0 if they squeeze nothing, and when open."""

    def start_qpos(self, rng: EpisodeRng, held_n: np.ndarray) -> np.ndarray:
        """Draw joint positions [n, J] at the start of an episode: about home, and farther if ``held`` (bool [n])."""

    def attach(self, batch: Batch) -> Arm:
        """Return the robot in the simulations of a batch whose model contains the robot."""

    def attach_tensors(self, batch: Simulations) -> TensorArm:
        """Return the robot in simulations whose live arrays are tensors. ``sim=warp`` refuses a robot without it."""
