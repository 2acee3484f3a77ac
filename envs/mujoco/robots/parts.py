"""Where a robot's parts are in a model: found by names and by the tree of bodies, whatever their order in the file.

The arm's joints are those between the base and the site ``tcp``. All other actuators are the gripper's. Its joints are
those that they drive, by a tendon too; more joints may be linked to them by equality constraints, tendons and springs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import UserError

Columns = Any
"""Columns of an array or a tensor: a slice if they follow each other, so that reading copies nothing; else an index."""
SERVOS = "servos: of the robot's file can give it one"
FINGERS = ("left_finger", "right_finger")
"""What the two bodies that touch a held object are called, in the model's tuple and in names of sensors."""


class Place(NamedTuple):
    """Where joints and their actuators are."""

    joints: list[int]
    servos: list[int]
    """Ids of the joints' actuators."""
    ids: Columns
    """Of fields with an entry per joint."""
    qpos: Columns
    qvel: Columns
    ctrl: Columns


class Parts:
    """An arm with a gripper in a model. UserError for an arm's joint without its one position servo, or no gripper.

    device: of the tensors that indices are for; None: the CPU, or arrays. prefix: of the names of one of two robots.
    """

    arm: Place
    """From the base to the tool."""
    gripper: Place
    linked: Columns
    """In ``qpos``: all joints of the robot that are not the arm's."""
    direct: bool
    """Whether every joint of the gripper has a position servo of its own."""

    def __init__(self, model: mujoco.MjModel, device: torch.device | None = None, prefix: str = "") -> None:
        body = int(model.site_bodyid[model.site(f"{prefix}tcp").id])
        own = model.body_rootid[model.jnt_bodyid] == model.body_rootid[body]
        servos: dict[int, list[int]] = {}
        for actuator in range(model.nu):
            for joint in driven(model, actuator):
                if own[joint] or not prefix:
                    servos.setdefault(joint, []).append(actuator)
        chain = np.isin(model.jnt_bodyid, ancestors(model, body))
        arm = np.flatnonzero(chain).tolist()
        for joint in arm:
            if (count := len(servos.get(joint, ()))) != 1:
                raise UserError(f"joint '{model.joint(joint).name}': has {count} actuators, allowed: 1 ({SERVOS})")
            if not is_servo(model, servos[joint][0]):
                raise UserError(f"joint '{model.joint(joint).name}': its actuator is no position servo ({SERVOS})")
        gripper = sorted(set(servos) - set(arm))
        for joint in gripper:
            if model.actuator_biasprm[servos[joint][0], 2] and not model.actuator_biasprm[servos[joint][0], 1]:
                raise UserError(f"joint '{model.joint(joint).name}': its actuator is no position servo ({SERVOS})")
        if not gripper:
            raise UserError("actuators: got none of a joint beyond the tool, needed: at least one, the gripper's")

        def place(joints: list[int]) -> Place:
            ctrl = list(dict.fromkeys(servos[joint][0] for joint in joints))
            ids = (joints, model.jnt_qposadr[joints].tolist(), model.jnt_dofadr[joints].tolist(), ctrl)
            return Place(joints, ctrl, *(columns(of, device) for of in ids))

        self.arm, self.gripper = place(arm), place(gripper)
        linked = np.flatnonzero(~chain & own)
        self.linked = columns(model.jnt_qposadr[linked].tolist(), device)
        self.direct = linked.tolist() == gripper and all(is_servo(model, actuator) for actuator in self.gripper.servos)


def driven(model: mujoco.MjModel, actuator: int) -> list[int]:
    """Return the joints that an actuator drives: its joint, or those of its tendon. UserError for other kinds."""
    kind, target = model.actuator_trntype[actuator], int(model.actuator_trnid[actuator, 0])
    if kind == mujoco.mjtTrn.mjTRN_JOINT:
        return [target]
    wraps = slice(model.tendon_adr[target], model.tendon_adr[target] + model.tendon_num[target])
    if kind != mujoco.mjtTrn.mjTRN_TENDON or (model.wrap_type[wraps] != mujoco.mjtWrap.mjWRAP_JOINT).any():
        raise UserError(f"actuator '{model.actuator(actuator).name}': allowed: those of a joint or of a fixed tendon")
    return [int(joint) for joint in model.wrap_objid[wraps]]


def is_servo(model: mujoco.MjModel, actuator: int) -> bool:
    """Return whether the command of an actuator is the position of one joint."""
    gain, (_, bias, _) = model.actuator_gainprm[actuator, 0], model.actuator_biasprm[actuator, :3]
    of_joint = model.actuator_trntype[actuator] == mujoco.mjtTrn.mjTRN_JOINT and model.actuator_gear[actuator, 0] == 1
    affine = model.actuator_biastype[actuator] == mujoco.mjtBias.mjBIAS_AFFINE
    at_once = model.actuator_dyntype[actuator] == mujoco.mjtDyn.mjDYN_NONE  # else its command is a rate, or delayed
    return bool(of_joint and affine and at_once and gain > 0 and gain == -bias)


def ancestors(model: mujoco.MjModel, body: int) -> list[int]:
    """Return a body and those that carry it, without the world, from the base."""
    found: list[int] = []
    while body:
        found.insert(0, body)
        body = int(model.body_parentid[body])
    return found


def finger_bodies(model: mujoco.MjModel) -> list[int]:
    """Return the ids of the bodies that touch a held object, two of each robot."""
    found = model.tuple("fingers")
    first, count = int(found.adr[0]), int(found.size[0])
    return [int(body) for body in model.tuple_objid[first : first + count]]


def columns(ids: Sequence[int], device: torch.device | None = None) -> Columns:
    """Return ``Columns`` of arrays and tensors on the CPU, or of tensors on another device."""
    if list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return slice(ids[0], ids[0] + len(ids))
    return np.array(ids) if device is None or device.type == "cpu" else torch.tensor(ids, device=device)


def at(rows: slice | np.ndarray | Tensor, columns: Columns) -> tuple[Any, Any]:
    """Return the index of rows and columns of an array."""
    return (rows, columns) if isinstance(rows, slice) or isinstance(columns, slice) else (rows[:, None], columns)
