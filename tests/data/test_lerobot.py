"""LeRobotDataset v3 on disk: what is written, what is read, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, Box, CameraSpec, EnvSpec, Term
from embodied.data import Episode, lerobot, read, write
from embodied.data.images import encode_png

SPEC = replace(
    EnvSpec.of_sizes("test", state=3, privileged=1, action=2),
    state=(Term("a", 2), Term("c", 1)), action=Box((ActionTerm("dx"), ActionTerm("gripper"))),
)  # fmt: skip
LENGTHS = (4, 6, 5)


def episode(length: int, instruction: str = "do it") -> Episode:
    generator = torch.Generator().manual_seed(length)
    done = torch.zeros(length, dtype=torch.bool)
    done[-1] = True
    return Episode(
        torch.randn(length, 3, generator=generator),
        torch.rand(length, 2, generator=generator),
        torch.rand(length, generator=generator),
        done,
        instruction,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A data set of three episodes and two instructions."""
    write(tmp_path / "set", [episode(LENGTHS[0]), episode(LENGTHS[1], "do that"), episode(LENGTHS[2])], SPEC)
    return tmp_path / "set"


def frames(path: Path) -> pa.Table:
    return pq.read_table(path / "data" / "chunk-000" / "file-000.parquet")


def rewrite(path: Path, **columns: pa.Array) -> None:
    """Replace columns of the frames."""
    table = frames(path)
    for key, value in columns.items():
        name = key.replace("_dot_", ".")
        table = table.set_column(table.column_names.index(name), name, value)
    pq.write_table(table, path / "data" / "chunk-000" / "file-000.parquet")


def edit_info(path: Path, **values: object) -> None:
    file = path / "meta" / "info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_episode_without_some_of_its_frames_is_refused_by_name(path: Path) -> None:
    table = frames(path)
    rest = pa.concat_tables([table.slice(1, 5), table.slice(8)])  # the first frame, and two within the second episode
    pq.write_table(rest, path / "data" / "chunk-000" / "file-000.parquet")
    with pytest.raises(UserError, match=r"frame 4 follows frame 1 in episode 1 of data/chunk-000/file-000.parquet"):
        read(path)
    pq.write_table(rest.slice(0, 3), path / "data" / "chunk-000" / "file-000.parquet")
    pq.write_table(rest.slice(3), path / "data" / "chunk-000" / "file-001.parquet")
    with pytest.raises(UserError, match=r"frame 4 follows frame 1 in episode 1 of data/chunk-000/file-001.parquet"):
        read(path)
    pq.write_table(rest.slice(5), path / "data" / "chunk-000" / "file-001.parquet")
    with pytest.raises(UserError, match=r"data/ has 3 frames of episode 0, meta/episodes says 4\. Go back"):
        read(path)


def test_data_of_another_robot_is_named_where_it_is_known(path: Path) -> None:
    def lines(robot: str) -> list[str]:
        return [one for one in lerobot.check_fits(read(path), replace(SPEC, robot=robot), path) if "with robot" in one]

    edit_info(path, robot_type="franka_panda")
    assert not lines("so101"), "elsewhere robots have other names"
    (path / lerobot.RECORDED_WITH).write_text('{"task": "test"}')
    (line,) = lines("so101")
    assert line.endswith("it was recorded with robot franka_panda, but that of task test is so101")
    assert not lines("franka_panda")


def test_an_older_version_is_converted_by_a_command(path: Path) -> None:
    edit_info(path, codebase_version="v2.1")
    module = "lerobot.datasets.v30.convert_dataset_v21_to_v30"
    with pytest.raises(UserError, match=f"python -m {module} --repo-id=set --root={path.parent} --push-to-hub=false$"):
        read(path)


def test_frames_that_are_not_there_are_missed_without_a_list_of_episodes(path: Path) -> None:
    shutil.rmtree(path / "meta" / "episodes")
    assert len(read(path).episode_F) == sum(LENGTHS)
    pq.write_table(frames(path).slice(0, 12), path / "data" / "chunk-000" / "file-000.parquet")
    with pytest.raises(UserError, match=r"data/ has 12 frames, meta/info\.json says 15\. Go back"):
        read(path)


