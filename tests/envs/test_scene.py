"""A user's scene around the table: it is solid, it is seen, it moves where it has joints, and it belongs to the run."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec
from embodied.envs import FAMILIES, TASKS
from embodied.envs.mujoco.config import WarpConfig
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.scene import WORLD_BITS
from tests.envs.helpers import actions, pool, restart
from tests.envs.test_warp import IN_CONTACT, kernels

KITCHEN = """
<mujoco model="kitchen">
  <option timestep="0.002" integrator="RK4"/>
  <size memory="1M"/>
  <asset><material name="wood" rgba="0.1 0.2 0.9 1"/></asset>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1" pos="0 0 0.3"/>
    <geom name="table" type="box" size="0.02 0.4 0.2" pos="0.72 0 0.2" material="wood"/>
    <geom name="picture" type="box" size="0.01 0.01 0.01" pos="0.6 0 0.1" contype="0" conaffinity="0"/>
    <body name="cube" pos="0.4 -0.1 0.3">
      <joint name="joint1" type="slide" axis="0 0 1" range="-0.2 0.2" limited="true"/>
      <geom type="box" size="0.03 0.03 0.03" mass="0.1"/>
    </body>
  </worldbody>
  <actuator><position name="finger1" joint="joint1"/></actuator>
  <sensor><jointpos joint="joint1"/></sensor>
  <keyframe><key name="home" qpos="0.1"/></keyframe>
</mujoco>
"""

BLOCK = "v 0 0 0\nv 0.1 0 0\nv 0 0.1 0\nv 0 0 0.1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


@pytest.fixture
def kitchen(tmp_path: Path) -> str:
    path = tmp_path / "kitchen.xml"
    path.write_text(KITCHEN)
    return str(path)


def with_scene(kitchen: str, **options: object) -> MujocoPool:
    return pool("lift", config={"scene": kitchen}, **options)


def test_it_is_added_with_names_of_its_own_and_without_what_is_not_a_thing(kitchen: str) -> None:
    model, plain = with_scene(kitchen).model, pool("lift").model
    names = {model.geom(i).name for i in range(model.ngeom)} - {plain.geom(i).name for i in range(plain.ngeom)}
    assert names == {"scene/table", "scene/picture"}
    assert model.body("scene/cube").id != model.body("cube").id
    assert model.geom("scene/table").contype[0] == WORLD_BITS["contype"]
    assert model.geom("scene/picture").contype[0] == 0
    assert (model.nu, model.nkey, model.nsensor) == (plain.nu, plain.nkey, plain.nsensor)
    for option in ("timestep", "integrator", "cone", "disableflags"):
        assert getattr(model.opt, option) == getattr(plain.opt, option)
    assert model.narena >= 2**20


def test_the_robot_stops_at_a_wall_and_a_moved_body_begins_again_where_it_was(kitchen: str) -> None:
    env, free = with_scene(kitchen, max_episode_steps=30), pool("lift", max_episode_steps=30)
    forward = torch.tensor([1.0, 0.0, 0.0, -1.0]).repeat(4, 1)
    for _ in range(25):
        env.step(forward)
        free.step(forward)
    assert (env.view.tcp_pos[:, 0] < 0.71).all()
    assert (free.view.tcp_pos[:, 0] > 0.71).all()
    joint = env.view.qpos[:, int(env.model.joint("scene/joint1").qposadr[0])]
    torch.testing.assert_close(joint, torch.full_like(joint, -0.2), rtol=0, atol=0.01)  # it fell to its limit
    restart(env)
    assert (joint == 0).all()


def test_policies_cameras_see_it(kitchen: str) -> None:
    cameras = [CameraSpec.square("front", 32)]
    seen = [p.observe()["images.front"].int() for p in (with_scene(kitchen, cameras=cameras), pool(cameras=cameras))]
    assert ((seen[0] - seen[1]).abs().amax(-1) > 30).float().mean() > 0.1


@kernels
def test_warp_simulates_and_shows_the_same(kitchen: str) -> None:
    cameras, config = [CameraSpec.square("front", 32)], TASKS["lift"].config(scene=kitchen)
    one = with_scene(kitchen, cameras=cameras)
    make = FAMILIES["mujoco"].build().make
    other = make("lift", config, num_envs=4, num_threads=1, sim=WarpConfig(device="cpu"), cameras=cameras)
    restart(other, seed=0)  # type: ignore[arg-type]
    np.testing.assert_array_equal(one.observe()["images.front"], other.observe()["images.front"])
    action_NE = actions([0, 1, 2, 3], 5, 4)
    a, b = (env.step(action_NE).obs["state"] for env in (one, other))
    torch.testing.assert_close(a, b, rtol=0, atol=IN_CONTACT["state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.rename(path.with_name("kitchn.xml")), r"unknown scene .* Did you mean '.*kitchn.xml'"),
        (lambda path: path.write_text("<mujoco><worldbody><geom type='bx'/></worldbody></mujoco>"), r"scene kitchen"),
        (lambda path: path.write_text("<mujoco>"), r"scene kitchen.xml: "),
    ],
)
def test_a_scene_that_cannot_be_read_is_named(kitchen: str, change: object, message: str) -> None:
    change(Path(kitchen))  # type: ignore[operator]
    with pytest.raises(UserError, match=message) as raised:
        with_scene(kitchen)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("changed", ["kitchen.xml", "more.xml", "meshes/block.obj"])
def test_a_run_does_not_go_on_with_a_changed_scene(kitchen: str, changed: str) -> None:
    config, folder = TASKS["reach"].config, Path(kitchen).parent
    (folder / "more.xml").write_text("<mujoco><!-- not -- XML --><compiler meshdir='meshes'/></mujoco>")
    (folder / "meshes").mkdir()
    (folder / "meshes" / "block.obj").write_text(BLOCK)
    block = "<include file='more.xml'/><asset><mesh name='block' file='block.obj'/></asset>"
    Path(kitchen).write_text(KITCHEN.replace("<worldbody>", f"{block}<worldbody>"))
    with_scene(kitchen)
    recorded = config(scene=kitchen).scene_sha256
    assert config(scene=kitchen, scene_sha256=recorded).scene_sha256 == recorded
    with (folder / changed).open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="its files are not those that the run was made with"):
        config(scene=kitchen, scene_sha256=recorded)


def test_a_run_goes_on_that_was_made_before_meshes_were_hashed(kitchen: str) -> None:
    config = TASKS["reach"].config
    (Path(kitchen).parent / "more.xml").write_text("<mujoco/>")
    Path(kitchen).write_text(KITCHEN.replace("<worldbody>", "<include file='more.xml'/><worldbody>"))
    recorded = sha256(Path(kitchen).read_bytes()).hexdigest()
    assert config(scene=kitchen, scene_sha256=recorded).scene_sha256 == recorded != config(scene=kitchen).scene_sha256


def test_reading_a_scene_warns_of_nothing(kitchen: str, recwarn: pytest.WarningsRecorder) -> None:
    assert isinstance(TASKS["reach"].build(TASKS["reach"].config(scene=kitchen)).scene(), mujoco.MjSpec)
    assert not recwarn.list
