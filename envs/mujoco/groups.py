"""The groups of geoms, bodies, actuators and joints that every task has: the arm, the fingers and the objects."""

import mujoco
import numpy as np

FINGERS = ("left_finger", "right_finger")


def members(model: mujoco.MjModel, kind: str) -> dict[str, list[int]]:
    """Return the ids of the members of ``arm``, ``fingers`` and ``objects`` among a kind (geom, body, actuator, joint).

    The arm's joints are those between the base and the tool centre point; objects are bodies that can move freely.
    """
    arm, body = [], int(model.site_bodyid[model.site("tcp").id])
    while body:
        arm += [body] if model.body_jntnum[body] else []
        body = int(model.body_parentid[body])
    bodies = {"arm": arm[::-1], "fingers": [model.body(name).id for name in FINGERS], "objects": free_bodies(model)}
    if kind == "body":
        return bodies
    body_of = {"joint": model.jnt_bodyid, "geom": model.geom_bodyid}
    on_joint = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    body_of["actuator"] = np.where(on_joint, model.jnt_bodyid[model.actuator_trnid[:, 0] * on_joint], -1)
    return {name: np.flatnonzero(np.isin(body_of[kind], ids)).tolist() for name, ids in bodies.items()}


def free_bodies(model: mujoco.MjModel) -> list[int]:
    """Return the ids of the bodies that can move freely."""
    return [int(body) for body in model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]]
