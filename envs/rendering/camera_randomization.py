"""Randomisation of images: camera poses, colours and light of each env, drawn again for every episode.

Draws are those of ``EpisodeRng``: the same env seed and episode give the same images, whatever the number of envs.
"""

from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.rendering.cameras import SUN, Array, Array32, Camera, Ids, look_at, mounted_camera
from embodied.envs.rendering.config import CameraRandomization


class Lens:
    """Pose and field of view of one camera in each simulation of ``batch``, whose kinematics must be current.

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
        self._pos_N3, self._rotation_N33, self._step_N = np.empty((count, 3)), np.empty((count, 3, 3)), np.empty(count)

    def start(self, ids: Ids, rng: EpisodeRng | None) -> None:
        """Draw the camera's pose for the episodes that begin in simulations ``ids`` [n]; nominal if ``rng`` is None."""
        n, jitter, stream = len(ids), self.randomization, f"camera/{self.camera.name}"
        pos, aim = np.tile(self._pos, (n, 1)), np.tile(self._aim, (n, 1))
        fovy_deg = np.full(n, self._fovy_deg)
        if rng is not None:
            pos += self._position_m * _signed(rng, f"{stream}/position", 3)
            aim += jitter.lookat_m * _signed(rng, f"{stream}/lookat", 3)
            fovy_deg += jitter.fovy_deg * _signed(rng, f"{stream}/fovy", 1)[:, 0]
        self._pos_N3[ids] = pos
        self._rotation_N33[ids] = look_at(pos, aim, self._up)
        self._step_N[ids] = 2.0 * np.tan(np.deg2rad(fovy_deg) / 2.0) / self.camera.height

    def pose(self, ids: Ids) -> tuple[Array, Array, Array]:
        """Return position [n, 3], camera-to-world rotation [n, 3, 3] and size of a pixel at unit depth [n]."""
        pos_n3, rotation_n33, step_n = self._pos_N3[ids], self._rotation_N33[ids], self._step_N[ids]
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
