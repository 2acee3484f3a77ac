"""Data sets whose pictures are videos, as most public ones are: each frame gets its own picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
import torch

from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.data import Episode, lerobot, read, write

SPEC = EnvSpec.of_sizes("test", state=3, privileged=1, action=2)
KEY = "observation.images.front"
LENGTHS = (5, 8, 6)
SIZE = 32  # pixels; codecs want multiples of 16
FPS = round(1 / SPEC.control_dt_s)
CODECS = ("libx264", "libsvtav1")  # the usual one, and LeRobot's default


def level(episode: int, frame: int) -> int:
    """Brightness of a frame, different for each."""
    return 10 + 60 * episode + 6 * frame


def encode(file: Path, levels: Sequence[int], codec: str = "libx264", size: int = SIZE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = imageio_ffmpeg.write_frames(str(file), (size, size), fps=FPS, codec=codec, quality=8)
    writer.send(None)
    for value in levels:
        writer.send(np.full((size, size, 3), value, np.uint8))
    writer.close()


def make(path: Path, codec: str = "libx264") -> Path:
    """A data set whose episodes 0 and 1 share a video, and whose episode 2 has its own."""
    episodes = [
        Episode(torch.zeros(n, 3), torch.zeros(n, 2), torch.zeros(n), torch.zeros(n, dtype=torch.bool), "do it")
        for n in LENGTHS
    ]
    write(path, episodes, SPEC)
    info = json.loads((path / "meta" / "info.json").read_text())
    info["features"][KEY] = {
        "dtype": "video", "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channels"],
    }  # fmt: skip
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (path / "meta" / "info.json").write_text(json.dumps(info))
    file = path / "meta" / "episodes" / lerobot.FILE
    table = pq.read_table(file)
    from_s, to_s = [0.0, LENGTHS[0] / FPS, 0.0], [LENGTHS[0] / FPS, sum(LENGTHS[:2]) / FPS, LENGTHS[2] / FPS]
    places = {"chunk_index": [0, 0, 0], "file_index": [0, 0, 1], "from_timestamp": from_s, "to_timestamp": to_s}
    for name, column in places.items():
        table = table.append_column(f"videos/{KEY}/{name}", pa.array(column))
    pq.write_table(table, file)
    levels = [[level(episode, frame) for frame in range(length)] for episode, length in enumerate(LENGTHS)]
    encode(path / "videos" / KEY / "chunk-000" / "file-000.mp4", levels[0] + levels[1], codec)
    encode(path / "videos" / KEY / "chunk-000" / "file-001.mp4", levels[2], codec)
    return path


@pytest.mark.parametrize("codec", CODECS)
def test_each_frame_has_its_picture(tmp_path: Path, codec: str) -> None:
    data = read(make(tmp_path / "set", codec), cameras=["front"])
    images = data.images["front"]
    assert images.shape == (sum(LENGTHS), SIZE, SIZE, 3)
    assert images.dtype == torch.uint8
    wanted = [level(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    found = images.double().mean((1, 2, 3))
    assert (found - torch.tensor(wanted)).abs().max() < 3, "frames differ by 6"


def renumbered(table: pa.Table) -> pa.Table:
    """Rows of which the episodes have numbers without a gap."""
    numbers = np.unique(table["episode_index"].to_numpy(), return_inverse=True)[1]
    return table.set_column(table.column_names.index("episode_index"), "episode_index", pa.array(numbers))


def begun_again(table: pa.Table) -> pa.Table:
    """Rows of which frames and times of each episode begin at 0."""
    episode = table["episode_index"].to_numpy()
    frame = np.arange(len(episode)) - np.searchsorted(episode, episode)
    for name, column in (("frame_index", frame), ("timestamp", (frame / FPS).astype(np.float32))):
        table = table.set_column(table.column_names.index(name), name, pa.array(column))
    return table


def without(episode: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.filter(pa.compute.not_equal(table["episode_index"], episode))


def late(table: pa.Table) -> pa.Table:
    return table.filter(pa.compute.greater_equal(table["frame_index"], 2))


@pytest.mark.parametrize("cameras", [["front"], []])
@pytest.mark.parametrize(
    ("change", "message", "indices"),
    [
        (without(1), r"data/ has 2 episodes, meta/episodes 3; data/ lacks episode 1\.", "..."),
        (lambda table: renumbered(without(0)(table)), "meta/episodes 3; data/ lacks episode 2", ""),
        (late, r"data/ has 3 frames of episode 0, meta/episodes says 5\.|episode 0 begins with frame 2", ""),
        (lambda table: begun_again(late(table)), "data/ has 3 frames of episode 0, meta/episodes says 5", "0,1,2"),
        (lambda table: table.slice(0, 17), "data/ has 4 frames of episode 2, meta/episodes says 6", "2"),
    ],
)  # fmt: skip
def test_pictures_of_other_moments_are_refused(
    change: Callable[[pa.Table], pa.Table], message: str, indices: str, cameras: list[str], tmp_path: Path
) -> None:
    """As after deleting rows with pandas and leaving meta/ alone, also where episodes are numbered anew."""
    path = make(tmp_path / "set")
    file = path / "data" / lerobot.FILE
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(UserError, match=message) as caught:
        read(path, cameras=cameras)
    assert "\n" not in str(caught.value)
    command = f"HF_LEROBOT_HOME={tmp_path} lerobot-edit-dataset --repo_id=set --new_repo_id=set-kept --operation.type="
    assert f"{command}delete_episodes '--operation.episode_indices=[{indices}]'" in str(caught.value) or not indices


def test_frames_of_a_video_begin_at_0(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    file = path / "data" / lerobot.FILE
    table = pq.read_table(file)
    numbers = pa.array(table["frame_index"].to_numpy() + 2)
    pq.write_table(table.set_column(table.column_names.index("frame_index"), "frame_index", numbers), file)
    with pytest.raises(UserError, match="episode 0 begins with frame 2, needed for its video: 0"):
        read(path, cameras=["front"])
    assert len(read(path).episode_F) == sum(LENGTHS)


def test_two_episodes_may_show_the_same_frames(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    file, name = path / "meta" / "episodes" / lerobot.FILE, f"videos/{KEY}/"
    table = pq.read_table(file)
    for column, of_all in (("from_timestamp", [0.0] * 3), ("to_timestamp", [13 / FPS] * 3), ("file_index", [0] * 3)):
        place = table.column_names.index(name + column)
        table = table.set_column(place, name + column, pa.array(of_all))
    pq.write_table(table, file)
    found = read(path, cameras=["front"]).images["front"].double().mean((1, 2, 3))
    in_video = [level(0, frame) for frame in range(5)] + [level(1, frame) for frame in range(8)]
    wanted = [in_video[frame] for length in LENGTHS for frame in range(length)]
    assert (found - torch.tensor(wanted)).abs().max() < 3


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    video = path / "videos" / KEY / "chunk-000" / "file-001.mp4"
    encode(video, [0] * 5)
    with pytest.raises(UserError, match=r"file-001\.mp4 has 5 frames, its episodes need 6"):
        read(path, cameras=["front"])
    encode(video, [0] * 6, size=16)
    with pytest.raises(UserError, match=r"has videos of several sizes, the first of another in .*file-001\.mp4"):
        read(path, cameras=["front"])
    video.write_bytes(b"no video")
    with pytest.raises(UserError, match=r"the video .*file-001\.mp4 cannot be decoded"):
        read(path, cameras=["front"])
    video.unlink()
    with pytest.raises(UserError, match=r"the video .*file-001\.mp4 is missing"):
        read(path, cameras=["front"])
    file = path / "meta" / "episodes" / lerobot.FILE
    table = pq.read_table(file)
    pq.write_table(table.slice(0, 2), file)
    with pytest.raises(UserError, match="data/ has 3 episodes, meta/episodes 2; meta/episodes lacks episode 2"):
        read(path, cameras=["front"])
    pq.write_table(table.drop_columns([f"videos/{KEY}/file_index"]), file)
    with pytest.raises(UserError, match=f"cannot read from meta/episodes where {KEY} is"):
        read(path, cameras=["front"])


def test_an_episode_does_not_get_frames_of_the_next_one(tmp_path: Path) -> None:
    """The first episode has 5 frames, but 3 of its video, in a file that goes on with the second episode."""
    path = make(tmp_path / "set")
    file, name = path / "meta" / "episodes" / lerobot.FILE, f"videos/{KEY}/to_timestamp"
    table = pq.read_table(file)
    ends = pa.array([3 / FPS, *table[name].to_pylist()[1:]])
    pq.write_table(table.set_column(table.column_names.index(name), name, ends), file)
    with pytest.raises(UserError, match=r"file-000\.mp4 has 3 frames of episode 0, needed: 5"):
        read(path, cameras=["front"])


@pytest.mark.parametrize(
    "change",
    [lambda t: t - 1, lambda t: t + 0.1, lambda t: 0 * t, lambda t: t / 2, lambda t: 2 * t, lambda t: t + np.nan],
)
def test_times_that_name_no_frames_are_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """Before the video, later in it, all the same, too dense, too rare, or none."""
    path = make(tmp_path / "set")
    file = path / "data" / lerobot.FILE
    table = pq.read_table(file)
    times = pa.array(change(table["timestamp"].to_numpy()).astype(np.float32))
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), file)
    with pytest.raises(UserError, match=r"timestamps of episode 0 must begin at 0 and rise by 1/20 s"):
        read(path, cameras=["front"])


def test_a_camera_may_have_another_name(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    data = read(path, {"images": {"top": KEY}}, cameras=["top"])
    assert torch.equal(data.images["top"], read(path, cameras=["front"]).images["front"])
    with pytest.raises(UserError, match=r"lacks observation\.images\.top"):
        read(path, cameras=["top"])


def test_sizes_are_compared_before_decoding(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    message = (
        "pictures of camera front have 32x32 pixels, needed is 64x64: resize them, or give policy.image_size=32 if"
    )
    with pytest.raises(UserError, match=message):
        lerobot.check_sizes(path, replace(SPEC, cameras=(CameraSpec("front", 64, 64),)))
    lerobot.check_sizes(path, replace(SPEC, cameras=(CameraSpec("front", SIZE, SIZE),)))
