"""Ray-cast pictures of scenes whose depth, ids and colours are known."""

from __future__ import annotations

from pathlib import Path

import imageio_ffmpeg
import mujoco
import numpy as np
import pytest
import torch
from mujoco.batch import Batch

from embodied.core.policy import Policy
from embodied.envs.episodes.sampler import first_episodes
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.viewer import SOLVED, Viewer
from embodied.envs.rendering.cameras import Camera, render
from embodied.report.video import grid, open_mp4, record
from tests.envs.helpers import pool as make_small

SCENE = """
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" pos="0 0 -1" rgba="0.5 0.5 0.5 1"/>
    <body name="ball" pos="1 0 0"><joint type="slide" axis="1 0 0"/>
      <geom name="ball" type="sphere" size="0.1" rgba="0.9 0.1 0.1 1" mass="1"/>
    </body>
    <geom name="hidden" type="sphere" size="0.2" pos="0.5 0 0" group="3"/>
    <body name="rover"><joint type="slide" axis="0 0 1"/>
      <geom type="sphere" size="0.01" pos="0 0 -0.5" mass="1"/>
      <camera name="eye" pos="0 0 0" xyaxes="0 -1 0 0 0 1" fovy="50"/>
    </body>
  </worldbody>
</mujoco>
"""
AHEAD = Camera("ahead", 33, 25, 40.0, pos=(0.0, 0.0, 0.0), lookat=(1.0, 0.0, 0.0))
CENTRE = (slice(None), 12, 16)


@pytest.fixture
def batch() -> Batch:
    batch = Batch(mujoco.MjModel.from_xml_string(SCENE), 3, 1)
    batch.qpos[:, 0] = [0.0, 0.5, 1.0]
    return batch


def test_depth_segmentation_and_colour(batch: Batch) -> None:
    image = render(batch, AHEAD)
    assert image["rgb"].shape == (3, 25, 33, 3)
    assert image["rgb"].dtype == np.uint8
    assert image["depth"].dtype == np.float32
    assert image["segmentation"].dtype == np.int32
    np.testing.assert_allclose(image["depth"][CENTRE], [0.9, 1.4, 1.9], atol=1e-6)
    model = batch.get_model(0)
    assert (image["segmentation"][CENTRE] == model.geom("ball").id).all()
    assert (image["segmentation"][:, -1] == model.geom("floor").id).all()
    assert (image["segmentation"][:, 0] == -1).all()
    assert np.isinf(image["depth"][:, 0]).all()
    red, green, blue = image["rgb"][CENTRE].astype(float).T
    assert (red > 3 * green).all()
    assert (red > 3 * blue).all()
    assert not (image["segmentation"] == model.geom("hidden").id).any()
    pixels = (image["segmentation"] == model.geom("ball").id).sum((1, 2))
    assert pixels[0] > pixels[1] > pixels[2]


def test_depth_is_along_the_optical_axis(batch: Batch) -> None:
    """The floor, 1 m below, is met 1 m / tan(angle) ahead, whatever the column."""
    depth = render(batch, AHEAD)["depth"][0]
    tangent = 2 * np.tan(np.deg2rad(20.0)) / 25 * 12
    np.testing.assert_allclose(depth[-1], 1 / tangent, rtol=1e-6)


def test_right_is_right_and_up_is_up() -> None:
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><geom type="sphere" size=".1" pos="1 -.3 0"/><geom type="sphere" size=".1" pos="1 0 .3"/>'
        "</worldbody></mujoco>"
    )
    seen = render(Batch(model, 1, 1), Camera("c", 31, 31, 60.0, pos=(0, 0, 0), lookat=(1, 0, 0)))["segmentation"][0]
    rows, columns = np.nonzero(seen == 0)
    assert columns.min() > 15  # looking along +x, -y is to the right
    rows, columns = np.nonzero(seen == 1)
    assert rows.max() < 15


def test_a_mounted_camera_moves_with_its_body(batch: Batch) -> None:
    """No forward call is needed: the pose comes from the state."""
    eye = Camera("eye", 33, 25, mount="eye")
    still = render(batch, eye)["depth"]
    np.testing.assert_allclose(still[CENTRE], [0.9, 1.4, 1.9], atol=1e-6)
    batch.qpos[:, 1] = 0.05
    np.testing.assert_allclose(
        render(batch, eye)["depth"][CENTRE], [1 + d - np.sqrt(0.1**2 - 0.05**2) for d in (0, 0.5, 1)], atol=1e-6
    )


def test_pictures_do_not_change_the_simulation(batch: Batch) -> None:
    before = batch.state.copy()
    render(batch, AHEAD, fine=True)
    render(batch, Camera("eye", 8, 8, mount="eye"))
    np.testing.assert_array_equal(batch.state, before)


