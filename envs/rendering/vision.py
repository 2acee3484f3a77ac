"""Images for policies: of all simulations of a pool, thousands per second, without OpenGL or a GPU.

    Lens: pose of the camera ─► Ground: table, floor and sky ─► still layer ─► moving layer ─► translucent layer
        in each layer   Outlines: tiles that may show a geom ─► solids: ray hits ─► shading of the nearest

``embodied.envs.rendering.cameras.render`` renders better images for videos and takes longer. Here the robot has only a
few geoms (such as ``assets/franka/coarse.xml``) and there are no shadows. Rays are cast only where they can hit a geom,
all rays of one type of geom at once.

Suffixes: n simulations, h and w pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError, unknown_name
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.rendering.appearance import COLLISION_GROUP, add_geoms
from embodied.envs.rendering.camera_randomization import CameraRandomization, Lens, Scenery
from embodied.envs.rendering.cameras import GROUPS, Camera, Ids
from embodied.envs.rendering.frames import Frame
from embodied.envs.rendering.painter import GROUND, Painter

CAMERAS = {
    "front": Camera("front", fovy_deg=32.0, pos=(1.2, -0.15, 0.8), lookat=(0.5, 0.0, 0.05)),
    "wrist": Camera("wrist", mount="wrist"),
}
OBJECTS, ROBOT = 0, (1, 2, 3, 4)  # groups of the twin's geoms other than GROUND, see assets/franka/coarse.xml
MIN_SIMS_PER_THREAD = 64


def find_camera(name: str) -> Camera:
    """Return the camera of that name in ``CAMERAS``; UserError that lists the names for an unknown one."""
    if name not in CAMERAS:
        raise unknown_name("camera", name, CAMERAS)
    return CAMERAS[name]


class CameraRig:
    """Render the images of several cameras in all simulations of ``batch``, whose kinematics must be current.

    The arrays that a rig binds are filled by the batch's next call; a new rig can render only after it.

    spec: of the batch's model. visuals: MJCF file with the few geoms to show of robot, table and floor (groups:
    assets/franka/coarse.xml). num_threads: 0 is the batch's number. cull: cast only rays that can hit a geom; images
    are the same. UserError for no cameras or equal names, other groups than the default, a mount that the model lacks,
    or a randomisation range that is too large for a camera.
    """

    model: mujoco.MjModel
    """The twin's model; ``segmentation`` has ids of its geoms."""

    def __init__(
        self,
        batch: Batch,
        spec: mujoco.MjSpec,
        visuals: Path,
        cameras: Sequence[Camera],
        randomization: CameraRandomization | None = None,
        num_threads: int = 0,
        cull: bool = True,
    ) -> None:
        names = [camera.name for camera in cameras]
        if not names or len(set(names)) < len(names):
            raise UserError(f"cameras: got the names {names}, allowed: one at least, each once")
        for camera in cameras:
            if camera.groups != GROUPS:
                raise UserError(f"camera '{camera.name}': got groups {camera.groups}, allowed for a policy: {GROUPS}")
        randomization = randomization or CameraRandomization()
        coarse = _coarse_scene(spec, visuals)
        self.batch, self.model = batch, coarse.compile()
        self.lenses = [Lens(camera, batch, randomization) for camera in cameras]
        group = self.model.geom_group
        self.scenery = Scenery(self.model, batch.nsim, randomization, np.isin(group, ROBOT), group == GROUND)
        count = min(num_threads or batch.nthread, -(-batch.nsim // MIN_SIMS_PER_THREAD))
        shares = np.array_split(np.arange(batch.nsim), count)
        self._painters = [Painter(batch, coarse, self.model, share, self.scenery, cull) for share in shares]
        self._threads = ThreadPoolExecutor(len(shares), "camera")
        self.start(np.arange(batch.nsim), None)

    def start(self, ids: Ids, rng: EpisodeRng | None) -> None:
        """Prepare for the episodes that begin in simulations ``ids`` [n] (sorted and unique).

        Copy the geoms' shapes and colours from the simulations, and draw the randomisation (none if ``rng`` is None).
        """
        for lens in self.lenses:
            lens.start(ids, rng)
        self.scenery.start(ids, rng, np.concatenate([painter.copy_geoms(ids) for painter in self._painters]))

    def render(self, ids: Ids | None = None, depth: bool = False, segmentation: bool = False) -> dict[str, Tensor]:
        """Render simulations ``ids`` (sorted and unique; None: all) with every camera.

        Returns ``images.<name>`` uint8 [n, h, w, 3]; on request ``depth.<name>`` float32 [n, h, w] in metres along the
        optical axis (inf: the sky) and ``segmentation.<name>`` int32 [n, h, w], ids of ``model``'s geoms (-1: the sky).
        """
        sims = np.arange(self.batch.nsim) if ids is None else ids
        sizes = [(lens.camera.height, lens.camera.width) for lens in self.lenses]
        frames = [Frame.empty(len(sims), *size, geoms=segmentation) for size in sizes]

        def render_share(painter: Painter) -> None:
            for lens, frame in zip(self.lenses, frames, strict=True):
                painter.paint(lens, sims, frame)

        list((self._threads.map if len(self._painters) > 1 else map)(render_share, self._painters))
        outputs: dict[str, Tensor] = {}
        for lens, frame in zip(self.lenses, frames, strict=True):
            outputs[f"images.{lens.camera.name}"] = torch.from_numpy(frame.rgb)
            if depth:
                outputs[f"depth.{lens.camera.name}"] = torch.from_numpy(frame.depth)
            if frame.geom is not None:
                outputs[f"segmentation.{lens.camera.name}"] = torch.from_numpy(frame.geom)
        return outputs


def _coarse_scene(spec: mujoco.MjSpec, visuals: Path) -> mujoco.MjSpec:
    """Return the twin's scene: ``spec`` with the geoms of ``visuals`` and without hidden geoms."""
    spec = spec.copy()
    for body in spec.bodies:
        if not body.explicitinertial and body.name != "world":  # the geoms that give its mass may be deleted
            body.explicitinertial, body.mass, body.inertia = True, 1.0, [1.0, 1.0, 1.0]
        for geom in body.geoms:
            table = body.name == "world" and geom.type == mujoco.mjtGeom.mjGEOM_PLANE
            if table or geom.group >= COLLISION_GROUP:
                spec.delete(geom)
            else:
                geom.group = OBJECTS
    add_geoms(spec, visuals)
    return spec
