"""Scenes: a robot at a table and the objects that tasks put in front of it, as an MjSpec.

Collision bits: the robot is contype 1 / conaffinity 2, everything else contype 2 / conaffinity 3 (see
assets/franka/panda.xml). Metres, kilograms, radians; z up, robot base at the origin, table surface at z = 0.
"""

from __future__ import annotations

from typing import Annotated

import mujoco

from embodied.core.errors import UserError
from embodied.core.options import Positive, config_dataclass, one_of
from embodied.envs.mujoco.robots.base import Robot

WORLD_BITS = {"contype": 2, "conaffinity": 3}
GREY, RED, GREEN, BLUE = (0.55, 0.57, 0.6, 1), (0.85, 0.2, 0.15, 1), (0.2, 0.7, 0.3, 1), (0.2, 0.4, 0.8, 1)
Rgba = tuple[float, float, float, float]
# geom type, length of its size, condim (round geoms need friction against rolling)
KINDS = {
    "box": (mujoco.mjtGeom.mjGEOM_BOX, 3, 3),
    "cylinder": (mujoco.mjtGeom.mjGEOM_CYLINDER, 2, 6),
    "sphere": (mujoco.mjtGeom.mjGEOM_SPHERE, 1, 6),
}


@config_dataclass
class Shape:
    """Kind and size of an object."""

    kind: Annotated[str, one_of(KINDS)]
    """box, cylinder (upright) or sphere."""
    size_m: tuple[Positive, ...]
    """Half sizes of a box; radius and half height of a cylinder; radius of a sphere."""

    def __post_init__(self) -> None:
        if len(self.size_m) != KINDS[self.kind][1]:
            raise UserError(f"size_m: got {list(self.size_m)}, a {self.kind} has {KINDS[self.kind][1]}")

    @property
    def half_width_m(self) -> float:
        """Distance from the centre to a finger that holds the object."""
        return self.size_m[1] if self.kind == "box" else self.size_m[0]

    @property
    def half_height_m(self) -> float:
        """Height of the centre when the object stands on the table."""
        return self.size_m[-1]


def cube(half_m: float) -> Shape:
    """Return a cube with half edge ``half_m``."""
    return Shape("box", (half_m, half_m, half_m))


def on_table(robot: Robot) -> mujoco.MjSpec:
    """Return a scene of the robot and a table plane."""
    spec = mujoco.MjSpec.from_file(str(robot.mjcf))
    spec.worldbody.add_geom(
        name="table", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], rgba=GREY, friction=[1, 0.005, 0.0001],
        **WORLD_BITS,
    )  # fmt: skip
    return spec


def add_object(spec: mujoco.MjSpec, name: str, shape: Shape, mass_kg: float, rgba: Rgba) -> None:
    """Add a free body of one geom, both called ``name``."""
    geom, _, condim = KINDS[shape.kind]
    body = spec.worldbody.add_body(name=name, pos=[0.5, 0, shape.half_height_m])
    body.add_freejoint(name=name)
    body.add_geom(
        name=name, type=geom, size=[*shape.size_m, 0, 0][:3], mass=mass_kg, rgba=rgba, condim=condim,
        friction=[1, 0.005, 0.001], **WORLD_BITS,
    )  # fmt: skip


def add_object_sensors(spec: mujoco.MjSpec, name: str) -> None:
    """Add the sensors that ``View`` reads: contacts of each finger with the object, and the object's x and y axes."""
    for finger in ("left_finger", "right_finger"):
        add_contact_sensor(spec, f"{finger}_{name}", finger, name)
    for axis in ("x", "y"):
        kind = getattr(mujoco.mjtSensor, f"mjSENS_FRAME{axis.upper()}AXIS")
        spec.add_sensor(name=f"{name}_{axis}_axis", type=kind, objtype=mujoco.mjtObj.mjOBJ_XBODY, objname=name)


def add_cube(spec: mujoco.MjSpec, name: str, half_size_m: float, mass_kg: float, rgba: Rgba) -> None:
    """Add a free cube with its sensors."""
    add_object(spec, name, cube(half_size_m), mass_kg, rgba)
    add_object_sensors(spec, name)


def add_contact_sensor(spec: mujoco.MjSpec, name: str, body1: str, body2: str) -> None:
    """Add a sensor whose one value is the number of contacts between two bodies."""
    sensor = spec.add_sensor(
        name=name, type=mujoco.mjtSensor.mjSENS_CONTACT, objtype=mujoco.mjtObj.mjOBJ_BODY, objname=body1,
        reftype=mujoco.mjtObj.mjOBJ_BODY, refname=body2,
    )  # fmt: skip
    sensor.intprm[:3] = [1 << int(mujoco.mjtConDataField.mjCONDATA_FOUND), 0, 1]  # fields, reduce, rows


def add_tray(spec: mujoco.MjSpec, name: str, inner_half_m: float, wall_height_m: float, rgba: Rgba) -> None:
    """Add a square walled tray on a mocap body: its pose is part of an env's state, and physics does not move it."""
    thick, half, up = 0.004, inner_half_m, wall_height_m / 2
    body = spec.worldbody.add_body(name=name, pos=[0.5, 0.2, 0], mocap=True)
    outer = half + 2 * thick
    walls = [
        ((0, 0, thick / 2), (outer, outer, thick / 2)),
        ((half + thick, 0, up), (thick, outer, up)),
        ((-half - thick, 0, up), (thick, outer, up)),
        ((0, half + thick, up), (outer, thick, up)),
        ((0, -half - thick, up), (outer, thick, up)),
    ]
    for pos, size in walls:
        body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, pos=pos, size=size, rgba=rgba, **WORLD_BITS)


def add_post(spec: mujoco.MjSpec, name: str, radius_m: float, height_m: float, rgba: Rgba) -> None:
    """Add an upright cylinder without contacts on a mocap body, which stands on the table."""
    body = spec.worldbody.add_body(name=name, pos=[0.5, 0, 0], mocap=True)
    body.add_geom(
        name=name, type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=[radius_m, height_m / 2, 0], pos=[0, 0, height_m / 2],
        rgba=rgba, contype=0, conaffinity=0, group=2, mass=0,
    )  # fmt: skip


def add_goal(spec: mujoco.MjSpec, name: str, radius_m: float, rgba: Rgba = (0.2, 0.8, 0.3, 0.6)) -> None:
    """Add a visible sphere without contacts on a mocap body, to mark a goal."""
    body = spec.worldbody.add_body(name=name, pos=[0.5, 0, 0.2], mocap=True)
    body.add_geom(
        name=name, type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[radius_m, 0, 0], rgba=rgba, contype=0, conaffinity=0,
        group=2, mass=0,
    )  # fmt: skip
