"""The scene as cameras see it: visual geoms in twin simulations, and camera poses, colours and light that may vary.

A geom costs time in every substep even if it collides with nothing (the visual geoms of the Panda: 12%). So images are
rendered from a *twin*: simulations of a model with visual geoms whose positions are copied from those that are stepped.
Randomisation is drawn by ``EpisodeRng``: the same env seed and episode give the same images.
"""

from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.rendering.cameras import SUN, Array, Array32, Camera, Ids, look_at, mounted_camera
from embodied.envs.rendering.config import CameraRandomization

PREFIXES = ("", "left/", "right/")  # of the names of one robot's bodies, and of those of two
COLLISION_GROUP = 3  # geoms of this group and above are not shown
SYNCED_FIELDS = ("geom_type", "geom_size", "geom_pos", "geom_rgba", "geom_rbound", "geom_aabb")
"""Fields of the model in which simulations may differ."""


def add_visuals(spec: mujoco.MjSpec, file: Path | None) -> mujoco.MjModel:
    """Return the model of a scene with the visual geoms of an MJCF file; ``spec`` is not changed.

    The state keeps its layout. The file's table and floor replace the planes. Without a file the collision geoms are
    shown.
    """
    spec = spec.copy()
    if file is None:
        for geom in spec.geoms:
            geom.group = min(geom.group, COLLISION_GROUP - 1)
        return spec.compile()
    for geom in spec.worldbody.geoms:
        if geom.type == mujoco.mjtGeom.mjGEOM_PLANE:
            geom.group = COLLISION_GROUP
    add_geoms(spec, mujoco.MjModel.from_xml_path(str(file)))
    return spec.compile()


def add_geoms(spec: mujoco.MjSpec, visuals: mujoco.MjModel) -> None:
    """Add geoms and materials of a robot's looks, without contacts or mass, to its bodies of the same names."""
    for material in range(visuals.nmat):
        spec.add_material(
            name=visuals.material(material).name,
            rgba=visuals.mat_rgba[material],
            specular=visuals.mat_specular[material],
        )
    for geom in range(visuals.ngeom):
        of, name = visuals.body(visuals.geom_bodyid[geom]).name, visuals.geom(geom).name
        material = visuals.geom_matid[geom]
        for body in robot_bodies(spec, of):
            body.add_geom(
                name=name and body.name.removesuffix(of) + name, type=visuals.geom_type[geom],
                size=visuals.geom_size[geom], pos=visuals.geom_pos[geom], quat=visuals.geom_quat[geom],
                material="" if material < 0 else visuals.material(material).name, group=visuals.geom_group[geom],
                rgba=visuals.geom_rgba[geom], contype=0, conaffinity=0, mass=0,
            )  # fmt: skip


def robot_bodies(spec: mujoco.MjSpec, name: str) -> list[Any]:
    """Return the robot's body of that name in a scene, or those of both robots.

    A body whose name an object has too is called ``robot_<name>``.
    """
    found = [spec.body(f"robot_{name}")] if spec.body(f"robot_{name}") else [spec.body(x + name) for x in PREFIXES]
    return [body for body in found if body is not None]


class Twin:
    """Simulations of a model with visual geoms, with positions copied from simulations ``sims`` of ``source``.

    The model must have the source's bodies and joints. Geoms correspond by name. nthread: threads that cast rays.
    """

    def __init__(self, source: Batch, model: mujoco.MjModel, sims: NDArray[np.integer], nthread: int) -> None:
        self.source, self.sims = source, sims
        self.batch = Batch(model, len(sims), nthread)
        by_name = {model.geom(geom).name: geom for geom in range(model.ngeom) if model.geom(geom).name}
        names = [source.model.geom(geom).name for geom in range(source.model.ngeom)]
        pairs = [(geom, by_name[name]) for geom, name in enumerate(names) if name in by_name]
        self._source_geoms, self._twin_geoms = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def copy_positions(self) -> None:
        """Copy the positions of joints and mocap bodies from the source."""
        for field in ("qpos", "mocap_pos", "mocap_quat"):
            self.batch.bind(field)[:] = self.source.bind(field)[self.sims]

    def copy_geoms(self, rows: NDArray[np.integer] | slice = slice(None)) -> None:
        """Copy the fields of named geoms that differ by simulation (``Batch.expand``) to twins ``rows``."""
        twins = np.arange(len(self.sims))[rows]
        for field in SYNCED_FIELDS:
            values = self.source.expanded(field)
            if values is not None:
                changed = values[np.ix_(self.sims[rows], self._source_geoms)]
                self.batch.expand(field)[np.ix_(twins, self._twin_geoms)] = changed


