"""What policies' cameras show: few geoms of robot, table and floor, in a scene that only copies poses.

model of a robot ─► visible geoms, meshes as primitives (fitting.py) ─► looks ─► scene of looks and objects
"""

import mujoco
import numpy as np
from mujoco import mjtGeom
from mujoco.batch import Batch

from embodied.envs.rendering.appearance import COLLISION_GROUP, add_geoms, robot_bodies
from embodied.envs.rendering.cameras import geom_colors
from embodied.envs.rendering.fitting import Solid, fit_mesh
from embodied.envs.rendering.solids import SOLIDS

OBJECTS, ROBOT, GROUND = 0, (1, 2, 3, 4), 5  # groups of the geoms, see assets/franka/coarse.xml
PLANES = {
    "table_top": ((0.3, 0.0, 0.0), (0.55, 0.6), (0.78, 0.66, 0.52, 1.0)),
    "floor": ((0.0, 0.0, -0.74), (0.0, 0.0), (0.72, 0.74, 0.77, 1.0)),
}  # position, half size and colour of the Panda's


def primitive_looks(model: mujoco.MjModel, reach: float) -> mujoco.MjModel:
    """Return the looks of a robot without a file of them: primitives for what is seen of its bodies, table and floor.

    Of each body its geoms of the highest visible group are seen, since others are there to collide. If no body has any,
    all geoms are seen. reach: length of the robot's tasks, and of the table, relative to the Panda's.
    """
    spec, colors = mujoco.MjSpec(), geom_colors(Batch(model, 1, 1), np.zeros(1, int))[0]
    for name, ((x, y, z), (length, width), rgba) in PLANES.items():
        spec.worldbody.add_geom(
            name=name, type=mjtGeom.mjGEOM_PLANE, pos=[reach * x, y, z], size=[reach * length, reach * width, 1],
            rgba=rgba, group=GROUND,
        )  # fmt: skip
    bodies = [spec.worldbody, *(spec.worldbody.add_body(name=model.body(i).name) for i in range(1, model.nbody))]
    drawn = np.isin(model.geom_type, [*SOLIDS, mjtGeom.mjGEOM_MESH]) & (colors[:, 3] > 0) & (model.geom_bodyid > 0)
    if (visible := drawn & (model.geom_group < COLLISION_GROUP)).any():
        highest = np.full(model.nbody, -1)
        np.maximum.at(highest, model.geom_bodyid[visible], model.geom_group[visible])
        drawn = visible & (model.geom_group == highest[model.geom_bodyid])
    for geom in np.flatnonzero(drawn).tolist():
        turn, quat = np.zeros(9), np.zeros(4)
        mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
        whole = Solid(model.geom_type[geom], model.geom_size[geom], np.zeros(3), np.eye(3))
        for solid in fit_mesh(model, geom) if whole.kind == mjtGeom.mjGEOM_MESH else [whole]:
            mujoco.mju_mat2Quat(quat, (turn.reshape(3, 3) @ solid.axes.T).ravel())
            pos = model.geom_pos[geom] + turn.reshape(3, 3) @ solid.pos
            bodies[model.geom_bodyid[geom]].add_geom(
                type=solid.kind, size=solid.size, pos=pos, quat=quat, rgba=colors[geom], group=ROBOT[0]
            )
    return spec.compile()


def coarse_scene(spec: mujoco.MjSpec, looks: mujoco.MjModel) -> mujoco.MjSpec:
    """Return the scene that cameras show: ``spec`` without hidden geoms, and with the looks of the robot."""
    spec = spec.copy()
    robot = {body.name for i in range(1, looks.nbody) for body in robot_bodies(spec, looks.body(i).name)}
    for body in spec.bodies:
        if not body.explicitinertial and body.name != "world":  # the geoms that give its mass may be deleted
            body.explicitinertial, body.mass, body.inertia = True, 1.0, [1.0, 1.0, 1.0]
        for geom in body.geoms:
            table = body.name == "world" and geom.type == mjtGeom.mjGEOM_PLANE
            if table or geom.group >= COLLISION_GROUP or body.name in robot:
                spec.delete(geom)
            else:
                geom.group = OBJECTS
    used = {geom.meshname for geom in spec.geoms}
    for mesh in [mesh for mesh in spec.meshes if mesh.name not in used]:
        spec.delete(mesh)
    add_geoms(spec, looks)
    return spec
