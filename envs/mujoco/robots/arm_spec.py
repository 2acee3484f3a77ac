"""The description of a ``GripperArm`` for a robot's computer (embodied.core.spec.ArmSpec), read from its MJCF."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from embodied.core.errors import UserError
from embodied.core.spec import JointSpec

Vector3 = tuple[float, float, float]
Quat = tuple[float, float, float, float]


@cache
def joint_specs(
    mjcf: Path, home: tuple[float, ...], max_velocity: tuple[float, ...]
) -> tuple[tuple[JointSpec, ...], Vector3, Quat]:
    """Return the joints of the arm in ``mjcf``, and position and orientation of the tool in the last joint's frame.

    home, max_velocity: a number per joint. UserError if a joint has a reference position, which no ``JointSpec`` holds.
    """
    model = mujoco.MjModel.from_xml_path(str(mjcf))
    data = mujoco.MjData(model)
    if np.any(model.qpos0[: len(home)]):
        raise UserError(f"{mjcf}: joints with a reference position (ref) cannot be described to a robot's computer")
    data.qpos[:] = 0.0
    mujoco.mj_kinematics(model, data)
    pos, mat = np.zeros(3), np.eye(3)
    joints = []
    for i, (at, speed) in enumerate(zip(home, max_velocity, strict=True)):
        frame = data.xmat[model.jnt_bodyid[i]].reshape(3, 3)
        offset, turn = mat.T @ (data.xanchor[i] - pos), mat.T @ frame
        pos, mat = data.xanchor[i].copy(), frame.copy()
        low, high = model.actuator_ctrlrange[i]
        joints.append(
            JointSpec(
                name=model.joint(i).name,
                kind="slide" if model.jnt_type[i] == mujoco.mjtJoint.mjJNT_SLIDE else "hinge",
                pos_m=_floats(offset),
                quat=_quat(turn),
                axis=_floats(model.jnt_axis[i]),
                low=float(low),
                high=float(high),
                max_velocity=speed,
                max_effort=float(model.actuator_forcerange[i, 1]),
                stiffness=float(model.actuator_gainprm[i, 0]),
                damping=float(-model.actuator_biasprm[i, 2]),
                home=at,
            )
        )
    site = model.site("tcp").id
    tool_mat = data.site_xmat[site].reshape(3, 3)
    return tuple(joints), _floats(mat.T @ (data.site_xpos[site] - pos)), _quat(mat.T @ tool_mat)


def _floats(values: Sequence[float] | np.ndarray) -> Any:
    return tuple(float(value) for value in values)


def _quat(matrix: np.ndarray) -> Quat:
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, matrix.reshape(-1))
    result: Quat = _floats(quat)
    return result
