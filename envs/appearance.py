"""What simulations look like: geoms to see that the physics does without.

A geom costs time in every substep even if it collides with nothing (the Panda's shells: 12%), so the shells of
``assets/franka/visual.xml`` are not in the model that is stepped. Pictures are taken of a twin that has them, whose
state follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from envs.cameras import VIDEO, Camera, Look, render
from envs.pool import MujocoPool
from envs.scene import PANDA_XML, panda_on_table

COLLISION_GROUP = 3
DEFAULT_RGBA = [0.5, 0.5, 0.5, 1.0]  # MuJoCo's mark of a geom that takes its material's colour
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
    looks = mujoco.MjModel.from_xml_path(str(PANDA_XML.with_name("visual.xml")))
    for material in range(looks.nmat):
        spec.add_material(
            name=looks.material(material).name, rgba=looks.mat_rgba[material], specular=looks.mat_specular[material]
        )
    for geom in range(looks.ngeom):
        spec.body(looks.body(looks.geom_bodyid[geom]).name).add_geom(
            type=looks.geom_type[geom], size=looks.geom_size[geom], pos=looks.geom_pos[geom],
            quat=looks.geom_quat[geom], material=looks.material(looks.geom_matid[geom]).name, rgba=DEFAULT_RGBA,
            group=looks.geom_group[geom], contype=0, conaffinity=0, mass=0,
        )  # fmt: skip
    return spec.compile()


class Viewer:
    """Takes pictures of the simulations of a pool, dressed. The pool's own simulations are only read.

    Positions of joints and mocap bodies are shown; per-simulation model fields (``Batch.expand``) are not.
    mark_solved: put a green frame around the picture of an env where the task is solved now.
    """

    def __init__(self, pool: MujocoPool, camera: Camera = FRONT, look: Look = VIDEO, mark_solved: bool = True) -> None:
        spec = panda_on_table()
        pool.task.build_scene(spec)
        self.pool, self.camera, self.look, self.mark_solved = pool, camera, look, mark_solved
        self.twin = Batch(dress(spec), pool.num_envs, pool.batch.nthread)

    def render(self, ids: Sequence[int] | None = None) -> NDArray[np.uint8]:
        """Colour pictures uint8 [n, h, w, 3] of envs ``ids`` (None: all)."""
        for field in ("qpos", "mocap_pos", "mocap_quat"):
            self.twin.bind(field)[:] = self.pool.batch.bind(field)
        rgb: NDArray[np.uint8] = render(self.twin, self.camera, ids, self.look)["rgb"]
        if not self.mark_solved:
            return rgb
        solved = self.pool.task.success().numpy()
        solved = solved if ids is None else solved[np.asarray(ids)]
        border = max(2, self.camera.height // 80)
        inner = (slice(None), slice(border, -border), slice(border, -border))
        framed = np.broadcast_to(SOLVED, rgb.shape).copy()
        framed[inner] = rgb[inner]
        return np.where(solved[:, None, None, None], framed, rgb)
