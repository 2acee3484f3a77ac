"""What policies see: against the pictures that cast every ray, and what it may and may not depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.viewer import Viewer
from embodied.envs.rendering.appearance import Twin
from embodied.envs.rendering.cameras import Camera, render
from embodied.envs.rendering.vision import CameraRig, find_camera
from tests.envs.helpers import actions, pool, restart
from tests.envs.pictures import EVERYTHING, FRONT, WRIST, assert_equal, cast_every_ray, moved, rig_of

ODD = Camera("odd", 37, 22, 80.0, pos=(0.7, 0.6, 0.3), lookat=(0.4, 0.0, 0.2))  # tiles do not fit, much is beside it


def all_rays(env: MujocoPool, rig: CameraRig, camera: Camera) -> dict[str, np.ndarray]:
    """The picture for which every ray is cast against everything."""
    twin = Twin(env.batch, rig.model, np.arange(env.num_envs), 1)
    twin.copy_positions()
    twin.copy_geoms()
    return render(twin.batch, camera, groups=range(6))


# -- against the truth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["pick_place", "lift", "tabletop"])
@pytest.mark.parametrize("camera", [FRONT, WRIST, ODD], ids=lambda camera: camera.name)
def test_depth_and_segmentation_are_those_of_rays(task: str, camera: Camera) -> None:
    env = moved(task)
    rig = rig_of(env, camera)
    seen, truth = rig.render(**EVERYTHING), all_rays(env, rig, camera)
    body = np.append(rig.model.geom_bodyid, -1)  # walls of a tray coincide at its corners; -1 is the sky
    other = body[seen[f"segmentation.{camera.name}"].numpy()] != body[truth["segmentation"]]
    assert other.mean() < 1e-3, "only where two geoms meet, as the depth below shows: which is nearer is rounding there"
    near = truth["depth"] < 5.0
    depth = seen[f"depth.{camera.name}"].numpy()
    np.testing.assert_allclose(depth[near], truth["depth"][near], rtol=2e-6)
    np.testing.assert_allclose(depth[~near], truth["depth"][~near], rtol=1e-3)  # towards the horizon
    kinds = {rig.model.geom(geom).name for geom in np.unique(truth["segmentation"]) if geom >= 0}
    assert "table_top" in kinds


def test_the_robot_and_objects_have_their_colours() -> None:
    env = moved()
    rig = rig_of(env, replace(FRONT, width=64, height=64))
    seen = rig.render(segmentation=True)
    rgb, geom = seen["images.front"].float(), seen["segmentation.front"]
    red, green, blue = rgb[geom == rig.model.geom("cube").id].mean(0)
    assert red > 2 * green
    assert red > 2 * blue
    shell = torch.from_numpy(np.isin(geom, np.flatnonzero(rig.model.geom_matid == rig.model.material("shell").id)))
    assert rgb[shell].mean() > 150
    assert 0.03 < shell.float().mean() < 0.3


@pytest.mark.parametrize("anywhere", [False, True])
def test_culling_changes_no_picture(anywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the arm does, seen from outside, from the hand, and from a camera between the links."""
    env = moved(num_envs=12, anywhere=anywhere)
    between = Camera("between", 30, 30, 100.0, pos=(0.25, 0.05, 0.45), lookat=(0.5, 0.0, 0.3))
    cameras = (FRONT, WRIST, ODD, between)
    rig = rig_of(env, *cameras)
    culled = rig.render(**EVERYTHING)
    cast_every_ray(monkeypatch)
    rig.start(np.arange(12), None)  # nothing cached is used
    assert_equal(culled, rig.render(**EVERYTHING))


def test_translucent_geoms_show_what_is_behind() -> None:
    env = moved("reach")
    rig = rig_of(env, FRONT)
    goal = rig.model.body("goal").geomadr[0]
    seen = rig.render(segmentation=True)
    place = seen["segmentation.front"] == goal
    assert place.sum() > 3
    glass = seen["images.front"][place].float()
    rig.scenery.rgba_Ng4[:, goal, 3] = 1.0
    opaque = rig.render()["images.front"][place].float()
    assert (glass[:, 0] > opaque[:, 0] + 10).all()  # the goal is green, the wood behind it is not


# -- what a picture may depend on ------------------------------------------------------------------------------------


def test_a_picture_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.envs.rendering.vision.MIN_SIMS_PER_THREAD", 8)
    env = moved(num_envs=37)
    rig = rig_of(env, num_threads=1)
    together = rig.render(**EVERYTHING)
    for i in (0, 17, 36):
        alone = rig.render(np.array([i]), **EVERYTHING)
        assert_equal(alone, {key: value[[i]] for key, value in together.items()})
    some = np.array([3, 4, 20, 36])
    assert_equal(rig_of(env, num_threads=3).render(some, **EVERYTHING), {k: v[some] for k, v in together.items()})