def test_shadow_falls_away_from_the_sun() -> None:
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><geom type="plane" size="0 0 1"/><geom type="sphere" size=".2" pos="0 0 .5"/>'
        "</worldbody></mujoco>"
    )
    batch = Batch(model, 1, 1)
    above = Camera("above", 41, 41, 60.0, pos=(0, 0, 4), lookat=(0, 0, 0))
    lit, shaded = (render(batch, above, fine=fine)["rgb"][0].astype(int).sum(-1) for fine in (False, True))
    darker = np.argwhere(shaded < lit - 60)
    assert len(darker) > 5
    offset = darker.mean(0) - 20  # rows go down with -y, columns right with +x; the sun is at +x, -y
    assert offset[1] < 0
    assert offset[0] < 0


def test_translucent_geoms_show_what_is_behind() -> None:
    xml = (
        '<mujoco><worldbody><body pos="1 0 0"><geom type="sphere" size=".1" rgba="0 1 0 {alpha}"/></body>'
        '<body pos="2 0 0"><geom type="box" size=".1 1 1" rgba="1 0 0 1"/></body></worldbody></mujoco>'
    )
    opaque, glass = (
        render(Batch(mujoco.MjModel.from_xml_string(xml.format(alpha=alpha)), 1, 1), AHEAD)["rgb"][0, 12, 16]
        for alpha in (1, 0.4)
    )
    assert opaque[0] < 60 < glass[0]
    assert glass[1] < opaque[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pos": (0, 0, 0)},
        {"pos": (0, 0, 0), "lookat": (1, 0, 0), "mount": "eye"},
        {"pos": (0, 0, 0), "lookat": (0, 0, 0)},
        {"mount": "eye", "width": 0},
        {"mount": "eye", "fovy_deg": 180.0},
    ],
)
def test_impossible_cameras_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="camera 'c'"):
        Camera("c", **options)


def test_unknown_mount_names_what_there_is(batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"no camera .eyes.\. It has: eye"):
        render(batch, Camera("c", mount="eyes"))


class Still(Policy):
    """A policy that does nothing, two steps at a time."""

    execute = 2

    def plan(self, obs: dict, noise: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(obs["state"]), 3, 4)


def small_pool(num_envs: int) -> MujocoPool:
    return make_small("lift", num_envs, 5)


def read_mp4(path: Path) -> tuple[dict, list[np.ndarray]]:
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    return meta, [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


def test_an_episode_becomes_a_video(tmp_path: Path) -> None:
    pool = small_pool(3)
    viewer = Viewer(pool.task, pool.batch, Camera("c", 64, 48, 36.0, pos=(1.75, -1.1, 0.85), lookat=(0.3, 0, 0.22)))
    path = tmp_path / "videos" / "episode.mp4"
    ended = record(pool, viewer.render, Still(), first_episodes(pool.spec, 3, seed=7), [path])
    meta, pictures = read_mp4(path)
    assert ended == [False] * 3
    assert len(pictures) == 5 + 1  # five steps and the initial state
    assert meta["size"] == (128, 96)
    assert meta["fps"] == pytest.approx(1 / pool.spec.control_dt_s)
    assert meta["codec"] == "h264"
    assert not pictures[0][48:, 64:].max() > 40  # the fourth tile is empty
    assert pictures[0][:48, :64].std() > 20
    assert pool.on_control_step is None
    assert [p.name for p in path.parent.iterdir()] == ["episode.mp4"]


def test_the_viewer_shows_each_env_and_reads_only() -> None:
    pool = small_pool(2)
    before = pool.batch.state.copy()
    pictures = Viewer(
        pool.task, pool.batch, Camera("c", 64, 48, 36.0, pos=(1.75, -1.1, 0.85), lookat=(0.3, 0, 0.22))
    ).render()
    np.testing.assert_array_equal(pool.batch.state, before)
    assert (pictures[0] != pictures[1]).any()
    shells = (pictures[0].min(-1) > 150).mean()
    assert shells > 0.05  # the Panda is white
    assert (pictures[0, 0] == SOLVED).all() == bool(pool.task.success()[0])


def test_a_failed_video_leaves_nothing(tmp_path: Path) -> None:
    def crash() -> None:
        with open_mp4(tmp_path / "x.mp4", 20) as write:
            write(np.zeros((16, 16, 3), np.uint8))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        crash()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="even"), open_mp4(tmp_path / "x.mp4", 20) as write:
        write(np.zeros((15, 16, 3), np.uint8))
    assert not list(tmp_path.iterdir())


def test_grid_places_tiles_row_by_row() -> None:
    tiles = np.arange(1, 6, dtype=np.uint8)[:, None, None, None] * np.ones((5, 2, 4, 3), np.uint8)
    picture = grid(tiles)
    assert picture.shape == (4, 12, 3)
    assert picture[::2, ::4, 0].tolist() == [[1, 2, 3], [4, 5, 0]]
