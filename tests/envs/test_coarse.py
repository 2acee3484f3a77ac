"""What cameras show of robots without a file for them: primitives with the silhouettes of their geoms."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import mujoco
import numpy as np
import pytest
import yaml

from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.robot_file import FOLDER
from embodied.envs.mujoco.robots.described import build_robot
from embodied.envs.rendering.cameras import GROUPS, render
from embodied.envs.rendering.coarse import primitive_looks
from embodied.envs.rendering.solids import SOLIDS
from embodied.envs.tasks.config import ReachConfig

CAMERAS = [CameraSpec.square(name, 64) for name in ("front", "wrist")]
OVERLAP = {"so101": (0.999, 0.999), "yam": (0.85, 0.6), "xarm7": (0.88, 0.8), "ur5e_2f85": (0.91, 0.95)}
"""Least intersection over union of the robot in 48 images of each camera, and of its visible geoms in the same poses.

The fingers of the YAM, which its camera sees, are wedges; they fill 2% of the image.
"""


def seeing(robot: str, num_envs: int = 16) -> MujocoPool:
    pool = make_pool("lift", {"robot": robot}, num_envs=num_envs, num_threads=1, cameras=CAMERAS)
    pool.reset(make_sampler(pool, seed=0))
    return pool


@pytest.mark.parametrize("robot", OVERLAP)
def test_its_silhouettes_are_those_of_its_geoms(robot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(sys.prefix) / "arms")
    package = yaml.safe_load((FOLDER / f"{robot}.yaml").read_text())["mjcf"].rpartition(":")[0]
    if package and find_spec(package) is None:
        pytest.skip(f"the robot's package {package} is missing")
    pool = seeing(robot)
    looks, groups = pool.task.robot.coarse, range(6) if robot == "so101" else GROUPS
    assert {int(kind) for kind in looks.geom_type[2:]} <= SOLIDS.keys()
    both, either = np.zeros(2), np.zeros(2)
    for _ in range(3):
        for _ in range(15):
            pool.step(pool.task.expert())
        drawn = pool.rig.render(segmentation=True)
        for i, lens in enumerate(pool.rig.lenses):
            true = render(pool.batch, lens.camera, groups=groups)["segmentation"]
            seen = drawn[f"segmentation.{lens.camera.name}"].numpy()
            a, b = (
                np.isin(np.append(model.geom_bodyid, -1)[geom], range(1, pool.task.robot.model.nbody))
                for model, geom in ((pool.rig.model, seen), (pool.model, true))
            )
            both[i] += (a & b).sum()
            either[i] += (a | b).sum()
    assert (both / either >= OVERLAP[robot]).all(), both / either


def test_primitives_stay_as_they_are_and_a_mesh_is_fitted_where_it_is() -> None:
    """A bar with a block at its end, of which one primitive shows too little."""
    corners = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    boxes = [corners * (0.1, 0.01, 0.02), corners * (0.03, 0.04, 0.08) + (0.13, 0, 0)]
    faces = [(0, 1, 3), (0, 3, 2), (4, 6, 7), (4, 7, 5), (0, 4, 5), (0, 5, 1), (2, 3, 7), (2, 7, 6), (0, 2, 6)]
    faces += [(0, 6, 4), (1, 5, 7), (1, 7, 3)]
    spec = mujoco.MjSpec()
    mesh = spec.add_mesh(name="bar", uservert=np.concatenate(boxes).ravel())
    mesh.userface = [i + first for first in (0, 8) for face in faces for i in face]
    mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    body = spec.worldbody.add_body(name="arm")
    body.add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname="bar", pos=[0.2, 0, 0], rgba=[1, 0, 0, 1], group=2)
    body.add_geom(type=mujoco.mjtGeom.mjGEOM_CAPSULE, size=[0.03, 0.2, 0], quat=[0.6, 0.8, 0, 0], group=2)
    body.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[1, 0, 0], group=3)  # what it collides with
    looks = primitive_looks(spec.compile(), 0.5)
    assert looks.ngeom == 2 + 2 + 1
    assert looks.geom("table_top").pos[0] == pytest.approx(0.15)
    np.testing.assert_allclose(looks.geom_size[4], [0.03, 0.2, 0])
    np.testing.assert_allclose(looks.geom_quat[4], [0.6, 0.8, 0, 0], atol=1e-9)
    np.testing.assert_allclose(np.sort(looks.geom_pos[2:4, 0]), [0.165, 0.31], atol=0.03)
    np.testing.assert_allclose(looks.geom_pos[2:4, 1:], 0, atol=0.01)
    assert (looks.geom_rgba[2:4] == [1, 0, 0, 1]).all()


def test_named_cameras_are_as_near_as_the_robot_is_small_and_its_own_is_a_key_of_its_file(tmp_path: Path) -> None:
    near, far = (make_pool("reach", {"robot": name}, num_envs=1, cameras=CAMERAS).rig for name in ("so101", "panda"))
    np.testing.assert_allclose(near.lenses[0].camera.pos, np.multiply(far.lenses[0].camera.pos, 0.34 / 0.75))
    data = yaml.safe_load((FOLDER / "so101.yaml").read_text())
    data["mjcf"] = str((FOLDER / data["mjcf"]).resolve())
    blind, other = tmp_path / "blind.yaml", tmp_path / "other.yaml"
    blind.write_text(yaml.safe_dump({key: value for key, value in data.items() if key != "camera"}))
    other.write_text(yaml.safe_dump(data | {"camera": {"body": "gripper", "fovy_deg": 50}}))
    assert build_robot(str(other), {}).model.camera("wrist").fovy == 50
    with pytest.raises(UserError, match=r"the model has no camera 'wrist'. It has: none"):
        make_pool("reach", {"robot": str(blind)}, num_envs=1, cameras=CAMERAS)


def test_a_run_goes_on_if_its_robot_gets_a_camera_but_not_with_another_camera(tmp_path: Path) -> None:
    path, data = tmp_path / "mine.yaml", yaml.safe_load((FOLDER / "so101.yaml").read_text())
    data["mjcf"] = str((FOLDER / data["mjcf"]).resolve())

    def opened(camera: object, sha256: str = "") -> str:
        path.write_text(yaml.safe_dump(data | {"camera": camera} if camera else data))
        return ReachConfig(robot=str(path), robot_sha256=sha256).robot_sha256

    camera = data.pop("camera")
    before = opened(None)
    assert opened(camera, before) == before
    with pytest.raises(UserError, match="are not those that the run was made with"):
        opened(camera | {"fovy_deg": 50}, opened(camera))
