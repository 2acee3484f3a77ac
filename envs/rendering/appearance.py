"""What simulations look like: geoms to see that the physics does without.

A geom costs time in every substep even if it collides with nothing (the shells of the Panda: 12%), so geoms that are
only seen are not in the model that is stepped. Images are rendered from a twin that has them, whose state follows.
Videos show detailed geoms; policies' cameras show few.
"""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from envs.rendering.cameras import DEFAULT_RGBA

COLLISION_GROUP = 3
FOLLOWED = ("geom_type", "geom_size", "geom_rgba", "geom_rbound", "geom_aabb")  # per-simulation fields of a twin


def add_visuals(spec: mujoco.MjSpec, file: Path | None) -> mujoco.MjModel:
    """Return the model of a scene with the geoms of an MJCF file that are only seen; ``spec`` stays as it is.

    Nothing that is added collides or weighs, and the state (qpos, mocap, ...) keeps its layout. World planes, on
    which the physics runs, move to the hidden group 3: the file shows a table and the floor below it instead. Without
    a file everything that collides is shown.
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
    looks = mujoco.MjModel.from_xml_path(str(file))
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
    """Simulations of a model with visuals; their positions follow those of the batch ``source``.

    sims: which simulations of it, in order; twin i follows sims[i]. nthread: threads that cast rays. The model must
    have the source's bodies and joints, as ``add_visuals`` leaves them.
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
