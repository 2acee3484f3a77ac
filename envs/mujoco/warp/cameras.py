"""Images of policies' cameras of a ``WarpBatch``, made on its device: those of ``CameraRig`` but for rounding."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.graphs import RECORDING
from embodied.core.types import Obs
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.warp.batch import WarpBatch
from embodied.envs.rendering.appearance import SYNCED_FIELDS, Twin
from embodied.envs.rendering.cameras import Array, Camera, Ids, field_values, geom_colors, mounted_camera
from embodied.envs.rendering.coarse import GROUND
from embodied.envs.rendering.config import CameraRandomization
from embodied.envs.rendering.solids import SOLIDS
from embodied.envs.rendering.vision import Rig


class DeviceRig(Rig):
    """Paint the images of several cameras in all envs of ``sims``. models: their models on the CPU.

    spec, looks, cameras, randomization: as of ``CameraRig``. UserError also for geoms that are none of ``SOLIDS``.
    """

    def __init__(
        self,
        sims: WarpBatch,
        models: Batch,
        spec: mujoco.MjSpec,
        looks: mujoco.MjModel,
        cameras: Sequence[Camera],
        randomization: CameraRandomization,
    ) -> None:
        super().__init__(models, spec, looks, cameras, randomization)
        model, self.device = self.model, sims.device
        for geom in np.flatnonzero((model.geom_group != GROUND) & ~np.isin(model.geom_type, list(SOLIDS))):
            kind, body = mujoco.mjtGeom(model.geom_type[geom]).name, model.body(model.geom_bodyid[geom]).name
            raise UserError(
                f"sim=warp: its cameras do not show {body}, which has a geom of type {kind}: use sim=mujoco"
            )
        import warp

        from embodied.envs.mujoco.warp import paint

        self._warp, self._kernel, self._warp_device = warp, paint.paint, warp.device_from_torch(sims.device)
        with RECORDING:
            warp.load_module(paint, self._warp_device)
        self._twin, self._live = Twin(models, model, np.arange(models.nsim), 1), dict[str, Tensor]()
        self.start(np.arange(models.nsim), None)
        turn_G9 = np.empty((model.ngeom, 9))
        for row, quat in zip(turn_G9, model.geom_quat, strict=True):
            mujoco.mju_quat2Mat(row, quat)
        of_bodies, live = [sims.bind("xpos"), sims.bind("xmat")], self._live
        fixed = [torch.tensor(x).to(sims.device) for x in (model.geom_bodyid, np.float32(turn_G9))]
        of_geoms = [*fixed, live["geom_pos"], live["kind"], live["size"], live["rgba"]]
        scene = [live["sun"], live["brightness"], *of_bodies, *of_geoms]
        ground = [model.geom(name).id for name in ("table_top", "floor")]
        self._inputs = []  # of the kernel after ``shown_N``, by camera
        for camera in self.cameras:
            # the world, body 0, carries a camera without a mount
            mount = 0 if camera.mount is None else mounted_camera(models.model, camera)
            mounts = of_bodies if camera.mount is None else [sims.bind("cam_xpos"), sims.bind("cam_xmat")]
            lens = [live[f"{camera.name}/{x}"] for x in ("pos", "rotation", "step")]
            self._inputs.append([mount, *map(self._array, [*mounts, *lens, *scene]), *ground])

    def start(self, ids: Ids, rng: EpisodeRng | None) -> None:
        varies = any(self.batch.expanded(name) is not None for name in SYNCED_FIELDS)
        if self._live and not varies and self.randomization == CameraRandomization():
            return
        super().start(ids, rng)
        now = {"rgba": self.scenery.rgba_Ng4, "sun": self.scenery.sun_N3, "brightness": self.scenery.brightness_N}
        for lens in self.lenses:
            of_lens = ("pos", lens.pos_N3), ("rotation", lens.rotation_N33.reshape(-1, 9)), ("step", lens.step_N)
            now |= {f"{lens.camera.name}/{name}": values for name, values in of_lens}
        self._send(ids, {name: values[ids] for name, values in now.items()})

    def copy_geoms(self, ids: Ids) -> Array:
        self._twin.copy_geoms(ids)
        fields = ("type", "size", "rbound", "pos")
        kind, size, radius, pos = (field_values(self._twin.batch, f"geom_{x}", ids) for x in fields)
        self._send(ids, {"kind": kind, "size": np.concatenate([size, radius[..., None]], -1), "geom_pos": pos})
        return geom_colors(self._twin.batch, ids)

    def paint(self, images: Obs, shown_N: Tensor) -> None:
        """Write ``images.<name>``, uint8 [N, h, w, 3], of the envs that are shown. It never waits for the device."""
        gpu = self.device.type == "cuda"
        stream = self._warp.stream_from_torch(torch.cuda.current_stream(self.device)) if gpu else None
        with nullcontext() if gpu else RECORDING:  # on a CPU a launch would be a part of what another thread records
            for camera, inputs in zip(self.cameras, self._inputs, strict=True):
                image = images[f"images.{camera.name}"]
                arrays = [self._warp.from_torch(x) for x in (shown_N, image)]
                inputs = [arrays[0], *inputs, arrays[1]]
                self._warp.launch(self._kernel, image.shape[:3], inputs, device=self._warp_device, stream=stream)

    def empty(self) -> Obs:
        """Return images to paint, uninitialised."""
        return {
            f"images.{c.name}": torch.empty(
                self.batch.nsim, c.height, c.width, 3, dtype=torch.uint8, device=self.device
            )
            for c in self.cameras
        }

    def _send(self, ids: Ids, values: Mapping[str, NDArray[Any]]) -> None:
        """Write the rows ``ids`` of live tensors, which keep their addresses."""
        rows = torch.from_numpy(ids).to(self.device)
        for name, value_n in values.items():
            new = torch.tensor(value_n).to(self.device)
            new = new.float() if new.is_floating_point() else new.int()
            self._live.setdefault(name, new.new_zeros(self.batch.nsim, *new.shape[1:]))[rows] = new

    def _array(self, values: Tensor) -> Any:
        """Return an array of Warp over a tensor: of numbers, or of the vectors or matrices along the last axis."""
        warp = self._warp
        if not values.is_floating_point() or values.ndim == 1:
            return warp.from_torch(values)
        if values.shape[-1] == 9:
            return warp.from_torch(values.unflatten(-1, (3, 3)), dtype=warp.mat33)
        return warp.from_torch(values, dtype={3: warp.vec3, 4: warp.vec4}[values.shape[-1]])
