"""Episodes of joint positions, as a person records them by teleoperation with LeRobot, for a task on our simulators.

    positions, targets ── names, units ──► rad, m ── resampled ──► state of the task
                                                              └──► action that asks for the recorded joint targets

A state is what the robot's computer would give to a policy (``StateBuilder``). Joint targets are those of the arm's own
law, so what one action cannot reach is left to the next one, as in an episode of the simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.arm import Array
from embodied.core.errors import UserError
from embodied.core.spec import SUCCESS, ArmSpec, Box, EnvSpec
from embodied.data import Episode, read
from embodied.data.lerobot import read_features
from embodied.data.lerobot_meta import read_info
from embodied.deployment.control.arm import ArmController, StateBuilder
from embodied.deployment.robots.base import GRIPPER, joint_names
from embodied.deployment.robots.mapping import Entry, RobotMapping, Unit, gripper_entry, names_of_joints

BEYOND = 0.2  # rad or m; joints that are further beyond their limits are in another unit
SOLVED = f"next.{SUCCESS}"


class Error(NamedTuple):
    """How far the joint targets of the actions are from the recorded ones."""

    mean_mm: float
    largest_mm: float
    """Distance of the tools that they ask for."""


@dataclass(frozen=True)
class Recording:
    """One episode in our units, resampled to the control steps of a task, L of them."""

    qpos_LJ: Array
    qvel_LJ: Array
    finger_L: Array
    target_LJ: Array
    finger_target_L: Array
    """Positions and velocities of the joints, position of the gripper, and the targets at the end of each step."""
    external: Mapping[str, Array]
    """Further numbers of the state by name, [L] each."""


def draft_mapping(arm: ArmSpec, names: Sequence[str], unit: Unit) -> RobotMapping:
    """Return what the entries of an action are: the joints in ``unit``, the gripper from 0 to 100, as LeRobot has them.

    unit: of all joints; percent is from -100 to 100 over the range of a joint. UserError for too few names.
    """
    grippers = [name for name in names if "gripper" in name or "finger" in name]
    positions = [name for name in names if name not in grippers]
    if len(positions) < len(arm.joints) or not grippers:
        known = ", ".join(names) or "no names"
        needed = f"{len(arm.joints)} joints and a gripper"
        raise UserError(f"its action has {known}; needed: {needed}. mapping=<file> says which entry is which")
    joints = {}
    for joint, name in zip(arm.joints, names_of_joints(arm, positions), strict=True):
        middle, high = ((joint.low + joint.high) / 2, joint.high) if unit == "percent" else (None, None)
        joints[joint.name] = Entry(name, unit, low=middle, high=high)
    return RobotMapping("", joints, gripper_entry(arm, grippers[0]))


def joint_episodes(
    path: Path, spec: EnvSpec, mapping: RobotMapping | None, unit: Unit, instruction: str | None = None
) -> tuple[list[Episode], Error]:
    """Convert a LeRobotDataset of joint positions to episodes of a task, and say how exact its actions are.

    mapping: names, units and signs of the data set; None: ``draft_mapping`` with ``unit``. instruction: of all
    episodes; None: those of the data set. An episode has the success that the data set states, or counts as solved.
    UserError for a task without an arm, for a data set without joint positions, in another unit, or without terms that
    the task's state has.
    """
    arm, space = spec.arm, spec.action
    if arm is None or not isinstance(space, Box):
        raise UserError(f"task {spec.task} has no arm whose joints are known; allowed: tasks of ours")
    size = spec.cameras[0].height if spec.cameras else None
    data = read(path, cameras=[camera.name for camera in spec.cameras], image_size=size)
    builder = StateBuilder(arm, spec.state, spec.cameras)
    try:
        chosen = draft_mapping(arm, data.action_names, unit) if mapping is None else mapping
        chosen.check(arm)
        positions = _in_our_units(data.state_FS, data.state_names, chosen, arm, "observation.state")
        targets = _in_our_units(data.action_FA, data.action_names, chosen, arm, "action")
        external = _external(path, builder.external_names)
    except UserError as error:
        raise UserError(f"data set {path}: {error}") from error
    solved = read_features(path, [SOLVED]).get(SOLVED)
    converter, episodes = _Converter(spec, arm, space, builder), []
    for number in data.episode_F.unique().tolist():
        rows = data.frames([number])
        at_L, frame_L = times(len(rows), data.control_hz, spec.control_dt_s)
        recording = resampled(
            positions[rows], targets[rows], {name: value[rows] for name, value in external.items()},
            data.control_hz, at_L, spec.control_dt_s,
        )  # fmt: skip
        success = torch.zeros(len(at_L), dtype=torch.bool)
        success[-1] = True if solved is None else bool(solved[rows[-1]].any())
        state, action = converter.episode(recording)
        images = {name: frames[rows[torch.from_numpy(frame_L)]] for name, frames in data.images.items()}
        text = instruction or data.instructions[int(data.instruction_F[rows[0]])]
        episodes.append(Episode(state, action, torch.zeros(len(at_L)), success, text, images))
    return episodes, converter.error


def times(frames: int, hz: float, dt_s: float) -> tuple[Array, NDArray[np.int64]]:
    """Return the times of an episode's control steps, s, [L], and for each the newest frame at that time."""
    at_L = np.arange(int((frames - 1) / hz / dt_s + 1e-6) + 1, dtype=np.float64) * dt_s
    return at_L, (at_L * hz + 1e-6).astype(np.int64)


