"""The groups of geoms, bodies, actuators and joints that every task has: the arm, the fingers and the objects."""

from __future__ import annotations

import mujoco
import numpy as np

FINGERS = ("left_finger", "right_finger")


def members(model: mujoco.MjModel, kind: str) -> dict[str, list[int]]:
    """Return the ids of the members of ``arm``, ``fingers`` and ``objects`` among a kind (geom, body, actuator, joint).

    The arm's joints are those between the base and the tool centre point; objects are bodies that can move freely.
    """
    bodies = {
        "arm": _arm_bodies(model),
        "fingers": [model.body(name).id for name in FINGERS],
        "objects": free_bodies(model),
    }
    found: dict[str, list[int]] = {}
    for name, ids in bodies.items():
        joints = np.flatnonzero(np.isin(model.jnt_bodyid, ids))
        if kind == "geom":
            found[name] = np.flatnonzero(np.isin(model.geom_bodyid, ids)).tolist()
        elif kind == "actuator":
            found[name] = _actuators(model, joints).tolist()
        else:
            found[name] = ids if kind == "body" else joints.tolist()
    return found


def free_bodies(model: mujoco.MjModel) -> list[int]:
    """Return the ids of the bodies that can move freely."""
    return [int(body) for body in model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]]


def _arm_bodies(model: mujoco.MjModel) -> list[int]:
    """Return the ids of the bodies between the base and the tool centre point that a joint moves."""
    body, found = int(model.site_bodyid[model.site("tcp").id]), []
    while body:
        if model.body_jntnum[body]:
            found.append(body)
        body = int(model.body_parentid[body])
    return found[::-1]


def _actuators(model: mujoco.MjModel, joints: np.ndarray) -> np.ndarray:
    """Return the ids of the actuators that drive any of these joints."""
    of_joint = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    return np.flatnonzero(of_joint & np.isin(model.actuator_trnid[:, 0], joints))
