"""Where policies' cameras stand, what colours they see and how it is lit, in each env; drawn anew with every episode.

Draws are those of ``EpisodeRng``: the same env seed and episode give the same pictures, whatever the number of envs.
"""

from __future__ import annotations

from typing import Annotated

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray
from pydantic import Field

from embodied.core.errors import UserError
from embodied.core.options import Share, config_dataclass
from envs.common.seeding import EpisodeRng
from envs.rendering.cameras import FAST, Array, Camera, Ids, look_at, mounted_camera

Array32 = NDArray[np.float32]


@config_dataclass
class CameraRandomization:
    """How far each episode's pictures may be from the nominal ones; every draw is uniform in [-x, x], 0 is off."""

    position_m: Share = 0.0
    """Each coordinate of the position of a camera that stands still."""
    mounted_position_m: Share = 0.0
    """Each coordinate, in its own frame, of a mounted camera, which looks at the point 1 m ahead."""
    lookat_m: Share = 0.0
    """Each coordinate of the point that a camera looks at."""
    fovy_deg: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Vertical field of view."""
    object_color: Share = 0.0
    """Red, green and blue (0 to 1) of each body of the task."""
    robot_color: Share = 0.0
    """Red, green and blue of the whole robot."""
    table_color: Share = 0.0
    """Red, green and blue of the table and the floor."""
    light_direction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Each coordinate of the unit vector towards the light."""
    brightness: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """All light, relative."""

    @property
    def moves_cameras(self) -> bool:
        return any((self.position_m, self.mounted_position_m, self.lookat_m, self.fovy_deg))

    @property
    def changes_ground(self) -> bool:
        return any((self.table_color, self.light_direction, self.brightness))

    @property
    def changes_looks(self) -> bool:
        return self.changes_ground or any((self.object_color, self.robot_color))


class Lens:
    """Pose and field of view of one camera in each of the simulations of ``batch``, whose kinematics are current."""

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
        """The camera must not meet the point that it looks at, nor the field of view vanish."""
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
        """It moves with a body."""
        return self._mount is not None

    def start(self, ids: Ids, rng: EpisodeRng | None) -> None:
        """Place it for the episodes that begin in simulations ``ids`` [n]; nominally without ``rng``."""
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
        """Position [n, 3], camera-to-world rotation [n, 3, 3] and size of a pixel at unit depth [n]."""
        pos_n3, rotation_n33, step_n = self._pos_N3[ids], self._rotation_N33[ids], self._step_N[ids]
        if self._mount is not None:
            base_n3, base_n33 = self._mount[0][ids], self._mount[1][ids]
            pos_n3 = base_n3 + (base_n33 * pos_n3[:, None]).sum(-1)
            rotation_n33 = (base_n33[..., None] * rotation_n33[:, None]).sum(2)
        return pos_n3, rotation_n33, step_n


class Scenery:
    """Colours of the geoms of ``model``, and the light, in each of ``num_envs`` simulations.

    rgba_Ng4: red, green and blue 0 to 255, opacity 0 to 1. sun_N3: unit vectors towards the light. brightness_N: factor
    of all light. robot, ground: which geoms are the robot's and the table's; the rest are the task's objects.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        randomization: CameraRandomization,
        robot: NDArray[np.bool_],
        ground: NDArray[np.bool_],
    ) -> None:
        self.randomization = randomization
        self.rgba_Ng4: Array32 = np.zeros((num_envs, model.ngeom, 4), np.float32)
        self.sun_N3: Array32 = np.zeros((num_envs, 3), np.float32)
        self.brightness_N: Array32 = np.zeros(num_envs, np.float32)
        self._robot = robot
        self._ground = {model.geom(geom).name: geom for geom in np.flatnonzero(ground)}
        self._objects = {
            model.body(body).name: ~robot & ~ground & (model.geom_bodyid == body) for body in range(model.nbody)
        }

    def start(self, ids: Ids, rng: EpisodeRng | None, rgba_ng4: Array) -> None:
        """Paint and light simulations ``ids`` [n], whose geoms have the colours ``rgba`` (0 to 1) nominally."""
        jitter, n = self.randomization, len(ids)
        sun, brightness = np.tile(np.asarray(FAST.sun) / np.linalg.norm(FAST.sun), (n, 1)), np.ones(n)
        if rng is not None and jitter.changes_looks:
            rgba_ng4 = rgba_ng4.copy()
            rgba_ng4[..., :3] = (rgba_ng4[..., :3] + self._offsets(rng)).clip(0.0, 1.0)
            sun += jitter.light_direction * _signed(rng, "camera/light", 3)
            sun /= np.linalg.norm(sun, axis=-1, keepdims=True)
            brightness += jitter.brightness * _signed(rng, "camera/brightness", 1)[:, 0]
        self.rgba_Ng4[ids] = rgba_ng4 * [255.0, 255.0, 255.0, 1.0]
        self.sun_N3[ids], self.brightness_N[ids] = sun, brightness

    def _offsets(self, rng: EpisodeRng) -> Array:
        """What is added to each geom's colour, [n, ngeom, 3]."""
        jitter = self.randomization
        offset_ng3 = np.zeros((len(rng), len(self._robot), 3))
        offset_ng3[:, self._robot] = jitter.robot_color * _signed(rng, "camera/robot", 3)[:, None]
        for name, geom in self._ground.items():
            offset_ng3[:, geom] = jitter.table_color * _signed(rng, f"camera/ground/{name}", 3)
        for body, geoms in self._objects.items():
            offset_ng3[:, geoms] = jitter.object_color * _signed(rng, f"camera/object/{body}", 3)[:, None]
        return offset_ng3


def _signed(rng: EpisodeRng, stream: str, size: int) -> Array:
    """Uniform in [-1, 1), [n, size]."""
    return 2.0 * rng.unit(stream, size) - 1.0
