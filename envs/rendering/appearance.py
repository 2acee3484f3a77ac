"""Visual geoms, which the stepped model lacks, and the twin simulations that have them.

A geom costs time in every substep even if it collides with nothing (the visual geoms of the Panda: 12%). So images are
rendered from a *twin*: simulations of a model with visual geoms whose positions are copied from those that are stepped.
"""

from pathlib import Path

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.envs.rendering.cameras import DEFAULT_RGBA

COLLISION_GROUP = 3  # geoms of this group and above are not shown
SYNCED_FIELDS = ("geom_type", "geom_size", "geom_rgba", "geom_rbound", "geom_aabb")  # may differ between simulations


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
    add_geoms(spec, file)
    return spec.compile()


def add_geoms(spec: mujoco.MjSpec, file: Path) -> None:
    """Add the geoms and materials of an MJCF file, without contacts or mass, to the bodies of the same names."""
    visuals = mujoco.MjModel.from_xml_path(str(file))
    for material in range(visuals.nmat):
        spec.add_material(
            name=visuals.material(material).name,
            rgba=visuals.mat_rgba[material],
            specular=visuals.mat_specular[material],
        )
    for geom in range(visuals.ngeom):
        spec.body(visuals.body(visuals.geom_bodyid[geom]).name).add_geom(
            name=visuals.geom(geom).name, type=visuals.geom_type[geom], size=visuals.geom_size[geom],
            pos=visuals.geom_pos[geom], quat=visuals.geom_quat[geom], rgba=DEFAULT_RGBA,
            material=visuals.material(visuals.geom_matid[geom]).name, group=visuals.geom_group[geom],
            contype=0, conaffinity=0, mass=0,
        )  # fmt: skip


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
