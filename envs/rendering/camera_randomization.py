"""Randomisation of images: camera poses, colours and light of each env, drawn again for every episode.

Draws are those of ``EpisodeRng``: the same env seed and episode give the same images, whatever the number of envs.
"""

from __future__ import annotations

from typing import Annotated

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray
from pydantic import Field

from embodied.core.errors import UserError
from embodied.core.options import Fraction, config_dataclass
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.rendering.cameras import FAST, Array, Camera, Ids, look_at, mounted_camera

Array32 = NDArray[np.float32]


@config_dataclass
class CameraRandomization:
    """Ranges of the randomisation: every draw is uniform in [-x, x] and added to the nominal value; 0 is off."""

    position_m: Fraction = 0.0
    """Each coordinate of the position of a camera without a mount."""
    mounted_position_m: Fraction = 0.0
    """Each coordinate of the position of a mounted camera, in its own frame; it looks at the point 1 m ahead."""
    lookat_m: Fraction = 0.0
    """Each coordinate of the point in the middle of the image."""
    fovy_deg: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Vertical field of view."""
    object_color: Fraction = 0.0
    """Red, green and blue (0 to 1) of each body of the task."""
    robot_color: Fraction = 0.0
    """Red, green and blue of the whole robot."""
    table_color: Fraction = 0.0
    """Red, green and blue of the table and the floor."""
    light_direction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Each coordinate of the unit vector towards the light."""
    brightness: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Brightness of all light, relative to 1."""

    @property
    def moves_cameras(self) -> bool:
        """Whether any pose or field of view is randomised."""
        return any((self.position_m, self.mounted_position_m, self.lookat_m, self.fovy_deg))

    @property
    def changes_ground(self) -> bool:
        """Whether the ground's colours or the light are randomised."""
        return any((self.table_color, self.light_direction, self.brightness))

    @property
    def changes_appearance(self) -> bool:
        """Whether any colour or the light is randomised."""
        return self.changes_ground or any((self.object_color, self.robot_color))


class Lens:
    """Pose and field of view of one camera in each simulation of ``batch``, whose kinematics must be current."""

    def __init__(self, camera: Camera, batch: Batch, randomization: CameraRandomization) -> None:
        self.camera, self.randomization = camera, randomization
        self._mount: tuple[Array, Array] | None = None
        self._jitter = "position_m" if camera.mount is None else "mounted_position_m"
        if camera.mount is None:
            self._pos, self._aim = np.array(camera.pos, np.float64), np.array(camera.lookat, np.float64)
            self._up, self._fovy_deg = (0.0, 0.0, 1.0), camera.fovy_deg
        else:
            self._pos, self._aim, self._up = np.zeros(3), np.array([0.0, 0.0, -1.0]), (0.0, 1.0, 0.0)
            cam = mounted_camera(batch.model, camera)
            self._fovy_deg = float(batch.model.cam_fovy[cam])
            self._mount = batch.bind("cam_xpos")[:, cam], batch.bind("cam_xmat")[:, cam].reshape(-1, 3, 3)
        self._check()
        count = batch.nsim
        self._pos_N3, self._rotation_N33, self._step_N = np.empty((count, 3)), np.empty((count, 3, 3)), np.empty(count)
        self.start(np.arange(count), None)

    def _check(self) -> None:
        """Raise UserError if a draw could put the camera at its lookat point or make the field of view impossible."""
        jitter = self.randomization
        together = f"{self._jitter} + lookat_m", getattr(jitter, self._jitter) + jitter.lookat_m
        limits = {
            together: float(np.linalg.norm(self._aim - self._pos)) / np.sqrt(3),
            ("fovy_deg", jitter.fovy_deg): min(self._fovy_deg, 180 - self._fovy_deg),
        }
        for (what, got), limit in limits.items():
            if got >= limit:
                camera = self.camera.name
                raise UserError(
                    f"camera_randomization.{what}: got {got:g}, allowed for camera '{camera}': below {limit:.3g}"
                )

    @property
    def mounted(self) -> bool:
        """Whether the camera moves with a body."""
        return self._mount is not None

    def start(self, ids: Ids, rng: EpisodeRng | None) -> None:
        """Draw the camera's pose for the episodes that begin in simulations ``ids`` [n]; nominal if ``rng`` is None."""
        n, jitter, stream = len(ids), self.randomization, f"camera/{self.camera.name}"
        pos, aim = np.tile(self._pos, (n, 1)), np.tile(self._aim, (n, 1))
        fovy_deg = np.full(n, self._fovy_deg)
        if rng is not None and jitter.moves_cameras:
            pos += getattr(jitter, self._jitter) * _signed(rng, f"{stream}/position", 3)
            aim += jitter.lookat_m * _signed(rng, f"{stream}/lookat", 3)
            fovy_deg += jitter.fovy_deg * _signed(rng, f"{stream}/fovy", 1)[:, 0]
        self._pos_N3[ids] = pos
        self._rotation_N33[ids] = look_at(pos, aim, self._up)
        self._step_N[ids] = 2.0 * np.tan(np.deg2rad(fovy_deg) / 2.0) / self.camera.height

    def pose(self, ids: Ids) -> tuple[Array, Array, Array]:
        """Return position [n, 3], camera-to-world rotation [n, 3, 3] and size of a pixel at unit depth [n]."""
        pos_n3, rotation_n33, step_n = self._pos_N3[ids], self._rotation_N33[ids], self._step_N[ids]
        if self._mount is not None:
            base_n3, base_n33 = self._mount[0][ids], self._mount[1][ids]
            pos_n3 = base_n3 + (base_n33 * pos_n3[:, None]).sum(-1)
            rotation_n33 = (base_n33[..., None] * rotation_n33[:, None]).sum(2)
        return pos_n3, rotation_n33, step_n


