"""Scenes: a robot at a table and the objects that tasks put in front of it, as an MjSpec.

Collision bits: the robot is contype 1 / conaffinity 2, everything else contype 2 / conaffinity 3 (see
assets/franka/panda.xml). Metres, kilograms, radians; z up, robot base at the origin, table surface at z = 0.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mujoco

from embodied.core.errors import UserError, one_line
from embodied.envs.mujoco.config import SIDES, Shape
from embodied.envs.mujoco.robots.base import Robot
from embodied.envs.mujoco.robots.parts import FINGERS

BODY = mujoco.mjtObj.mjOBJ_BODY
HIDDEN_M = 1e-4  # half size of a geom in the middle of an object, where nothing can touch it
SCENE = "scene/"  # with which the names of a user's scene begin
WORLD_BITS = {"contype": 2, "conaffinity": 3}
# Defaults of geoms that the file of a robot may set; they are not for table and objects.
OF_ROBOT = (
    "condim", "density", "friction", "gap", "group", "margin", "material", "priority", "solimp", "solmix", "solref",
)  # fmt: skip
MARKER = {"contype": 0, "conaffinity": 0, "group": 2, "mass": 0}  # visible, without contacts
GREY, RED, BLUE = (0.55, 0.57, 0.6, 1), (0.85, 0.2, 0.15, 1), (0.2, 0.4, 0.8, 1)
Rgba = tuple[float, float, float, float]
# geom type, condim (round geoms need friction against rolling)
KINDS = {
    "box": (mujoco.mjtGeom.mjGEOM_BOX, 3),
    "cylinder": (mujoco.mjtGeom.mjGEOM_CYLINDER, 6),
    "sphere": (mujoco.mjtGeom.mjGEOM_SPHERE, 6),
}


def on_table(robot: Robot) -> mujoco.MjSpec:
    """Return a scene of the robot and a table plane."""
    spec, plain = robot.spec(), mujoco.MjSpec()
    for name in OF_ROBOT:
        setattr(spec.default.geom, name, getattr(plain.default.geom, name))
    count = len(robot.fingers)
    spec.add_tuple(name="fingers", objtype=[BODY] * count, objname=robot.fingers, objprm=[0] * count)
    spec.worldbody.add_geom(
        name="table", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], rgba=GREY, friction=[1, 0.005, 0.0001],
        **WORLD_BITS,
    )  # fmt: skip
    return spec


def add_scene(spec: mujoco.MjSpec, path: Path) -> None:
    """Add the bodies and geoms of a user's MJCF file around the table; all its names then begin with ``scene/``.

    What would act on the simulation by itself is left out: options, keyframes, sensors and actuators. So are planes,
    since the table is the ground. UserError for a file that MuJoCo cannot read.
    """
    try:
        scene = mujoco.MjSpec.from_file(str(path))
        scene.compile()
    except ValueError as error:
        raise UserError(f"scene {path.name}: {one_line(error)}") from error
    planes = [geom for geom in scene.geoms if geom.type == mujoco.mjtGeom.mjGEOM_PLANE]
    for thing in (*scene.keys, *scene.sensors, *scene.actuators, *planes):
        scene.delete(thing)
    for geom in scene.geoms:
        if geom.contype or geom.conaffinity:
            geom.contype, geom.conaffinity = WORLD_BITS.values()
    scene.option = spec.option
    scene.memory = spec.memory = max(spec.memory, scene.memory) if spec.memory > 0 else -1
    spec.attach(scene, frame=spec.worldbody.add_frame(), prefix=SCENE)


def add_body(spec: mujoco.MjSpec, name: str, **options: Any) -> Any:
    """Add a body to the world. One of the robot with the same name becomes ``robot_<name>``."""
    if (of_robot := spec.body(name)) is not None:
        of_robot.name = f"robot_{name}"
    return spec.worldbody.add_body(name=name, **options)


def add_object(spec: mujoco.MjSpec, name: str, shape: Shape, mass_kg: float, rgba: Rgba) -> None:
    """Add a free body of one geom, both called ``name``."""
    geom, condim = KINDS[shape.kind]
    body = add_body(spec, name, pos=[0.5, 0, shape.half_height_m])
    body.add_freejoint(name=name)
    body.add_geom(
        name=name, type=geom, size=[*shape.size_m, 0, 0][:3], mass=mass_kg, rgba=rgba, condim=condim,
        friction=[1, 0.005, 0.001], **WORLD_BITS,
    )  # fmt: skip


def with_all_kinds(spec: mujoco.MjSpec, shapes: Mapping[str, Sequence[Shape]]) -> mujoco.MjSpec:
    """Return a scene whose objects of one geom have a geom of each kind of their ``shapes``, by the body's name.

    It is for a simulator in which geoms cannot change their types. Mass and inertia stay.
    """
    spec, model = spec.copy(), spec.compile()
    for name, choices in shapes.items():
        body = spec.body(name)
        first, now = body.geoms[0], model.body(name)
        body.explicitinertial, body.mass, body.inertia = True, now.mass[0], now.inertia
        for kind, condim in {KINDS[shape.kind]: None for shape in choices}:
            if kind != first.type:
                body.add_geom(
                    type=kind, size=[HIDDEN_M] * 3, mass=0, condim=condim, friction=first.friction, **WORLD_BITS
                )
    return spec


def add_object_sensors(spec: mujoco.MjSpec, name: str, body: str = "", prefix: str = "") -> None:
    """Add the sensors that ``View`` reads: contacts of each finger with the object, and the object's x and y axes.

    Also its position, if it is not free. body: of the object, if it has another name. prefix: of the robot whose
    fingers are meant, if it is one of two.
    """
    body, fingers = body or name, (each for each in spec.tuple("fingers").objname if each.startswith(prefix))
    for which, finger in zip(FINGERS, fingers, strict=True):
        sensor = spec.add_sensor(
            name=f"{prefix}{which}_{name}", type=mujoco.mjtSensor.mjSENS_CONTACT, objtype=BODY, objname=finger,
            reftype=BODY, refname=body,
        )  # fmt: skip
        sensor.intprm[:3] = [1 << int(mujoco.mjtConDataField.mjCONDATA_FOUND), 0, 1]  # number of contacts: one value
    for axis, kind in (("x", mujoco.mjtSensor.mjSENS_FRAMEXAXIS), ("y", mujoco.mjtSensor.mjSENS_FRAMEYAXIS)):
        spec.add_sensor(name=f"{name}_{axis}_axis", type=kind, objtype=mujoco.mjtObj.mjOBJ_XBODY, objname=body)
    if all(joint.type != mujoco.mjtJoint.mjJNT_FREE for joint in spec.body(body).joints):
        kind = mujoco.mjtSensor.mjSENS_FRAMEPOS
        spec.add_sensor(name=f"{name}_pos", type=kind, objtype=mujoco.mjtObj.mjOBJ_XBODY, objname=body)


def add_cube(spec: mujoco.MjSpec, name: str, half_size_m: float, mass_kg: float, rgba: Rgba) -> None:
    """Add a free cube with its sensors."""
    add_object(spec, name, Shape("box", (half_size_m,) * 3), mass_kg, rgba)
    add_object_sensors(spec, name)


def add_bar(spec: mujoco.MjSpec, name: str, length_m: float, half_m: float, mass_kg: float) -> None:
    """Add a free bar along y that lies on the table, with upright handles at its ends, left_handle at greater y.

    length_m: between the middles of the handles. half_m: half the width of bar and handles.
    """
    box = {"type": mujoco.mjtGeom.mjGEOM_BOX, "friction": [1, 0.005, 0.001], **WORLD_BITS}
    body = add_body(spec, name, pos=[0.5, 0, half_m / 2])
    body.add_freejoint(name=name)
    body.add_geom(name=name, size=[half_m, length_m / 2 + half_m, half_m / 2], mass=mass_kg, rgba=BLUE, **box)
    for side, y in zip(SIDES, (length_m / 2, -length_m / 2), strict=True):
        handle, pos = f"{side}_handle", [0, y, 1.75 * half_m]
        body.add_geom(name=handle, size=[half_m, half_m, 1.25 * half_m], pos=pos, mass=0, rgba=RED, **box)
        kind = mujoco.mjtSensor.mjSENS_FRAMEPOS
        spec.add_sensor(name=f"{handle}_pos", type=kind, objtype=mujoco.mjtObj.mjOBJ_GEOM, objname=handle)
        add_object_sensors(spec, handle, name, f"{side}/")


def add_tray(
    spec: mujoco.MjSpec, name: str, inner_half_m: float, wall_height_m: float, rgba: Rgba, thick: float = 0.004
) -> None:
    """Add a square walled tray on a mocap body: its pose is part of an env's state, and physics does not move it.

    thick: half the thickness of walls and floor, m.
    """
    half, up = inner_half_m, wall_height_m / 2
    body = add_body(spec, name, pos=[0.5, 0.2, 0], mocap=True)
    outer, middle = half + 2 * thick, half + thick
    for pos, size in (
        ((0, 0, thick / 2), (outer, outer, thick / 2)),
        ((middle, 0, up), (thick, outer, up)),
        ((-middle, 0, up), (thick, outer, up)),
        ((0, middle, up), (outer, thick, up)),
        ((0, -middle, up), (outer, thick, up)),
    ):
        body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, pos=pos, size=size, rgba=rgba, **WORLD_BITS)


def add_post(spec: mujoco.MjSpec, name: str, radius_m: float, height_m: float, rgba: Rgba) -> None:
    """Add an upright cylinder without contacts on a mocap body, which stands on the table."""
    body = add_body(spec, name, pos=[0.5, 0, 0], mocap=True)
    size, pos = [radius_m, height_m / 2, 0], [0, 0, height_m / 2]
    body.add_geom(name=name, type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=size, pos=pos, rgba=rgba, **MARKER)


def add_goal(spec: mujoco.MjSpec, name: str, radius_m: float) -> None:
    """Add a green sphere without contacts on a mocap body, to mark a goal."""
    body = add_body(spec, name, pos=[0.5, 0, 0.2], mocap=True)
    rgba = (0.2, 0.8, 0.3, 0.6)
    body.add_geom(name=name, type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[radius_m, 0, 0], rgba=rgba, **MARKER)
