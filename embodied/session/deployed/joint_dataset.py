"""Episodes of joint positions, as a person records them by teleoperation with LeRobot, for a task on our simulators.

    positions, targets ── names, units ──► rad, m ── resampled ──► state of the task
                                                              └──► action that asks for the recorded joint targets

A state is what the robot's computer would give to a policy (``StateBuilder``). Joint targets are those of the arm's own
law, so what one action cannot reach is left to the next one, as in an episode of the simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.arm import Array, Chain
from embodied.core.errors import UserError
from embodied.core.spec import SUCCESS, Arms, ArmSpec, Box, EnvSpec, joints_of
from embodied.data import Episode, read
from embodied.data.columns import IMAGES
from embodied.data.lerobot import names_of, read_features
from embodied.data.lerobot_meta import read_info
from embodied.deployment.control.arm import Controller, StateBuilder
from embodied.deployment.robots.base import gripper_names, joint_names
from embodied.deployment.robots.mapping import Entry, RobotMapping, Unit, gripper_entry
from embodied.session.deployed.joint_doubts import reach, tracking

BEYOND = 0.2  # rad or m; joints that are further beyond their limits are in another unit
STROKE = 0.2  # how far a gripper may be beyond its ends, as a share of what lies between them
SOLVED = f"next.{SUCCESS}"


@dataclass(frozen=True)
class Recording:
    """One episode in our units, resampled to the L control steps of a task."""

    qpos_LJ: Array
    qvel_LJ: Array
    fingers_LG: Array
    target_LJ: Array
    finger_targets_LG: Array
    """Positions and velocities of the joints of all arms, positions of their G grippers, and the targets at the end of
    each step."""
    external: Mapping[str, Array]
    """Further numbers of the state by name, [L] each."""


def draft_mapping(arms: Arms, names: Sequence[str], unit: Unit) -> RobotMapping:
    """Return what the entries of an action are: the joints in ``unit``, grippers from 0 to 100, as LeRobot has them.

    A joint has the name that ends with ours, such as ``main_elbow_flex.pos`` for ``elbow_flex``. If none has one, the
    joints of a single arm are taken in their order. unit: of all joints that turn; sliding ones are in m. percent is
    from -100 to 100 over the range of a joint. UserError unless every joint and gripper have one name.
    """
    joints, own = joints_of(arms), gripper_names(arms)
    grippers = [name for name in names if "gripper" in name or "finger" in name]
    positions = [name for name in names if name not in grippers]
    alike = [[name for name in positions if name.endswith(joint)] for joint in joint_names(arms)]
    found = [name for names_of_joint in alike for name in names_of_joint] or (positions if len(arms) == 1 else [])
    matched = [len(names_of_joint) for names_of_joint in alike]
    if len(own) > 1:  # in any order
        grippers = [name for gripper in own for name in grippers if name.endswith(gripper)]
    if len(found) != len(joints) or len({*matched}) != 1 or len(grippers) != len(own):
        needed = f"needed: {', '.join(joint_names(arms))} and {' and '.join(own) if own[1:] else 'one gripper'}"
        raise UserError(f"its action has {', '.join(names)}; {needed}. mapping=<file> says which entry is which")
    entries = {}
    for (joint, spec), name in zip(joints.items(), found, strict=True):
        middle, high = ((spec.low + spec.high) / 2, spec.high) if unit == "percent" else (None, None)
        own_unit = "m" if spec.kind == "slide" and unit != "percent" else unit
        entries[joint] = Entry(name, own_unit, low=middle, high=high)
    each = [gripper_entry(arm, name) for arm, name in zip(arms.values(), grippers, strict=True)]
    return RobotMapping("", entries, each[0], right_gripper=each[1] if each[1:] else None)


def joint_episodes(
    path: Path, spec: EnvSpec, mapping: RobotMapping | Unit, instruction: str | None = None
) -> tuple[list[Episode], RobotMapping, list[str]]:
    """Convert a LeRobotDataset of joint positions to episodes of a task.

    Return also the mapping, and lines that say how exact the actions are, and what is doubtful.

    mapping: names, units and signs of the data set; of a unit, ``draft_mapping``. instruction: of all episodes; None:
    those of the data set. An episode has the success that the data set states, or counts as solved.
    UserError for a task without an arm, for a data set without joint positions, in another unit, or without terms that
    the task's state has.
    """
    arms, space = spec.arms, spec.action
    if not arms or not isinstance(space, Box):
        raise UserError(f"task {spec.task} has no arm whose joints are known")
    given = None if isinstance(mapping, str) else mapping
    cameras = {} if given is None else given.cameras
    images = {camera.name: f"{IMAGES}.{cameras.get(camera.name, camera.name)}" for camera in spec.cameras}
    data = read(path, {"images": images}, [*images], spec.cameras[0].height if spec.cameras else None)
    state_names, action_names = (
        names or [str(i) for i in range(values.shape[1])]
        for names, values in ((data.state_names, data.state_FS), (data.action_names, data.action_FA))
    )
    builder = StateBuilder(spec)
    try:
        chosen = draft_mapping(arms, action_names, mapping) if isinstance(mapping, str) else mapping
        chosen.check(arms)
        positions_FP = _in_our_units(data.state_FS, state_names, chosen, arms, "observation.state")
        targets_FP = _in_our_units(data.action_FA, action_names, chosen, arms, "action")
        external = _external(path, {name: chosen.external.get(name, name) for name in builder.external_names})
    except UserError as error:
        raise UserError(f"data set {path}: {str(error).removeprefix(f'data set {path}: ')}") from error
    solved = read_features(path, [SOLVED]).get(SOLVED)
    episodes, missed = [], []
    for number in data.episode_F.unique().tolist():
        rows = data.frames([number]).numpy()
        at_L, frame_L = times(len(rows), data.control_hz, spec.control_dt_s)
        others = {name: value[rows] for name, value in external.items()}
        columns = positions_FP[rows], targets_FP[rows]
        recording = resampled(*columns, len(arms), others, data.control_hz, at_L, spec.control_dt_s)
        state, action, missed_L3 = imitable(recording, spec, space, builder)
        success = torch.zeros(len(at_L), dtype=torch.bool)
        success[-1] = True if solved is None else bool(solved[rows[-1]].any())
        seen = {name: frames[torch.from_numpy(rows[frame_L])] for name, frames in data.images.items()}
        text = instruction or data.instructions[int(data.instruction_F[rows[0]])]
        episodes.append(Episode(state, action, torch.zeros(len(at_L)), success, text, seen))
        missed.append(missed_L3)
    lines = []
    if [entry.name for entry in chosen.joints.values()] != joint_names(arms):
        which = ", ".join(f"{joint} {entry.name}" for joint, entry in chosen.joints.items())
        lines.append(f"joints of the arm and of the data set: {which}")
    each = [entry for entry in (chosen.gripper, chosen.right_gripper) if entry is not None]
    ends = [sorted(grip.to_robot(space.offset[-1] + sign * space.scale[-1]) for sign in (-1, 1)) for grip in each]
    lines += tracking(episodes, missed, spec, ends)
    for side, arm in arms.items():
        lines += reach(episodes, spec, side, arm)
    if solved is None:
        lines.append(f"the data set does not say which episodes were solved: all {len(episodes)} count as solved")
    if data.control_hz * spec.control_dt_s < 1 - 1e-3:
        rates = f"recorded at {data.control_hz:g} Hz, and the task runs at {1 / spec.control_dt_s:g}"
        lines.append(f"{rates}: positions between frames are interpolated, images repeated")
    return episodes, chosen, lines


def times(frames: int, hz: float, dt_s: float) -> tuple[Array, NDArray[np.int64]]:
    """Return the times of an episode's control steps, s, [L], and for each the newest frame at that time."""
    at_L = np.arange(int((frames - 1) / hz / dt_s + 1e-6) + 1, dtype=np.float64) * dt_s
    return at_L, (at_L * hz + 1e-6).astype(np.int64)