def test_what_was_written_is_read(path: Path) -> None:
    data = read(path)
    episodes = [episode(length) for length in LENGTHS]
    assert torch.equal(data.state_FS, torch.cat([e.state_LS for e in episodes]))
    assert torch.equal(data.action_FA, torch.cat([e.action_LA for e in episodes]))
    assert data.episode_F.tolist() == [0] * 4 + [1] * 6 + [2] * 5
    assert data.control_hz == 20.0
    assert (data.state_names, data.action_names) == (SPEC.state_names, SPEC.action_names)
    assert data.instructions == ("do it", "do that")
    assert data.instruction_F.tolist() == [0] * 4 + [1] * 6 + [0] * 5
    assert data.images == {}
    lerobot.check_fits(data, SPEC, path)


def test_layout_is_that_of_version_3(path: Path) -> None:
    """Fields and files that LeRobot 0.6 reads (src/lerobot/datasets: utils.DatasetInfo, io_utils, dataset_metadata)."""
    info = json.loads((path / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert info["fps"] == 20
    assert isinstance(info["fps"], int)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 15, 2)
    assert info["splits"] == {"train": "0:3"}
    assert info["features"]["observation.state"] == {
        "dtype": "float32",
        "shape": [3],
        "names": ["a[0]", "a[1]", "c[0]"],
    }
    assert info["features"]["action"]["names"] == ["dx", "gripper"]
    assert info["features"]["next.done"] == {"dtype": "bool", "shape": [1], "names": None}
    data_path = info["data_path"].format(chunk_index=0, file_index=0)
    table = pq.read_table(path / data_path)
    assert set(table.column_names) == set(info["features"])
    for key, feature in info["features"].items():
        kind = table.schema.field(key).type
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else 1
        scalar = kind.value_type if pa.types.is_fixed_size_list(kind) else kind
        assert [size] == feature["shape"], key
        assert str(scalar).replace("float", "float32").replace("float3232", "float32") == feature["dtype"], key
    np.testing.assert_allclose(table["timestamp"].to_numpy()[4:10], np.arange(6) / 20, atol=1e-6)
    assert table["frame_index"].to_pylist() == [*range(4), *range(6), *range(5)]
    assert table["index"].to_pylist() == list(range(15))
    assert table["task_index"].to_pylist() == [0] * 4 + [1] * 6 + [0] * 5
    assert [i for i, done in enumerate(table["next.done"].to_pylist()) if done] == [3, 9, 14]

    rows = pq.read_table(path / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [row["length"] for row in rows] == list(LENGTHS)
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [(0, 4), (4, 10), (10, 15)]
    assert [row["tasks"] for row in rows] == [["do it"], ["do that"], ["do it"]]
    places = ("data/chunk_index", "data/file_index", "meta/episodes/chunk_index", "meta/episodes/file_index")
    assert all(row[place] == 0 for row in rows for place in places)


@pytest.mark.parametrize(("robot", "label"), [("", None), ("xarm7", "xarm7")])
def test_the_robot_is_that_of_the_spec(tmp_path: Path, robot: str, label: str | None) -> None:
    write(tmp_path / "set", [episode(3)], replace(SPEC, robot=robot))
    assert json.loads((tmp_path / "set" / "meta" / "info.json").read_text())["robot_type"] == label


def test_features_of_one_number_are_plain_columns(tmp_path: Path) -> None:
    """LeRobot and ``datasets`` read a feature of shape [1] as a number, and refuse a list of one."""
    one = replace(episode(3), action_LA=torch.rand(3, 1))
    write(tmp_path / "set", [one], EnvSpec.of_sizes("test", state=3, action=1))
    assert frames(tmp_path / "set").schema.field("action").type == pa.float32()
    assert torch.equal(read(tmp_path / "set").action_FA, one.action_LA)


def test_instructions_are_the_index_of_a_pandas_frame(path: Path) -> None:
    """LeRobot looks a task up by ``tasks.loc[instruction]`` and ``tasks.iloc[index].name``."""
    table = pq.read_table(path / "meta" / "tasks.parquet")
    assert dict(zip(table["task"].to_pylist(), table["task_index"].to_pylist(), strict=True)) == {
        "do it": 0, "do that": 1,
    }  # fmt: skip
    assert json.loads(table.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_statistics(path: Path) -> None:
    stats, state = json.loads((path / "meta" / "stats.json").read_text()), read(path).state_FS.double()
    found = stats["observation.state"]
    for key, value in {"min": state.amin(0), "max": state.amax(0), "mean": state.mean(0)}.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6)
    np.testing.assert_allclose(found["std"], state.std(0, correction=0), rtol=1e-6)
    assert found["count"] == [15]
    assert set(stats) == set(frames(path).column_names)


def test_keys_can_be_mapped(path: Path) -> None:
    table = frames(path)
    names = [{"observation.state": "obs", "action": "act"}.get(name, name) for name in table.column_names]
    pq.write_table(table.rename_columns(names), path / "data" / "chunk-000" / "file-000.parquet")
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    edit_info(path, features={"obs": features["observation.state"], "act": {**features["action"], "names": None}})
    with pytest.raises(UserError, match=r"lacks observation\.state, action .did you mean act.*It has: act, obs"):
        read(path)
    data = read(path, {"state": "obs", "action": "act"})
    assert data.state_FS.shape == (15, 3)
    assert data.action_names == ()


def test_a_wrong_key_is_named_with_the_nearest_one(path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks observation\.stat \(did you mean observation\.state\?\)"):
        read(path, {"state": "observation.stat"})


def test_numbers_that_are_not_finite(path: Path) -> None:
    values = np.ones(30, np.float32)
    values[14] = np.nan
    rewrite(path, action=pa.FixedSizeListArray.from_arrays(pa.array(values), 2))
    with pytest.raises(UserError, match="action is not finite in 1 frames, the first is frame 3 of episode 1"):
        read(path)


def test_frames_of_several_lengths(path: Path) -> None:
    rewrite(path, action=pa.array([[0.0, 1.0]] * 14 + [[0.0]]))
    with pytest.raises(UserError, match="action is not a list of numbers of one length"):
        read(path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, state=(Term("a", 4),)), "its state has 3 entries, task test has 4"),
        (
            replace(SPEC, action=Box(tuple(ActionTerm(f"{i}") for i in range(7)))),
            "its action has 2 entries, task test has 7",
        ),
        (replace(SPEC, control_dt_s=0.1), "recorded at 20 Hz, but task test runs at 10"),
        (
            replace(SPEC, state=(Term("a", 2), Term("x", 1))),
            r"entry 2 of its state is 'c\[0\]', that of task test 'x\[0\]'",
        ),
    ],
)
def test_data_of_another_robot_or_rate(path: Path, spec: EnvSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lerobot.check_fits(read(path), spec, path)


def test_a_rate_that_is_assumed_is_not_held_against_the_data(path: Path) -> None:
    spec = replace(SPEC, control_dt_s=1.0, assumed=("control_dt_s",))
    line = lerobot.check_fits(read(path), spec, path)[-1]
    assert "recorded at 20 Hz, but task test states no rate (1 is assumed): one action must be one step of it" in line


@pytest.mark.parametrize("names", [["state"], {"motors": ["state"]}])
def test_one_name_for_a_whole_vector_names_no_entry(path: Path, names: object) -> None:
    """As converters of other projects write it."""
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    features["observation.state"]["names"] = names
    edit_info(path, features=features)
    assert read(path).state_names == ()
    (line,) = lerobot.check_fits(read(path), SPEC, path)
    assert "its episodes have 2 instructions, which a policy on the state does not read: do it, do that" in line


@pytest.mark.parametrize("names", [{"a[1]": 1, "c": 2, "a[0]": 0}, {"group": ["a[0]", "a[1]", "c"]}])
def test_names_may_be_a_mapping(path: Path, names: object) -> None:
    """To their places, or groups of them, as LeRobot's recorders write it."""
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    features["observation.state"]["names"] = names
    edit_info(path, features=features)
    assert read(path).state_names == ("a[0]", "a[1]", "c")


@pytest.mark.parametrize("names", [{"axes": None}, 3, None, "abc"])
def test_names_that_are_none_do_not_count(path: Path, names: object) -> None:
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    features["observation.state"]["names"] = names
    edit_info(path, features=features)
    data = read(path, {"state": {"entries": ["2", "0"]}})
    assert torch.equal(data.state_FS, read(path).state_FS[:, [2, 0]])


@pytest.mark.parametrize(
    "values", [{"fps": None}, {"fps": 0}, {"fps": "fast"}, {"features": None}, {"features": {"action": None}}], ids=str
)
def test_a_damaged_description_is_one_line(path: Path, values: dict[str, Any]) -> None:
    edit_info(path, **values)
    with pytest.raises(UserError, match=r"not a LeRobotDataset: no readable meta/info\.json"):
        read(path)


@pytest.mark.parametrize("key", ["episode_index", "frame_index", "timestamp"])
@pytest.mark.parametrize("values", [["x"] * 15, [[1, 2]] * 15], ids=["text", "lists"])
def test_a_column_that_is_no_number_is_one_line(path: Path, key: str, values: list[Any]) -> None:
    rewrite(path, **{key: pa.array(values)})
    with pytest.raises(UserError, match=f"cannot read {key}: "):
        read(path)


def test_a_file_that_is_missing_is_named(path: Path) -> None:
    """Of a download that was interrupted; and a folder that was left there, with frames of its own, is refused."""
    table = frames(path)
    folder, episodes = path / "data" / "chunk-000", path / "meta" / "episodes" / lerobot.FILE
    rows = pq.read_table(episodes)
    place = rows.column_names.index("data/file_index")
    pq.write_table(rows.set_column(place, "data/file_index", pa.array([0, 0, 1])), episodes)
    pq.write_table(table.slice(0, 10), folder / "file-000.parquet")
    with pytest.raises(UserError, match=r"data/chunk-000/file-001\.parquet missing, which meta/episodes names"):
        read(path)
    pq.write_table(table.slice(10), folder / "file-001.parquet")
    (path / "data" / "old").mkdir()
    assert len(read(path).episode_F) == 15
    pq.write_table(table, path / "data" / "old" / "file-000.parquet")
    with pytest.raises(UserError, match=r"data/ has 30 frames, meta/info\.json says 15"):
        read(path)


def test_what_is_not_a_data_set(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a LeRobotDataset: no readable meta/info"):
        read(tmp_path / "nothing")
    edit_info(path, codebase_version="v2.1")
    with pytest.raises(UserError, match=r"has format v2\.1, needed is v3\.0"):
        read(path)
    edit_info(path, codebase_version="v3.0")
    (path / "data" / "chunk-000" / "file-000.parquet").write_bytes(b"PAR1 is not all")
    with pytest.raises(UserError, match="cannot read its frames"):
        read(path)


def test_nothing_is_overwritten_and_nothing_is_left_half_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(file.read_bytes() for file in path.rglob("*") if file.is_file())
    with pytest.raises(UserError, match="exists; give a new directory"):
        write(path, [episode(3)], SPEC)
    assert sorted(file.read_bytes() for file in path.rglob("*") if file.is_file()) == before

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(UserError, match="cannot be written: No space"):
        write(path.with_name("other"), [episode(3)], SPEC)
    assert [entry.name for entry in path.parent.iterdir()] == ["set"]


def test_images_are_png_columns_with_statistics_of_their_channels(tmp_path: Path) -> None:
    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8))
    plain = episode(4)
    write(tmp_path / "set", [replace(plain, images={"front": pictures})], SPEC)
    info = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())
    assert info["features"]["observation.images.front"] == {
        "dtype": "image", "shape": [6, 8, 3], "names": ["height", "width", "channels"],
    }  # fmt: skip
    column = pq.read_table(tmp_path / "set" / "data" / lerobot.FILE)["observation.images.front"].to_pylist()
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in column])
    np.testing.assert_array_equal(decoded, pictures.numpy())
    stats = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())["observation.images.front"]
    np.testing.assert_allclose(np.array(stats["mean"])[:, 0, 0], pictures.double().mean((0, 1, 2)) / 255)
    assert (np.array(stats["std"]).shape, stats["count"]) == ((3, 1, 1), [4])
    assert torch.equal(read(tmp_path / "set").action_FA, plain.action_LA)
    data = read(tmp_path / "set", cameras=["front"])
    assert torch.equal(data.images["front"], pictures)
    lerobot.check_fits(data, replace(SPEC, cameras=(CameraSpec("front", 6, 8),)), tmp_path)
    with pytest.raises(UserError, match="pictures of camera front have 6x8 pixels, needed is 64x64: resize"):
        lerobot.check_fits(data, replace(SPEC, cameras=(CameraSpec("front", 64, 64),)), tmp_path)
    with pytest.raises(UserError, match=r"lacks observation.images.wrist .did you mean observation.images.front"):
        read(tmp_path / "set", cameras=["front", "wrist"])