def resampled(
    positions_FP: Array, targets_FP: Array, external: Mapping[str, Array], hz: float, at_L: Array, dt_s: float
) -> Recording:
    """Return an episode of F frames at the times ``at`` of control steps; the last column is the gripper's.

    Between two frames numbers are interpolated. A step has the target of the last frame that begins within it.
    """
    frames_F = np.arange(len(positions_FP)) / hz

    def between(values_FD: Array, when_L: Array) -> Array:
        return np.stack([np.interp(when_L, frames_F, column) for column in values_FD.T], 1)

    slopes_FP = np.gradient(positions_FP, 1 / hz, axis=0) if len(positions_FP) > 1 else np.zeros_like(positions_FP)
    position_LP, target_LP = between(positions_FP, at_L), between(targets_FP, at_L + max(dt_s - 1 / hz, 0.0))
    others = {name: np.interp(at_L, frames_F, value) for name, value in external.items()}
    return Recording(
        position_LP[:, :-1], between(slopes_FP, at_L)[:, :-1], position_LP[:, -1], target_LP[:, :-1],
        target_LP[:, -1], others,
    )  # fmt: skip


class _Converter:
    """States and actions of a task for recordings."""

    def __init__(self, spec: EnvSpec, arm: ArmSpec, space: Box, builder: StateBuilder) -> None:
        self.spec, self.arm, self.space, self.builder = spec, arm, space, builder
        self.controller = ArmController(arm, space.terms)
        self.names = [*joint_names(arm), *joint_names(arm, "vel"), GRIPPER]
        self._missed_mm: list[float] = []

    @property
    def error(self) -> Error:
        return Error(float(np.mean(self._missed_mm)), float(np.max(self._missed_mm)))

    def episode(self, recording: Recording) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states [L, S] and actions [L, A] of an episode."""
        states, actions, chain = [], [], self.builder.chain
        joint_target, finger_target = recording.qpos_LJ[0], float(recording.finger_L[0])
        for t, qpos in enumerate(recording.qpos_LJ):
            numbers = dict(zip(self.names, (*qpos, *recording.qvel_LJ[t], recording.finger_L[t]), strict=True))
            numbers |= {name: value[t] for name, value in recording.external.items()}
            states.append(self.builder.state(numbers, finger_target, joint_target))
            base, wanted = joint_target if self.arm.from_target else qpos, recording.target_LJ[t]
            action = np.append(self._move(wanted, base), recording.finger_target_L[t])
            actions.append(((action - self.space.offset) / self.space.scale).clip(-1, 1))
            executed = self.space.offset + self.space.scale * actions[-1]
            joint_target, finger_target = self.controller.targets(executed, base, finger_target)
            missed_m = np.linalg.norm(chain.tool(joint_target)[0] - chain.tool(wanted)[0])
            self._missed_mm.append(1e3 * float(missed_m))
        scale_S = self.spec.state_scale
        return torch.from_numpy(np.stack(states) * scale_S), torch.from_numpy(np.stack(actions)).float()

    def _move(self, wanted_J: Array, base_J: Array) -> Array:
        """Return the action (rad, m), without the gripper, that moves the arm from one pose to another."""
        if self.arm.control == "joint_delta":
            return wanted_J - base_J
        (to, to_33, _), (at, at_33, _) = self.builder.chain.tool(wanted_J), self.builder.chain.tool(base_J)
        if not self.arm.rotation:
            return to - at
        turn = to_33 @ at_33.T  # its antisymmetric part is the axis times the sine of the angle
        axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]) / 2
        return np.append(to - at, -at_33[:, 2] @ axis)  # about the tool's axis, which points down


def _in_our_units(
    values_FD: torch.Tensor, names: Sequence[str], mapping: RobotMapping, arm: ArmSpec, column: str
) -> Array:
    """Return the joints and the gripper of a column, rad or m, [F, J + 1]. UserError for a missing or odd one."""
    if missing := [entry.name for entry in mapping.entries.values() if entry.name not in names]:
        has = f"{column} lacks {', '.join(missing)}. It has {', '.join(names) or 'no names'}"
        raise UserError(f"{has}. mapping=<file> says which entry is which")
    entries = [mapping.joints[joint.name] for joint in arm.joints] + [mapping.gripper]
    values = values_FD.double().numpy()
    found = np.stack([entry.factor * values[:, names.index(entry.name)] + entry.zero for entry in entries], 1)
    for i, joint in enumerate(arm.joints):
        low, high = found[:, i].min(), found[:, i].max()
        if low < joint.low - BEYOND or high > joint.high + BEYOND:
            theirs = values[:, names.index(entries[i].name)]
            as_read = f"{entries[i].name} from {theirs.min():.4g} to {theirs.max():.4g} {entries[i].unit}"
            limits = f"joint {joint.name} of the task's arm has {joint.low:.3g} to {joint.high:.3g}"
            cure = "unit=deg, rad or percent says what joints are in, mapping=<file> also signs and zeros"
            raise UserError(f"{column}: {as_read} is {low:.3g} to {high:.3g}, but {limits}: {cure}")
    return found


def _external(path: Path, needed: Sequence[str]) -> dict[str, Array]:
    """Return the numbers of a state that are not the robot's own, from columns that name them, [F] each."""
    places = {
        name: (key, i)
        for key, feature in read_info(path)["features"].items()
        for i, name in enumerate(feature.get("names") or () if isinstance(feature.get("names"), list) else ())
        if name in needed
    }
    if lacking := [name for name in needed if name not in places]:
        cure = "with cameras=[front] a policy observes images in their place"
        raise UserError(f"no column has {', '.join(lacking)}, which the task's state has: {cure}")
    columns = read_features(path, sorted({key for key, _ in places.values()}))
    return {name: columns[key][:, i].double().numpy() for name, (key, i) in places.items()}
