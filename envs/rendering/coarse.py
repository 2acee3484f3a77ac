"""What policies' cameras show: few geoms of robot, table and floor, in a scene that only copies poses.

    model of a robot ─► visible geoms, meshes as one or two primitives ─► looks ─► scene of looks and objects

The silhouettes of primitives are compared with those of the mesh:

    rays from all sides ─► points on the mesh, or in two halves of it ─► of each the best box, ellipsoid, cylinder or
    capsule ─► sizes and centres improved step by step

Suffixes: m rays, p points where they hit the mesh.
"""

from collections.abc import Iterator
from typing import NamedTuple

import mujoco
import numpy as np
from mujoco import mjtGeom
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.envs.rendering.appearance import COLLISION_GROUP, add_geoms, robot_bodies
from embodied.envs.rendering.cameras import Array, Array32, geom_colors, look_at
from embodied.envs.rendering.solids import MISSED, SOLIDS, dot

OBJECTS, ROBOT, GROUND = 0, (1, 2, 3, 4), 5  # groups of the geoms, see assets/franka/coarse.xml
PLANES = {
    "table_top": ((0.3, 0.0, 0.0), (0.55, 0.6), (0.78, 0.66, 0.52, 1.0)),
    "floor": ((0.0, 0.0, -0.74), (0.0, 0.0), (0.72, 0.74, 0.77, 1.0)),
}  # position, half size and colour of the Panda's
ENOUGH, GAIN = 0.75, 0.05  # overlap with which one primitive is enough, and what a second one must gain
DIRECTIONS, PIXELS = 9, 20  # silhouettes, and pixels along their edges
STEPS, MOVES = (0.1, 0.04), np.vstack([np.eye(6), -np.eye(6)])  # changes of sizes and centre, shares of the sizes
THINNEST_M = 5e-4  # half size
Mask = NDArray[np.bool_]


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


class Solid(NamedTuple):
    """A primitive in the frame of a geom."""

    kind: int
    size: Array
    pos: Array
    axes: Array
    """Its axes, as rows."""

    def hit(self, origin_m3: Array32, way_m3: Array32) -> Mask:
        """Return which rays hit it, [m]."""
        half, pos, axes = (x.astype(np.float32) for x in (self.size, self.pos, self.axes))
        size, start, ray = ((x[0], x[1], x[2]) for x in (half, axes @ (origin_m3 - pos).T, axes @ way_m3.T))
        with np.errstate(divide="ignore", invalid="ignore"):
            hit_m: Mask = SOLIDS[self.kind](size, start, ray, dot(ray, ray)).depth != MISSED
        return hit_m


def fit_mesh(model: mujoco.MjModel, geom: int) -> list[Solid]:
    """Return the primitive, or two, that look like the mesh of a geom."""
    data, rays = mujoco.MjData(model), _rays_at(model.geom_aabb[geom])
    data.geom_xpos[geom], data.geom_xmat[geom] = 0, np.eye(3).ravel()
    depth_m = np.array([mujoco.mj_rayMesh(model, data, geom, *ray) for ray in zip(*rays, strict=True)])
    points_p3 = (rays[0] + depth_m[:, None] * rays[1])[depth_m >= 0]
    low, high = points_p3.min(0), points_p3.max(0)
    long = np.argmax(high - low)
    upper_p = points_p3[:, long] > (low + high)[long] / 2
    whole, overlap = _fit([points_p3], rays, depth_m >= 0)
    if overlap > ENOUGH:
        return whole
    halves, more = _fit([points_p3[upper_p], points_p3[~upper_p]], rays, depth_m >= 0)
    return halves if more > overlap + GAIN else whole


def _fit(parts: list[Array], rays: tuple[Array, Array], seen_m: Mask) -> tuple[list[Solid], float]:
    """Return solids for parts of a mesh, and their overlap with what is seen: intersection over union of pixels.

    A part for which every solid would make more pixels wrong than right has none.
    """
    origin_m3, way_m3 = (x.astype(np.float32) for x in rays)
    solids, masks = dict[int, Solid](), np.zeros((len(parts), len(seen_m)), bool)

    def keep_best(k: int, tried: Iterator[Solid]) -> None:
        others_m = np.delete(masks, k, axis=0).any(0)
        for solid in tried:
            mask_m = solid.hit(origin_m3, way_m3)
            if ((mask_m | others_m) != seen_m).sum() < ((masks[k] | others_m) != seen_m).sum():
                solids[k], masks[k] = solid, mask_m

    for k, points_p3 in enumerate(parts):
        keep_best(k, _candidates(points_p3))
    for step, k in ((step, k) for step in STEPS for k in solids):
        keep_best(k, (_moved(solids[k], change) for change in step * MOVES))
    return list(solids.values()), float((masks.any(0) & seen_m).sum() / (masks.any(0) | seen_m).sum())


def _candidates(points_p3: Array) -> Iterator[Solid]:
    """Yield solids of about the size of the points' bounding box."""
    low, high = points_p3.min(0), points_p3.max(0)
    for turn in range(3):  # each edge of the box is the z axis once
        axes, half = np.roll(np.eye(3), turn, axis=0), np.maximum(np.roll(high - low, turn) / 2, THINNEST_M)
        radius, straight = half[:2].mean(), max(half[2] - half[:2].mean(), THINNEST_M)
        for kind, size in (
            (mjtGeom.mjGEOM_BOX, half),
            (mjtGeom.mjGEOM_ELLIPSOID, half),
            (mjtGeom.mjGEOM_CYLINDER, np.array([radius, half[2], 0])),
            (mjtGeom.mjGEOM_CAPSULE, np.array([radius, straight, 0])),
        )[2 * (turn > 0) :]:
            yield Solid(kind, size, (low + high) / 2, axes)


def _moved(solid: Solid, change_6: Array) -> Solid:
    """Return a solid whose sizes and centre have changed by shares of its sizes, along its axes."""
    size, way = np.maximum(solid.size * (1 + change_6[:3]), THINNEST_M), change_6[3:] * solid.size.max()
    return solid._replace(size=size, pos=solid.pos + way @ solid.axes)


def _rays_at(box_6: Array) -> tuple[Array, Array]:
    """Return starts and directions [m, 3] of rays at a box (centre and half size) from ``DIRECTIONS`` all around."""
    turn, up = np.arange(DIRECTIONS) * np.pi * (3 - np.sqrt(5)), 1 - (2 * np.arange(DIRECTIONS) + 1) / DIRECTIONS
    flat, radius = np.sqrt(1 - up * up), np.linalg.norm(box_6[3:])
    place = ((np.arange(PIXELS) + 0.5) / PIXELS * 2 - 1) * radius
    x, y = (axis.reshape(-1, 1) for axis in np.meshgrid(place, place))
    camera = look_at(np.stack([flat * np.cos(turn), flat * np.sin(turn), up], -1), np.zeros((1, 3)))[:, None]
    origin = box_6[:3] + x * camera[..., 0] + y * camera[..., 1] + 2 * radius * camera[..., 2]
    return origin.reshape(-1, 3), -np.repeat(camera[:, 0, :, 2], PIXELS**2, 0)
