"""What simulations look like: geoms to see that the physics does without.

A geom costs time in every substep even if it collides with nothing (the Panda's shells: 12%), so the shells of
``assets/franka/visual.xml`` are not in the model that is stepped. Pictures are taken of a twin that has them, whose
state follows. Videos show the shells; policies' cameras the few geoms of ``coarse.xml``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from envs.mujoco.scene import PANDA_XML, panda_on_table
from envs.rendering.cameras import DEFAULT_RGBA, VIDEO, Camera, Look, render

if TYPE_CHECKING:
    from envs.mujoco.pool import MujocoPool

COLLISION_GROUP = 3
FOLLOWED = ("geom_type", "geom_size", "geom_rgba", "geom_rbound", "geom_aabb")  # per-simulation fields of a twin
SOLVED = np.array([46, 160, 67], np.uint8)
FRONT = Camera("front", width=640, height=480, fovy_deg=36.0, pos=(1.75, -1.1, 0.85), lookat=(0.3, 0.0, 0.22))


def dress(spec: mujoco.MjSpec) -> mujoco.MjModel:
    """The model of a scene with the robot's shells and a table; ``spec`` stays as it is.

    Nothing that is added collides or weighs, and the state (qpos, mocap, ...) keeps its layout. World planes, on
    which the physics runs, move to the hidden group 3: the table and the floor below it are shown instead.
    """
    spec = spec.copy()
    for geom in spec.worldbody.geoms:
        if geom.type == mujoco.mjtGeom.mjGEOM_PLANE:
            geom.group = COLLISION_GROUP
    add_looks(spec, "visual.xml")
    return spec.compile()


def add_looks(spec: mujoco.MjSpec, file: str) -> None:
    """Add the geoms and materials of a file beside ``panda.xml``, without contacts or mass, to the bodies it names."""
    looks = mujoco.MjModel.from_xml_path(str(PANDA_XML.with_name(file)))
    for material in range(looks.nmat):
        spec.add_material(
            name=looks.material(material).name, rgba=looks.mat_rgba[material], specular=looks.mat_specular[material]
        )
    for geom in range(looks.ngeom):
        spec.body(looks.body(looks.geom_bodyid[geom]).name).add_geom(
            name=looks.geom(geom).name, type=looks.geom_type[geom], size=looks.geom_size[geom],
            pos=looks.geom_pos[geom], quat=looks.geom_quat[geom], material=looks.material(looks.geom_matid[geom]).name,
            rgba=DEFAULT_RGBA, group=looks.geom_group[geom], contype=0, conaffinity=0, mass=0,
        )  # fmt: skip


class Twin:
    """Simulations of a dressed model that are only looked at: what they show is that of the batch ``source``.

    sims: which simulations of it, in order; twin i follows sims[i]. nthread: threads that cast rays. The model must
    have the source's bodies and joints, as ``dress`` leaves them.
    """

    def __init__(self, source: Batch, model: mujoco.MjModel, sims: NDArray[np.integer], nthread: int) -> None:
        self.source, self.sims = source, sims
        self.batch = Batch(model, len(sims), nthread)
        ours = {model.geom(geom).name: geom for geom in range(model.ngeom)}
        pairs = [(geom, ours.get(source.model.geom(geom).name)) for geom in range(source.model.ngeom)]
        named = [(theirs, geom) for theirs, geom in pairs if geom is not None and model.geom(geom).name]
        self._theirs, self._ours = np.array(named, dtype=np.int64).reshape(-1, 2).T

    def follow(self) -> None:
        """Take over the positions of joints and mocap bodies."""
        for field in ("qpos", "mocap_pos", "mocap_quat"):
            self.batch.bind(field)[:] = self.source.bind(field)[self.sims]

    def sync(self, rows: NDArray[np.integer] | slice = slice(None)) -> None:
        """Take over the types, sizes and colours that geoms have in single simulations (``Batch.expand``), in twins
        ``rows``. Geoms are the same where their names are; one without a name keeps the model's values."""
        sims = self.sims[rows]
        for field in FOLLOWED:
            values = self.source.expanded(field)
            if values is not None:
                self.batch.expand(field)[np.ix_(np.arange(len(self.sims))[rows], self._ours)] = values[
                    np.ix_(sims, self._theirs)
                ]


class Viewer:
    """Takes pictures of the simulations of a pool, dressed. The pool's own simulations are only read.

    mark_solved: put a green frame around the picture of an env where the task is solved now.
    """

    def __init__(self, pool: MujocoPool, camera: Camera = FRONT, look: Look = VIDEO, mark_solved: bool = True) -> None:
        spec = panda_on_table()
        pool.task.build_scene(spec)
        self.pool, self.camera, self.look, self.mark_solved = pool, camera, look, mark_solved
        self.twin = Twin(pool.batch, dress(spec), np.arange(pool.num_envs), pool.batch.nthread)

    def render(self, ids: Sequence[int] | None = None) -> NDArray[np.uint8]:
        """Colour pictures uint8 [n, h, w, 3] of envs ``ids`` (None: all)."""
        self.twin.follow()
        self.twin.sync()
        rgb: NDArray[np.uint8] = render(self.twin.batch, self.camera, ids, self.look)["rgb"]
        if not self.mark_solved:
            return rgb
        solved = self.pool.task.success().numpy()
        solved = solved if ids is None else solved[np.asarray(ids)]
        border = max(2, self.camera.height // 80)
        inner = (slice(None), slice(border, -border), slice(border, -border))
        framed = np.broadcast_to(SOLVED, rgb.shape).copy()
        framed[inner] = rgb[inner]
        return np.where(solved[:, None, None, None], framed, rgb)