def test_pictures_that_cannot_be_read(tmp_path: Path) -> None:
    pictures = torch.zeros(4, 6, 8, 3, dtype=torch.uint8)
    write(tmp_path / "set", [replace(episode(4), images={"front": pictures})], SPEC)
    path, key = tmp_path / "set", "observation.images.front"
    rows = frames(path)[key].to_pylist()

    def put(**row: object) -> None:
        rewrite(
            path, observation_dot_images_dot_front=pa.array([*rows[:2], {"bytes": None, "path": None} | row, rows[3]])
        )

    put(bytes=b"JFIF")
    with pytest.raises(UserError, match=r"observation.images.front of frame 2: it is not a PNG file; JPEG"):
        read(path, cameras=["front"])
    put(path="images/2.png")
    with pytest.raises(UserError, match="of frame 2: the picture is not in the parquet file"):
        read(path, cameras=["front"])
    put(bytes=encode_png(np.zeros((3, 3, 3), np.uint8)))
    with pytest.raises(UserError, match="has pictures of several sizes, the first is in frame 2"):
        read(path, cameras=["front"])
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    edit_info(path, features=features | {key: features[key] | {"dtype": "audio"}})
    with pytest.raises(UserError, match=r"observation\.images\.front is of type audio, allowed: image and video"):
        read(path, cameras=["front"])