class Lens:
    """Pose and field of view of one camera in each simulation of ``batch``, whose kinematics must be current.

    ``pos_N3``, ``rotation_N33``: its pose, in the frame of its mount if it has one. ``step_N``: see ``pose``.
    UserError for ranges that could put the camera at its lookat point or make its field of view impossible.
    """

    def __init__(self, camera: Camera, batch: Batch, randomization: CameraRandomization) -> None:
        self.camera, self.randomization = camera, randomization
        self.mount: tuple[Array, Array] | None = None  # pose of the MJCF camera in each simulation
        if camera.mount is None:
            key, self._position_m = "position_m", randomization.position_m
            self._pos, self._aim = np.array(camera.pos, np.float64), np.array(camera.lookat, np.float64)
            self._up, self._fovy_deg = (0.0, 0.0, 1.0), camera.fovy_deg
        else:
            key, self._position_m = "mounted_position_m", randomization.mounted_position_m
            self._pos, self._aim, self._up = np.zeros(3), np.array([0.0, 0.0, -1.0]), (0.0, 1.0, 0.0)
            cam = mounted_camera(batch.model, camera)
            self._fovy_deg = float(batch.model.cam_fovy[cam])
            self.mount = batch.bind("cam_xpos")[:, cam], batch.bind("cam_xmat")[:, cam].reshape(-1, 3, 3)
        reach_m = float(np.linalg.norm(self._aim - self._pos)) / np.sqrt(3)
        for what, got, limit in (
            (f"{key} + lookat_m", self._position_m + randomization.lookat_m, reach_m),
            ("fovy_deg", randomization.fovy_deg, min(self._fovy_deg, 180 - self._fovy_deg)),
        ):
            if got >= limit:
                allowed = f"allowed for camera '{camera.name}': below {limit:.3g}"
                raise UserError(f"camera_randomization.{what}: got {got:g}, {allowed}")
        count = batch.nsim
        self.pos_N3, self.rotation_N33, self.step_N = np.empty((count, 3)), np.empty((count, 3, 3)), np.empty(count)

    def start(self, ids: Ids, rng: EpisodeRng | None) -> None:
        """Draw the camera's pose for the episodes that begin in simulations ``ids`` [n]; nominal if ``rng`` is None."""
        n, jitter, stream = len(ids), self.randomization, f"camera/{self.camera.name}"
        pos, aim = np.tile(self._pos, (n, 1)), np.tile(self._aim, (n, 1))
        fovy_deg = np.full(n, self._fovy_deg)
        if rng is not None:
            pos += self._position_m * _signed(rng, f"{stream}/position", 3)
            aim += jitter.lookat_m * _signed(rng, f"{stream}/lookat", 3)
            fovy_deg += jitter.fovy_deg * _signed(rng, f"{stream}/fovy", 1)[:, 0]
        self.pos_N3[ids] = pos
        self.rotation_N33[ids] = look_at(pos, aim, self._up)
        self.step_N[ids] = 2.0 * np.tan(np.deg2rad(fovy_deg) / 2.0) / self.camera.height

    def pose(self, ids: Ids) -> tuple[Array, Array, Array]:
        """Return position [n, 3], camera-to-world rotation [n, 3, 3] and size of a pixel at unit depth [n]."""
        pos_n3, rotation_n33, step_n = self.pos_N3[ids], self.rotation_N33[ids], self.step_N[ids]
        if self.mount is not None:
            base_n3, base_n33 = self.mount[0][ids], self.mount[1][ids]
            pos_n3 = base_n3 + (base_n33 * pos_n3[:, None]).sum(-1)
            rotation_n33 = (base_n33[..., None] * rotation_n33[:, None]).sum(2)
        return pos_n3, rotation_n33, step_n


class Scenery:
    """Colours of the geoms of ``model``, and the light, in each simulation. robot, ground: their geoms, bool [g]."""

    rgba_Ng4: Array32
    """Red, green and blue, 0 to 255, and opacity, 0 to 1."""
    sun_N3: Array32
    """Unit vectors towards the light."""
    brightness_N: Array32
    """Factor of all light."""

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        randomization: CameraRandomization,
        robot: NDArray[np.bool_],
        ground: NDArray[np.bool_],
    ) -> None:
        self.rgba_Ng4 = np.zeros((num_envs, model.ngeom, 4), np.float32)
        self.sun_N3, self.brightness_N = np.zeros((num_envs, 3), np.float32), np.zeros(num_envs, np.float32)
        self._jitter = randomization
        self._colors: list[tuple[str, float, Any]] = [("robot", randomization.robot_color, robot)]
        for geom in np.flatnonzero(ground):
            self._colors.append((f"ground/{model.geom(geom).name}", randomization.table_color, [geom]))
        for body in range(model.nbody):
            geoms = ~robot & ~ground & (model.geom_bodyid == body)
            self._colors.append((f"object/{model.body(body).name}", randomization.object_color, geoms))

    def start(self, ids: Ids, rng: EpisodeRng | None, rgba_ng4: Array) -> None:
        """Draw colours and light of simulations ``ids`` [n]; nominal if no ``rng``. rgba: nominal colours (0 to 1)."""
        sun, brightness = np.tile(SUN, (len(ids), 1)), np.ones(len(ids))
        if rng is not None:
            rgba_ng4 = rgba_ng4.copy()
            for stream, most, geoms in self._colors:
                rgba_ng4[:, geoms, :3] += most * _signed(rng, f"camera/{stream}", 3)[:, None]
            rgba_ng4[..., :3].clip(0.0, 1.0, out=rgba_ng4[..., :3])
            sun += self._jitter.light_direction * _signed(rng, "camera/light", 3)
            sun /= np.linalg.norm(sun, axis=-1, keepdims=True)
            brightness += self._jitter.brightness * _signed(rng, "camera/brightness", 1)[:, 0]
        self.rgba_Ng4[ids] = rgba_ng4 * [255.0, 255.0, 255.0, 1.0]
        self.sun_N3[ids], self.brightness_N[ids] = sun, brightness


def _signed(rng: EpisodeRng, stream: str, size: int) -> Array:
    """Draw numbers [n, size], uniform in [-1, 1)."""
    return 2.0 * rng.unit(stream, size) - 1.0