def resampled(
    positions_FP: Array, targets_FP: Array, grippers: int, external: Mapping[str, Array], hz: float, at_L: Array,
    dt_s: float,
) -> Recording:  # fmt: skip
    """Return an episode of F frames at the times ``at`` of control steps; the last columns are of the grippers.

    Numbers are interpolated between frames. A frame's target is to be reached by the next frame, so that of a control
    step is the one for its end.
    """
    frames_F = np.arange(len(positions_FP)) / hz

    def between(values_FD: Array, when_L: Array) -> Array:
        return np.stack([np.interp(when_L, frames_F, column) for column in values_FD.T], 1)

    slopes_FP = np.gradient(positions_FP, 1 / hz, axis=0) if len(positions_FP) > 1 else np.zeros_like(positions_FP)
    position_LP, target_LP = between(positions_FP, at_L), between(targets_FP, at_L + dt_s - 1 / hz)
    others = {name: np.interp(at_L, frames_F, value) for name, value in external.items()}
    (qpos_LJ, fingers_LG), (target_LJ, finger_targets_LG) = (
        np.split(values_LP, [-grippers], axis=1) for values_LP in (position_LP, target_LP)
    )
    return Recording(qpos_LJ, between(slopes_FP, at_L)[:, :-grippers], fingers_LG, target_LJ, finger_targets_LG, others)