class Scenery:
    """Colours of the geoms of ``model``, and the light, in each of ``num_envs`` simulations.

    robot: which geoms are the robot's, bool [g]. ground: which are the table's and the floor's; all others are the
    task's objects.
    """

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
        self.randomization = randomization
        self.rgba_Ng4 = np.zeros((num_envs, model.ngeom, 4), np.float32)
        self.sun_N3 = np.zeros((num_envs, 3), np.float32)
        self.brightness_N = np.zeros(num_envs, np.float32)
        self._robot = robot
        self._ground = {model.geom(geom).name: geom for geom in np.flatnonzero(ground)}
        self._objects = {
            model.body(body).name: ~robot & ~ground & (model.geom_bodyid == body) for body in range(model.nbody)
        }

    def start(self, ids: Ids, rng: EpisodeRng | None, rgba_ng4: Array) -> None:
        """Draw colours and light of simulations ``ids`` [n]; nominal if no ``rng``. rgba: nominal colours (0 to 1)."""
        jitter, n = self.randomization, len(ids)
        sun, brightness = np.tile(np.asarray(FAST.sun) / np.linalg.norm(FAST.sun), (n, 1)), np.ones(n)
        if rng is not None and jitter.changes_appearance:
            rgba_ng4 = rgba_ng4.copy()
            rgba_ng4[..., :3] = (rgba_ng4[..., :3] + self._offsets(rng)).clip(0.0, 1.0)
            sun += jitter.light_direction * _signed(rng, "camera/light", 3)
            sun /= np.linalg.norm(sun, axis=-1, keepdims=True)
            brightness += jitter.brightness * _signed(rng, "camera/brightness", 1)[:, 0]
        self.rgba_Ng4[ids] = rgba_ng4 * [255.0, 255.0, 255.0, 1.0]
        self.sun_N3[ids], self.brightness_N[ids] = sun, brightness

    def _offsets(self, rng: EpisodeRng) -> Array:
        """Draw the offset of each geom's colour, [n, g, 3]."""
        jitter = self.randomization
        offset_ng3 = np.zeros((len(rng), len(self._robot), 3))
        offset_ng3[:, self._robot] = jitter.robot_color * _signed(rng, "camera/robot", 3)[:, None]
        for name, geom in self._ground.items():
            offset_ng3[:, geom] = jitter.table_color * _signed(rng, f"camera/ground/{name}", 3)
        for body, geoms in self._objects.items():
            offset_ng3[:, geoms] = jitter.object_color * _signed(rng, f"camera/object/{body}", 3)[:, None]
        return offset_ng3


def _signed(rng: EpisodeRng, stream: str, size: int) -> Array:
    """Draw numbers [n, size], uniform in [-1, 1)."""
    return 2.0 * rng.unit(stream, size) - 1.0
