"""Where rays meet solids, beside MuJoCo's own rays."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from embodied.envs.mujoco.scene import on_table
from embodied.envs.rendering.appearance import Twin
from embodied.envs.rendering.cameras import render
from embodied.envs.rendering.solids import MISSED, SOLIDS, Vector, dot
from embodied.envs.rendering.vision import CameraRig
from tests.envs.helpers import PANDA
from tests.envs.pictures import EVERYTHING, FRONT

SIZE = {
    "sphere": (0.3,),
    "capsule": (0.2, 0.4),
    "ellipsoid": (0.2, 0.3, 0.5),
    "cylinder": (0.3, 0.2),
    "box": (0.2, 0.3, 0.4),
}
NAMES = {name: int(getattr(mujoco.mjtGeom, f"mjGEOM_{name.upper()}")) for name in SIZE}


def vector(rows: np.ndarray) -> Vector:
    x, y, z = rows.T.astype(np.float32)
    return x, y, z


def meet(name: str, origin_m3: np.ndarray, ray_m3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth [m] and normal [m, 3] of one ray each."""
    size = np.resize([*SIZE[name], 0.0, 0.0], 3) * np.ones_like(origin_m3)
    ray = vector(ray_m3)
    with np.errstate(divide="ignore", invalid="ignore"):
        depth, normal = SOLIDS[NAMES[name]](vector(size), vector(origin_m3), ray, dot(ray, ray))
    return depth, np.stack(np.broadcast_arrays(*normal), -1)


def truth(name: str, origin_m3: np.ndarray, ray_m3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    spec = mujoco.MjSpec()
    spec.worldbody.add_geom(type=NAMES[name], size=np.resize([*SIZE[name], 0.0, 0.0], 3))
    depth, _, normal = Batch(spec.compile(), 1, 1).ray(origin_m3, ray_m3, normal=True)
    return np.where(depth[0] < 0, np.inf, depth[0]), normal[0]


def around(count: int, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Rays from all sides towards what is near the origin, of different lengths; some along an axis."""
    rng = np.random.default_rng(0)
    origin = rng.normal(size=(count, 3))
    origin *= distance / np.linalg.norm(origin, axis=1, keepdims=True)
    ray = rng.uniform(-0.5, 0.5, (count, 3)) - origin
    ray *= rng.uniform(0.3, 3.0, (count, 1))
    origin[:60] = np.roll(np.c_[np.full(60, distance), rng.uniform(-0.5, 0.5, (60, 2))], 1, axis=1)
    origin[:60] = np.concatenate([np.roll(origin[k:60:3], k, axis=1) for k in range(3)])
    ray[:60] = -np.sign(origin[:60]) * (np.abs(origin[:60]) == distance)
    return origin, ray


def test_every_solid_is_compared() -> None:
    assert set(SOLIDS) == set(NAMES.values())


@pytest.mark.parametrize("name", NAMES)
def test_depth_and_normal_are_those_of_mujoco(name: str) -> None:
    origin, ray = around(20_000, 1.5)
    (depth, normal), (depth_t, normal_t) = meet(name, origin, ray), truth(name, origin, ray)
    both = np.isfinite(depth) & np.isfinite(depth_t)
    assert 0.2 < both.mean() < 0.9
    assert (np.isfinite(depth) != np.isfinite(depth_t)).mean() < 2e-4  # grazing
    np.testing.assert_allclose(depth[both], depth_t[both], atol=3e-5, rtol=0)  # worst where rays graze
    assert np.quantile(np.abs(depth[both] - depth_t[both]), 0.99) < 1e-6
    off = np.abs(normal[both] - normal_t[both]).max(1)
    assert (off > 1e-3).mean() < 2e-4  # at an edge between faces


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_met_behind_or_from_inside(name: str) -> None:
    origin, ray = around(2_000, 1.5)
    assert (meet(name, origin, -ray)[0] == MISSED).all()
    assert (meet(name, 0.05 * origin, ray)[0] == MISSED).all()


def test_a_mesh_is_seen_too() -> None:
    """A tetrahedron, which is none of the solids, behind and before things that are."""
    spec = on_table(PANDA)
    spec.add_mesh(name="tetra", uservert=[0, 0, 0, 0.2, 0, 0, 0, 0.2, 0, 0, 0, 0.2])
    for name, x in (("one", 0.4), ("two", 0.65)):
        body = spec.worldbody.add_body(name=name, pos=[x, -0.1, 0.03])
        body.add_freejoint()
        body.add_geom(name=name, type=mujoco.mjtGeom.mjGEOM_MESH, meshname="tetra", rgba=[0.9, 0.1, 0.1, 1])
    batch = Batch(spec.compile(), 3, 2)
    batch.bind("qpos")[:, -4] += [0.0, 0.05, 0.3]  # height of the second one
    camera = replace(FRONT, width=48, height=48)
    rig = CameraRig(batch, spec, PANDA.coarse, [camera])
    batch.forward()
    seen = rig.render(**EVERYTHING)
    twin = Twin(batch, rig.model, np.arange(3), 1)
    twin.copy_positions()
    true = render(twin.batch, camera, groups=range(6))
    np.testing.assert_array_equal(seen["segmentation.front"], true["segmentation"])
    near = true["depth"] < 5.0
    np.testing.assert_allclose(seen["depth.front"].numpy()[near], true["depth"][near], rtol=2e-6)
    for name in ("one", "two"):
        place = seen["segmentation.front"] == rig.model.geom(name).id
        assert (place.flatten(1).sum(1) > 20).all()
        red, green, _ = seen["images.front"][place].float().mean(0)
        assert red > 2 * green