def imitable(
    recording: Recording, spec: EnvSpec, space: Box, builder: StateBuilder
) -> tuple[torch.Tensor, torch.Tensor, Array]:
    """Return states [L, S] and actions [L, A] of an episode, and what its actions miss, [L, 3].

    That is, at the joint targets of each action, the distance of the tool from the recorded one, mm, the angle between
    them, degrees, and whether the gripper is beyond what actions can ask for; of two arms the largest.
    """
    arms, chains = builder.arms, [*builder.chains.values()]
    controller, from_target = Controller(arms, space.terms), any(arm.from_target for arm in arms.values())
    names = [*joint_names(arms), *joint_names(arms, "vel"), *gripper_names(arms)]
    states, actions, missed = [], [], []
    joint_target, finger_target = recording.qpos_LJ[0], recording.fingers_LG[0]
    for t, qpos in enumerate(recording.qpos_LJ):
        numbers = dict(zip(names, (*qpos, *recording.qvel_LJ[t], *recording.fingers_LG[t]), strict=True))
        numbers |= {name: value[t] for name, value in recording.external.items()}
        states.append(builder.state(numbers, finger_target, joint_target))
        base, wanted = joint_target if from_target else qpos, recording.target_LJ[t]
        ways = zip(np.split(wanted, len(arms)), np.split(base, len(arms)), arms.values(), chains, strict=True)
        moves = [_move(*way) for way in ways]
        action = np.concatenate([np.append(*own) for own in zip(moves, recording.finger_targets_LG[t], strict=True)])
        share = (action - space.offset) / space.scale
        actions.append(share.clip(-1, 1))
        executed = space.offset + space.scale * actions[-1]
        joint_target, finger_target = controller.targets(executed, base, finger_target)
        reached = zip(chains, *(np.split(values, len(arms)) for values in (joint_target, wanted)), strict=True)
        beyond = np.abs(share.reshape(len(arms), -1)[:, -1]).max() > 1.05
        missed.append((*np.max([_apart(*one) for one in reached], 0), beyond))
    state_LS = torch.from_numpy(np.stack(states) * spec.state_scale)
    return state_LS, torch.from_numpy(np.stack(actions)).float(), np.array(missed, np.float64)


def _apart(chain: Chain, qpos_J: Array, wanted_J: Array) -> tuple[float, float]:
    """Return the distance of the tools at two poses, mm, and the angle between them, degrees."""
    (at, at_33, _), (to, to_33, _) = chain.tool(qpos_J), chain.tool(wanted_J)
    cosine = (np.trace(to_33 @ at_33.T) - 1) / 2
    return 1e3 * float(np.linalg.norm(to - at)), float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def _move(wanted_J: Array, base_J: Array, arm: ArmSpec, chain: Chain) -> Array:
    """Return the action (rad, m), without the gripper, that moves the arm from one pose to another."""
    if arm.control == "joint_delta":
        return wanted_J - base_J
    (to, to_33, _), (at, at_33, _) = chain.tool(wanted_J), chain.tool(base_J)
    if not arm.rotation:
        return np.asarray(to - at)
    turn = to_33 @ at_33.T  # its antisymmetric part is the axis times the sine of the angle
    axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]) / 2
    return np.append(to - at, -at_33[:, 2] @ axis)  # about the tool's axis, which points down