def test_what_stands_still_is_painted_anew_when_it_moves() -> None:
    env = moved(num_envs=3)
    rig = rig_of(env, FRONT)
    before = rig.render(**EVERYTHING)
    env.batch.bind("mocap_pos")[1, 0, :2] += 0.05  # the tray of one of them
    env.batch.forward()
    after = rig.render(**EVERYTHING)
    truth = all_rays(env, rig, FRONT)
    np.testing.assert_allclose(after["depth.front"][0].numpy(), before["depth.front"][0].numpy())
    np.testing.assert_allclose(after["depth.front"].numpy(), truth["depth"], rtol=1e-3)
    changed = (before["images.front"] != after["images.front"]).flatten(1).any(1)
    assert changed.tolist() == [False, True, False]
    assert_equal(rig_of(env, FRONT).render(**EVERYTHING), after)


def test_pictures_do_not_change_the_simulation() -> None:
    blind, seeing = pool(num_envs=3), pool(num_envs=3, cameras=(FRONT, WRIST))
    chunk = actions([0, 1, 2], 3, blind.spec.action_dim)
    for _ in range(2):
        blind.step(chunk)
        seeing.step(chunk)
    np.testing.assert_array_equal(blind.batch.state, seeing.batch.state)


def test_the_wrist_camera_moves_with_the_hand() -> None:
    env = pool("reach", 2, cameras=(WRIST,))
    up = torch.zeros(2, 4, env.spec.action_dim)
    up[1, :, 2] = 1.0
    env.step(up)
    rise = env.view.tcp_pos[1, 2] - env.view.tcp_pos[0, 2]
    assert rise > 0.05
    assert env.rig is not None
    seen = env.rig.render(**EVERYTHING)
    table = seen["segmentation.wrist"] == env.rig.model.geom("table_top").id
    both = table.all(0)
    further = (seen["depth.wrist"][1] - seen["depth.wrist"][0])[both]
    assert (further > 0.8 * rise).all()
    fingers = np.isin(seen["segmentation.wrist"], np.flatnonzero(env.rig.model.geom_group == 4))
    assert fingers.mean((1, 2)).min() > 0.05  # it sees the fingertips


def test_shapes_and_colours_of_single_simulations_are_shown() -> None:
    env = moved("lift", 3)
    cube = env.model.geom("cube").id
    kind, size, rgba, rbound = (env.batch.expand(f"geom_{name}") for name in ("type", "size", "rgba", "rbound"))
    kind[1, cube], size[1, cube], rbound[1, cube] = mujoco.mjtGeom.mjGEOM_SPHERE, [0.05, 0, 0], 0.05
    rgba[2, cube] = [0.1, 0.2, 0.9, 1.0]
    rig = rig_of(env, replace(FRONT, width=64, height=64))
    seen, truth = rig.render(**EVERYTHING), all_rays(env, rig, rig.lenses[0].camera)
    np.testing.assert_array_equal(seen["segmentation.front"], truth["segmentation"])
    place = seen["segmentation.front"] == rig.model.geom("cube").id
    assert place[1].sum() > 2 * place[0].sum()
    blue = seen["images.front"][2][place[2]].float().mean(0)
    assert blue[2] > 2 * blue[0]
    video = Viewer(env.task, env.batch, Camera("v", 64, 64, 40.0, pos=(1.3, 0, 0.8), lookat=(0.5, 0, 0)))
    before = video.render()
    rgba[2, cube] = rgba[0, cube]
    kind[1, cube], size[1, cube] = kind[0, cube], size[0, cube]
    after = video.render()
    assert [bool((a != b).any()) for a, b in zip(before, after, strict=True)] == [False, True, True]


def test_parts_of_an_object_are_shown_where_they_are_in_each_simulation() -> None:
    env = pool("lift_bar", 3, sim={"randomization": {"size": {"field": "object_size", "range": [1.3, 1.3]}}})
    pos, handle = env.batch.expand("geom_pos"), env.model.geom("left_handle").id
    assert pos[0, handle, 1] == pytest.approx(0.39)
    pos[1, handle, 0] = 0.1
    camera = Camera("low", 96, 96, 60.0, pos=(1.2, 0.0, 0.1), lookat=(0.5, 0.0, 0.03))
    rig = rig_of(env, camera)
    shown, true = rig.render(segmentation=True)["segmentation.low"].numpy(), render(env.batch, camera)["segmentation"]
    for name in ("left_handle", "right_handle"):
        here, there = shown == rig.model.geom(name).id, true == env.model.geom(name).id
        assert there.sum() > 20
        assert (here & there).sum() > 0.9 * (here | there).sum(), name