@pytest.mark.parametrize("name", ["task", "__index_level_0__"])
def test_further_columns_of_instructions_are_not_read(path: Path, name: str) -> None:
    """Such as LeRobot's subtasks; with pandas' index, and without what pandas writes about it."""
    file, expected = path / "meta" / "tasks.parquet", read(path)
    table = pq.read_table(file)
    pandas = table.schema.pandas_metadata | {"index_columns": [name]}
    table = table.rename_columns(["task_index", name])
    for further in ("subtask", "note"):
        table = table.append_column(further, pa.array(["a", "b"]))
    for metadata in [{"pandas": json.dumps(pandas)}] + ([{}] if name == "task" else []):
        pq.write_table(table.replace_schema_metadata(metadata), file)
        assert read(path).instructions == expected.instructions
    pq.write_table(table.drop_columns([name]).replace_schema_metadata({}), file)
    with pytest.raises(UserError, match="cannot read its instructions"):
        read(path)


def test_instructions_that_are_not_there(path: Path) -> None:
    rewrite(path, task_index=pa.array([0] * 14 + [7]))
    with pytest.raises(UserError, match=r"task_index 7 of its frames is not in meta/tasks\.parquet"):
        read(path)
    (path / "meta" / "tasks.parquet").unlink()
    with pytest.raises(UserError, match="cannot read its instructions"):
        read(path)
