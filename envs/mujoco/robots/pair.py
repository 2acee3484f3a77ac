"""Two robots of a kind, side by side at one table; they touch each other.

    "left" at y = +apart / 2        both look along x        "right" at y = -apart / 2

Names of the left one begin with ``left/`` in the model, with ``left_`` in observations and actions. What a robot has, a
pair has twice, joined along the last axis, left first. Each has its own control law, in the frame of the table.
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

BITS = (5, 2), (1, 6)  # contype and conaffinity of the left and of the right robot; bit 4 is their contact


class Pair:
    """Two robots as one (``base.Robot``). apart_m: between the bases. UserError unless the robot is a GripperArm."""

    def __init__(self, robot: Robot, apart_m: float) -> None:
        if not isinstance(robot, GripperArm):
            raise UserError(f"robots: {robot.name} is no GripperArm, which two at one table have to be")
        self.name, self.visual = f"bi_{robot.name}", robot.visual
        self.scale, self.gap_m, self.impratio = robot.scale, robot.gap_m, robot.impratio
        left, right = placed(robot, "left/", apart_m / 2), placed(robot, "right/", -apart_m / 2)
        self.robots: tuple[GripperArm, GripperArm] = left, right
        self.arm: ArmSpec | None = left.arm
        self.right_arm: ArmSpec | None = right.arm
        self.workspace_m = right.workspace_m[0], left.workspace_m[1]
        self.fingers = tuple(each.prefix + finger for each in self.robots for finger in each.fingers)
        self.terms = tuple(replace(term, name=f"{side}_{term.name}") for side in SIDES for term in robot.terms)
        moves = (replace(term, name=f"{side}_{term.name}") for side in SIDES for term in robot.action.terms)
        self.action = Box(tuple(moves))

    @property
    def coarse(self) -> mujoco.MjModel:
        return self.robots[0].coarse

    def spec(self) -> mujoco.MjSpec:
        spec = mujoco.MjSpec()
        for robot, bits in zip(self.robots, BITS, strict=True):
            one = robot.spec()
            for geom in one.geoms:
                if geom.contype or geom.conaffinity:
                    geom.contype, geom.conaffinity = bits
            spec.option = one.option
            spec.memory, one.memory = max(2 * one.memory, -1), -1
            spec.attach(one, prefix=robot.prefix, frame=spec.worldbody.add_frame(pos=[0, robot.aside_m, 0]))
        return spec

    @property
    def home_tool_m(self) -> np.ndarray:
        return self.robots[0].home_tool_m

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


def placed(robot: GripperArm, prefix: str, aside_m: float) -> GripperArm:
    """Return a copy of a robot that stands aside in y, with its kinematics and its workspace."""
    robot, arm = copy(robot), robot.kinematics
    (x, y, z), first = arm.joints[0].pos_m, arm.joints[0]
    low, high = ((corner[0], corner[1] + aside_m, corner[2]) for corner in robot.workspace_m)
    joints = replace(first, pos_m=(x, y + aside_m, z)), *arm.joints[1:]
    robot.prefix, robot.aside_m, robot.workspace_m = prefix, aside_m, (low, high)
    robot.kinematics = replace(arm, joints=joints, workspace_low_m=low, workspace_high_m=high)
    return robot


def halves(numbers: Any) -> tuple[Any, Any]:
    """Return the left and the right robot's part of an array or a tensor, [..., 2 d] to [..., d]."""
    middle = numbers.shape[-1] // 2
    return numbers[..., :middle], numbers[..., middle:]


def joined(name: str) -> Any:
    """Return a property that reads what both arms have, and sets it by halves; None is for both."""

    def write(self: "PairState", value: Tensor | None) -> None:
        for arm, half in zip(self.arms, (None, None) if value is None else halves(value), strict=True):
            setattr(arm, name, half)

    return property(lambda self: torch.cat([getattr(arm, name) for arm in self.arms], -1), write)


class PairState:
    """Two attached arms as one (``base.Arm``, ``base.TensorArm``) for pools and randomisation; tasks use each one."""

    prefix = ""
    joint_pos, joint_vel, tcp_pos, gripper_pos = map(joined, ("joint_pos", "joint_vel", "tcp_pos", "gripper_pos"))
    encoder_offset_NJ, backlash_NJ, wanted_NJ = map(joined, ("encoder_offset_NJ", "backlash_NJ", "wanted_NJ"))

    def __init__(self, arms: Sequence[Any]) -> None:
        self.arms, self.ctrl, self.scale = tuple(arms), arms[0].ctrl, arms[0].scale
        self.from_target = arms[0].from_target

    def measurement(self, *readings_N2: Tensor) -> Measurement:
        """Return both measurements, joined along their first axis."""
        each = zip(self.arms, zip(*map(halves, readings_N2), strict=True), strict=True)
        both = [arm.measurement(*own) for arm, own in each]
        return Measurement(*(torch.cat(parts) for parts in zip(*both, strict=True)))

    def observe(self, measured: Measurement | None = None) -> dict[str, Tensor]:
        each = zip(SIDES, self.arms, apart(measured), strict=True)
        return {f"{side}_{name}": value for side, arm, own in each for name, value in arm.observe(own).items()}

    def reset(self, ids: Any, qpos_n2J: Any) -> None:
        for arm, qpos_nJ in zip(self.arms, halves(qpos_n2J), strict=True):
            arm.reset(ids, qpos_nJ)

    def apply(self, action_NA: Any, *ids: Any, measured: Measurement | None = None) -> None:
        for arm, action, own in zip(self.arms, halves(action_NA), apart(measured), strict=True):
            arm.apply(action, *ids, measured=own)


def apart(measured: Measurement | None) -> Sequence[Measurement | None]:
    """Return each arm's part of a measurement."""
    if measured is None:
        return None, None
    return [Measurement(*parts) for parts in zip(*(part.chunk(2) for part in measured), strict=True)]
