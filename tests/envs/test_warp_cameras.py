"""What policies see with sim=warp, painted by a kernel on Warp's CPU device: the images of sim=mujoco."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.robots.described import build_robot
from embodied.envs.mujoco.scene import on_table
from embodied.envs.mujoco.warp.batch import INSTALL
from embodied.envs.mujoco.warp.cameras import DeviceRig
from embodied.envs.rendering.cameras import Camera
from embodied.envs.rendering.config import CameraRandomization
from embodied.envs.rendering.vision import CameraRig
from tests.envs.helpers import PANDA
from tests.envs.pictures import FRONT, WRIST
from tests.envs.test_solids import NAMES

warp = pytest.importorskip("warp", reason=INSTALL)

N = 6
WIDE = Camera("wide", 37, 22, 80.0, pos=(0.9, 0.5, 0.3), lookat=(0.4, 0.0, 0.2))
RANGES = CameraRandomization(0.05, 0.01, 0.05, 4.0, 0.3, 0.1, 0.1, 0.3, 0.3)


def rigs(
    spec: mujoco.MjSpec, cameras: list[Camera], looks: mujoco.MjModel = PANDA.coarse
) -> tuple[CameraRig, DeviceRig]:
    """Both renderers of N simulations in which every joint is anywhere."""
    warp.init()
    batch, rng = Batch(spec.compile(), N, 1), np.random.default_rng(0)
    batch.bind("qpos")[:] += rng.normal(0, 0.2, batch.bind("qpos").shape)
    drawn = CameraRig(batch, spec, looks, cameras, RANGES)
    outputs = {name: batch.bind(name) for name in ("xpos", "xmat", "cam_xpos", "cam_xmat")}
    batch.forward()
    live = {name: torch.from_numpy(np.array(array)).float() for name, array in outputs.items()}
    sims = SimpleNamespace(bind=live.__getitem__, device=torch.device("cpu"))
    return drawn, DeviceRig(sims, batch, spec, looks, cameras, RANGES)


def assert_alike(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for rounding: at most one pixel of 1,000 shows another geom."""
    for name in [key for key in expected if key.startswith("images.")]:
        off = (seen[name].int() - expected[name].int()).abs()
        assert seen[name].shape == expected[name].shape
        assert (off.amax(-1) > 8).float().mean() <= 1e-3, name
        assert off.float().mean() <= 0.05, name
        assert (off > 0).float().mean() <= 2e-3, name


def test_all_solids_are_painted_as_they_are_drawn() -> None:
    spec = on_table(PANDA)
    for i, (name, kind) in enumerate(NAMES.items()):
        body = spec.worldbody.add_body(name=name, pos=[0.3 + 0.1 * i, 0.1 * (-1) ** i, 0.1])
        body.add_freejoint()
        rgba = [0.9, 0.2 * i, 0.1, 0.6 if name == "ellipsoid" else 1]
        body.add_geom(name=name, type=kind, size=[0.05, 0.08, 0.06], rgba=rgba)
    drawn, painted = rigs(spec, [FRONT, WRIST, WIDE])
    for ids in (np.arange(N), np.array([1, 4])):  # the second time new episodes begin in some envs
        for rig in (drawn, painted):
            rig.start(ids, EpisodeRng(ids + 5, ids))
        expected, images, shown_N = drawn.render(segmentation=True), painted.empty(), torch.arange(N) != 3
        for image in images.values():
            image.fill_(7)
        painted.paint(images, shown_N)
        assert_alike({k: v[shown_N] for k, v in images.items()}, {k: expected[k][shown_N] for k in images})
        assert all(bool((image[3] == 7).all()) for image in images.values())
        for name in NAMES:
            geom = drawn.model.geom(name).id
            assert any(bool((expected[f"segmentation.{camera}"] == geom).any()) for camera in ("front", "wide"))


def test_geoms_whose_place_differs_between_simulations_are_painted_where_they_are_drawn() -> None:
    spec = on_table(PANDA)
    body = spec.worldbody.add_body(name="bar", pos=[0.5, 0.2, 0.2])
    body.add_freejoint()
    for name, y in (("bar", 0.0), ("end", 0.1)):
        body.add_geom(name=name, type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.05, 0.05, 0.05], pos=[0, y, 0])
    drawn, painted = rigs(spec, [FRONT])
    before = drawn.render()
    drawn.batch.expand("geom_pos")[1, drawn.batch.model.geom("end").id] = [0.0, 0.1, 0.15]
    for rig in (drawn, painted):
        rig.start(np.arange(N), None)
    expected, images = drawn.render(), painted.empty()
    painted.paint(images, torch.ones(N, dtype=torch.bool))
    assert_alike(images, expected)
    changed = (expected["images.front"] != before["images.front"]).flatten(1).any(1)
    assert changed.tolist() == [i == 1 for i in range(N)]


def test_a_robot_without_a_file_of_its_looks_is_painted_as_it_is_drawn() -> None:
    robot = build_robot("so101", {})
    drawn, painted = rigs(on_table(robot), [FRONT.scaled(robot.scale.reach), WRIST], robot.coarse)
    expected, images = drawn.render(segmentation=True), painted.empty()
    painted.paint(images, torch.ones(N, dtype=torch.bool))
    assert_alike(images, expected)
    assert (expected["segmentation.wrist"] > drawn.model.geom("floor").id).float().mean() > 0.1


def test_geoms_that_it_cannot_paint_are_named() -> None:
    spec = on_table(PANDA)
    spec.add_mesh(name="tetra", uservert=[0, 0, 0, 0.2, 0, 0, 0, 0.2, 0, 0, 0, 0.2])
    spec.worldbody.add_body(name="thing").add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname="tetra", mass=1)
    with pytest.raises(UserError, match="its cameras do not show thing, which has a geom of type mjGEOM_MESH"):
        rigs(spec, [replace(FRONT, width=8, height=8)])