def test_objects_without_names_change_their_size_in_pictures_too(tmp_path: Path) -> None:
    geom = "<body pos='0.5 0.4 0.05'><freejoint/><geom size='0.05'/></body>"
    (tmp_path / "ball.xml").write_text(f"<mujoco><worldbody>{geom}</worldbody></mujoco>")
    camera, area = Camera("above", 64, 64, 60.0, pos=(0.5, 0.4, 0.5), lookat=(0.5, 0.41, 0.0)), []
    for factor in (1.0, 1.5):
        size = {"size": {"field": "object_size", "range": [factor, factor]}}
        env = pool("reach", 1, config={"scene": str(tmp_path / "ball.xml")}, sim={"randomization": size})
        rig = rig_of(env, camera)
        of_body = rig.model.geom_bodyid[rig.render(segmentation=True)["segmentation.above"]]
        area.append((of_body == env.model.jnt_bodyid[env.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]).sum())
    assert area[1] > 1.8 * area[0] > 0


# -- the pool --------------------------------------------------------------------------------------------------------


def test_a_pool_with_cameras_hides_objects_from_the_state() -> None:
    blind, seeing = pool("pick_place"), pool("pick_place", cameras=(FRONT, replace(WRIST, height=24)))
    assert seeing.spec.cameras == (CameraSpec("front", 40, 40), CameraSpec("wrist", 24, 40))
    obs, full = restart(seeing), restart(blind)
    assert list(obs) == ["state", "privileged", "images.front", "images.wrist", "instruction"]
    assert obs["images.wrist"].shape == (4, 24, 40, 3)
    assert obs["images.wrist"].dtype == torch.uint8
    assert obs["state"].shape[1] == seeing.spec.state_dim == len(seeing.spec.state_names)
    assert not any("cube" in name or "tray" in name for name in seeing.spec.state_names)
    assert tuple(seeing.arm.observe()) == tuple(term.name for term in seeing.task.robot.terms)
    own = [blind.spec.state_names.index(name) for name in seeing.spec.state_names]
    rest = [i for i in range(blind.spec.state_dim) if i not in own]
    assert torch.equal(obs["state"], full["state"][:, own])
    assert torch.equal(obs["privileged"], torch.cat([full["state"][:, rest], full["privileged"]], -1))
    assert obs["privileged"].shape[1] == seeing.spec.privileged_dim


def test_a_pool_without_cameras_is_as_before() -> None:
    env = pool("pick_place")
    assert env.rig is None
    assert env.spec.cameras == ()
    assert list(restart(env)) == ["state", "privileged"]
    assert "cube_pos[0]" in env.spec.state_names


def test_pictures_that_were_not_taken_are_not_missed_later() -> None:
    always, seldom = (pool("lift", 2, cameras=(FRONT, WRIST)) for _ in range(2))
    chunks = actions([0, 1], 3, always.spec.action_dim)
    for step in range(3):
        seldom.observe_images = step == 2
        expected, found = always.step(chunks[:, step]).obs, seldom.step(chunks[:, step]).obs
        assert set(found) == (set(expected) if step == 2 else {"state", "privileged"})
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_final_observations_and_those_of_the_next_episode() -> None:
    env = pool("pick_place", 3, 4, cameras=(FRONT, WRIST), stagger=True)
    still = torch.zeros(3, 1, env.spec.action_dim)
    calls: list[Any] = []
    assert env.rig is not None
    taken = env.rig.render

    def counted(ids: Any = None, **options: Any) -> dict[str, torch.Tensor]:
        calls.append(ids)
        return taken(ids, **options)

    env.rig.render = counted  # type: ignore[method-assign]
    for _ in range(4):
        before = env.observe()
        calls.clear()
        step = env.step(still)
        ended = step.final_ids
        assert [None if ids is None else ids.tolist() for ids in calls] == [ended.tolist()] * bool(len(ended)) + [None]
        for key in ("images.front", "images.wrist"):
            assert torch.equal(step.obs[key], env.observe()[key])
            assert len(step.final_obs[key]) == len(ended)
            for final, new, old in zip(step.final_obs[key], step.obs[key][ended], before[key][ended], strict=True):
                near = (final.int() - old.int()).abs().float().mean()  # nothing has moved much within a step
                assert near < (final.int() - new.int()).abs().float().mean()


def test_cameras_that_cannot_be_had_are_named() -> None:
    with pytest.raises(UserError, match=r"unknown camera 'frnt'. Did you mean 'front'\? Allowed: front, wrist"):
        find_camera("frnt")
    assert find_camera("wrist").mount == "wrist"
    with pytest.raises(ValueError, match=r"cameras: got the names \['front', 'front'\]"):
        pool(cameras=(FRONT, FRONT))
    with pytest.raises(ValueError, match=r"no camera 'elbow'. It has: wrist"):
        pool(cameras=(Camera("elbow", mount="elbow"),))
    with pytest.raises(ValueError, match="width and height must be positive, got 0x64"):
        replace(find_camera("front"), width=0)


def test_pictures_with_domain_randomization() -> None:
    """Fields of the pool's model that the twin does not have are no trouble."""
    friction = {"field": "geom_friction", "names": ["cube"], "range": [0.5, 1.5]}
    env = pool("lift", 2, cameras=(FRONT,), sim={"randomization": {"friction": friction}})
    assert restart(env)["images.front"].float().std() > 10
