"""Two robots of a kind, side by side at one table.

    "left" at y = +apart / 2        both look along x        "right" at y = -apart / 2

Names of the left one begin with ``left/`` in the model and with ``left_`` in observations and actions. What a robot has
one of, a pair has two of, joined along the last axis, left first. Each robot keeps its control law and its inverse
kinematics, in the frame of the table, whose origin is between the bases. The robots touch each other.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.spec import ArmSpec, Box
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import SIDES
from embodied.envs.mujoco.robots.base import Measurement, Robot, Simulations
from embodied.envs.mujoco.robots.gripper_arm import GripperArm

BITS = (5, 2), (1, 6)  # contype and conaffinity of the left and the right robot: bit 4 is their contact


class Pair:
    """Two robots as one; see ``embodied.envs.mujoco.robots.base.Robot``. UserError for robots that are not described.

    apart_m: distance between the bases.
    """

    arm: ArmSpec | None = None  # a robot's computer controls one arm
    workspace_m: tuple[tuple[float, float, float], tuple[float, float, float]]

    def __init__(self, robot: Robot, apart_m: float) -> None:
        if not isinstance(robot, GripperArm):
            raise UserError(f"robots: {robot.name} is no GripperArm, which two at one table have to be")
        self.name, self.visual, self.coarse = f"bi_{robot.name}", robot.visual, robot.coarse
        self.scale, self.gap_m = robot.scale, robot.gap_m
        left, right = (
            placed(robot, f"{side}/", y_m) for side, y_m in zip(SIDES, (apart_m / 2, -apart_m / 2), strict=True)
        )
        self.robots: tuple[GripperArm, GripperArm] = left, right
        self.workspace_m = right.workspace_m[0], left.workspace_m[1]
        self.fingers = tuple(each.prefix + finger for each in self.robots for finger in each.fingers)
        each = tuple(zip(SIDES, self.robots, strict=True))
        self.terms = tuple(replace(term, name=f"{side}_{term.name}") for side, one in each for term in one.terms)
        moves = (replace(term, name=f"{side}_{term.name}") for side, one in each for term in one.action.terms)
        self.action = Box(tuple(moves))

    def spec(self) -> mujoco.MjSpec:
        spec = mujoco.MjSpec()
        for robot, bits in zip(self.robots, BITS, strict=True):
            one = robot.spec()
            for geom in one.geoms:
                if geom.contype or geom.conaffinity:
                    geom.contype, geom.conaffinity = bits
            for option in (name for name in dir(one.option) if not name.startswith("_")):
                setattr(spec.option, option, getattr(one.option, option))
            spec.memory, one.memory = max(2 * one.memory, -1), -1
            spec.attach(one, prefix=robot.prefix, frame=spec.worldbody.add_frame(pos=robot.base_m))
        return spec

    def reach_for(self, points_n6: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return joint positions [n, 2 J] for a point of each tool, and by how far the worse one misses it, m [n]."""
        each = zip(self.robots, halves(points_n6), strict=True)
        qpos, miss = zip(*(robot.reach_for(points_n3) for robot, points_n3 in each), strict=True)
        return np.concatenate(qpos, -1), np.max(miss, 0)

    def start_qpos(self, rng: EpisodeRng, held_n: np.ndarray) -> np.ndarray:
        return np.concatenate([robot.start_qpos(rng, held_n) for robot in self.robots], -1)

    def attach(self, batch: Batch) -> Any:
        return PairState([robot.attach(batch) for robot in self.robots])

    def attach_tensors(self, batch: Simulations) -> Any:
        return PairState([robot.attach_tensors(batch) for robot in self.robots])


def placed(robot: GripperArm, prefix: str, y_m: float) -> GripperArm:
    """Return a copy of a robot that stands aside by ``y_m``, with its kinematics and its workspace."""

    def moved(point: tuple[float, float, float]) -> tuple[float, float, float]:
        return point[0], point[1] + y_m, point[2]

    robot, arm = copy(robot), robot.kinematics
    low, high = map(moved, robot.workspace_m)
    joints = replace(arm.joints[0], pos_m=moved(arm.joints[0].pos_m)), *arm.joints[1:]
    robot.prefix, robot.base_m, robot.workspace_m = prefix, moved((0.0, 0.0, 0.0)), (low, high)
    robot.kinematics = replace(arm, joints=joints, workspace_low_m=low, workspace_high_m=high)
    return robot


def halves(numbers: Any) -> tuple[Any, Any]:
    """Return the left and the right robot's part of an array or a tensor, [..., 2 d] to [..., d]."""
    middle = numbers.shape[-1] // 2
    return numbers[..., :middle], numbers[..., middle:]


def joined(name: str) -> Any:
    """Return a property that reads what both arms have, and sets it by halves; None is for both."""

    def read(self: "PairState") -> Tensor:
        return torch.cat([getattr(arm, name) for arm in self.arms], -1)

    def write(self: "PairState", value: Tensor | None) -> None:
        for arm, half in zip(self.arms, (None, None) if value is None else halves(value), strict=True):
            setattr(arm, name, half)

    return property(read, write)


class PairState:
    """Two attached arms as one, on the CPU or a device, for pools and randomisation; tasks use each arm's own view."""

    prefix = ""
    joint_pos, joint_vel, tcp_pos, gripper_pos = map(joined, ("joint_pos", "joint_vel", "tcp_pos", "gripper_pos"))
    encoder_offset_NJ, backlash_NJ = map(joined, ("encoder_offset_NJ", "backlash_NJ"))

    def __init__(self, arms: Sequence[Any]) -> None:
        self.arms, self.ctrl, self.scale = tuple(arms), arms[0].ctrl, arms[0].scale

    def measurement(self, *readings_N2: Tensor) -> Measurement:
        """Return both measurements, joined along their first axis."""
        each = zip(self.arms, zip(*map(halves, readings_N2), strict=True), strict=True)
        both = [arm.measurement(*own) for arm, own in each]
        return Measurement(*(torch.cat(parts) for parts in zip(*both, strict=True)))

    def observe(self, measured: Measurement | None = None) -> dict[str, Tensor]:
        each = zip(SIDES, self.arms, self._apart(measured), strict=True)
        return {f"{side}_{name}": value for side, arm, own in each for name, value in arm.observe(own).items()}

    def reset(self, ids: Any, qpos_n2J: Any) -> None:
        for arm, qpos_nJ in zip(self.arms, halves(qpos_n2J), strict=True):
            arm.reset(ids, qpos_nJ)

    def apply(self, action_NA: Any, *ids: Any, measured: Measurement | None = None) -> None:
        for arm, action, own in zip(self.arms, halves(action_NA), self._apart(measured), strict=True):
            arm.apply(action, *ids, measured=own)

    def _apart(self, measured: Measurement | None) -> Sequence[Measurement | None]:
        if measured is None:
            return None, None
        return [Measurement(*parts) for parts in zip(*(part.chunk(2) for part in measured), strict=True)]