def _in_our_units(
    values_FD: torch.Tensor, names: Sequence[str], mapping: RobotMapping, arms: Arms, column: str
) -> Array:
    """Return the joints and the grippers of a column, rad or m, [F, J + G]. UserError for a missing or odd one."""
    if missing := [entry.name for entry in mapping.entries.values() if entry.name not in names]:
        has = f"{column} lacks {', '.join(missing)}. It has {', '.join(names)}"
        raise UserError(f"{has}. mapping=<file> says which entry is which")
    joints = joints_of(arms)
    grippers = [entry for entry in (mapping.gripper, mapping.right_gripper) if entry is not None]
    entries = [*(mapping.joints[name] for name in joints), *grippers]
    ends = [(joint.low - BEYOND, joint.high + BEYOND) for joint in joints.values()]
    for entry, arm in zip(grippers, arms.values(), strict=True):
        closed, open = entry.zero, arm.gripper.max_position_m
        slack = STROKE * (open - closed)
        ends.append((min(closed, arm.gripper.closed_m) - slack, open + slack))
    columns = []
    for entry, (low, high) in zip(entries, ends, strict=True):
        theirs_F = values_FD[:, names.index(entry.name)].double().numpy()
        ours_F = entry.factor * theirs_F + entry.zero
        read_as = f"{column}: {entry.name} from {theirs_F.min():.4g} to {theirs_F.max():.4g} {entry.unit}"
        cure = "unit=deg, rad or percent says what joints are in; mapping=<file> also signs, zeros and the gripper"
        if ours_F.min() < low or ours_F.max() > high:
            limits = f"is {ours_F.min():.3g} to {ours_F.max():.3g}, and the task's arm has {low:.3g} to {high:.3g}"
            raise UserError(f"{read_as} {limits}: {cure}")
        if entry.unit == "percent" and 0.3 < np.ptp(theirs_F) and 0 <= theirs_F.min() and theirs_F.max() <= 1:
            raise UserError(f"{read_as}: does it run from 0 to 1? {cure}")
        columns.append(ours_F)
    ours_FP = np.stack(columns, 1)
    for side in arms:
        turning = [i for i, name in enumerate(joints) if entries[i].unit == "deg" and name.startswith(side)]
        if turning and np.abs(ours_FP[:, turning]).max() < np.radians(2 * np.pi):
            which = f"all {side.replace('_', ' ')}joints read as degrees"
            raise UserError(f"{column}: {which} are within 6.28 degrees: give unit=rad")
    return ours_FP


def _external(path: Path, wanted: Mapping[str, str]) -> dict[str, Array]:
    """Return the numbers of a state that are not the robot's own, [F] each.

    wanted: their names in the data set, by those of the state. UserError unless one column has each.
    """
    features = read_info(path)["features"]
    places = {
        ours: [(key, names_of(feature).index(name)) for key, feature in features.items() if name in names_of(feature)]
        for ours, name in wanted.items()
    }
    if lacking := [wanted[ours] for ours, found in places.items() if not found]:
        cure = "with cameras=[front] a policy observes images in their place"
        raise UserError(f"no column has {', '.join(lacking)}, which the task's state has: {cure}")
    if several := [f"{wanted[ours]} ({', '.join(k for k, _ in found)})" for ours, found in places.items() if found[1:]]:
        raise UserError(f"several columns have {'; '.join(several)}: leave out all but one")
    columns = read_features(path, sorted({found[0][0] for found in places.values()}))
    numbers = {ours: columns[key][:, i].double().numpy() for ours, ((key, i),) in places.items()}
    if broken := [wanted[ours] for ours, values in numbers.items() if not np.isfinite(values).all()]:
        raise UserError(f"{', '.join(broken)}: not finite in all frames")
    return numbers
