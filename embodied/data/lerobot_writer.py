"""Writer of LeRobotDataset v3 (layout: lerobot.py), with all episodes in one file of each kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line
from embodied.core.spec import EnvSpec
from embodied.data.demonstrations import Episode
from embodied.data.images import encode_png
from embodied.data.lerobot import ACTION, FILE, IMAGES, STATE, UNITS, VERSION
from embodied.data.lerobot_stats import Stats, as_json, episode_columns, image_stats, number_stats
from embodied.data.units import action_units, state_units

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path: Path, episodes: Sequence[Episode], spec: EnvSpec) -> None:
    """Write ``episodes`` (one or more) as a data set at ``path``. A failure leaves nothing.

    UserError if ``path`` exists or cannot be written.
    """
    assert episodes
    partial = path.with_name(f".{path.name}.writing")
    try:
        if path.exists():
            raise UserError(f"out={path} exists; give a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        _write(partial, episodes, spec)
        partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"out={path} cannot be written: {error.strerror or one_line(error)}") from error
        raise


def _write(path: Path, episodes: Sequence[Episode], spec: EnvSpec) -> None:
    instructions = list(dict.fromkeys(episode.instruction for episode in episodes))
    lengths = np.array([len(episode) for episode in episodes])
    ends = lengths.cumsum()
    frame_index = np.concatenate([np.arange(length) for length in lengths])
    columns = {
        STATE: _joined(episodes, "state_LS"),
        ACTION: _joined(episodes, "action_LA"),
        "next.reward": _joined(episodes, "reward_L"),
        "next.success": _joined(episodes, "success_L"),
        "next.done": frame_index == np.repeat(lengths, lengths) - 1,
        "timestamp": (frame_index * spec.control_dt_s).astype(np.float32),
        "frame_index": frame_index,
        "episode_index": np.repeat(np.arange(len(episodes)), lengths),
        "index": np.arange(ends[-1]),
        "task_index": np.repeat([instructions.index(episode.instruction) for episode in episodes], lengths),
    }
    names = {STATE: list(spec.state_names), ACTION: list(spec.action_names)}
    features = {
        key: {"dtype": str(value.dtype), "shape": list(value.shape[1:]) or [1], "names": names.get(key)}
        for key, value in columns.items()
    }
    tables = {key: _array(value) for key, value in columns.items()}
    images = {f"{IMAGES}.{camera}": _images(episodes, camera) for camera in episodes[0].images}
    for key, frames in images.items():
        features[key] = {"dtype": "image", "shape": list(frames.shape[1:]), "names": ["height", "width", "channels"]}
        tables[key] = pa.array([{"bytes": encode_png(frame), "path": None} for frame in frames], type=IMAGE)
    stats = [_stats(columns, images, slice(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    info = {
        "codebase_version": VERSION,
        "robot_type": spec.robot or None,
        "total_episodes": len(episodes),
        "total_frames": int(ends[-1]),
        "total_tasks": len(instructions),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": _whole(1 / spec.control_dt_s),
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }
    rows = {
        "episode_index": np.arange(len(episodes)),
        "tasks": [[episode.instruction] for episode in episodes],
        "length": lengths,
        "data/chunk_index": np.zeros(len(episodes), np.int64),
        "data/file_index": np.zeros(len(episodes), np.int64),
        "dataset_from_index": ends - lengths,
        "dataset_to_index": ends,
        "meta/episodes/chunk_index": np.zeros(len(episodes), np.int64),
        "meta/episodes/file_index": np.zeros(len(episodes), np.int64),
        **episode_columns(stats),
    }
    for folder in ("meta/episodes", "data"):
        (path / folder / FILE).parent.mkdir(parents=True)
    pq.write_table(_with_features(pa.table(tables), features), path / "data" / FILE)
    pq.write_table(pa.table(rows), path / "meta" / "episodes" / FILE)
    pq.write_table(_tasks(instructions), path / "meta" / "tasks.parquet")
    described = {
        "meta/info.json": info,
        UNITS: {STATE: state_units(spec), ACTION: action_units(spec)},
        "meta/stats.json": as_json(_stats(columns, images, slice(None))),
    }
    for name, content in described.items():
        (path / name).write_text(json.dumps(content, indent=4), encoding="utf-8")


def _images(episodes: Sequence[Episode], camera: str) -> NDArray[np.uint8]:
    frames: NDArray[np.uint8] = torch.cat([episode.images[camera] for episode in episodes]).numpy()
    return frames


def _stats(
    columns: Mapping[str, NDArray[Any]], images: Mapping[str, NDArray[np.uint8]], frames: slice
) -> dict[str, Stats]:
    """Return the statistics of every feature in some frames."""
    numbers = {key: number_stats(value[frames]) for key, value in columns.items()}
    return numbers | {key: image_stats(value[frames]) for key, value in images.items()}


def _with_features(table: pa.Table, features: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """Add the features as the package ``datasets`` (version 4) writes them, so that it decodes images by default."""

    def described(feature: Mapping[str, Any]) -> dict[str, Any]:
        if feature["dtype"] == "image":
            return {"_type": "Image"}
        value = {"dtype": feature["dtype"], "_type": "Value"}
        return value if feature["shape"] == [1] else {"feature": value, "length": feature["shape"][0], "_type": "List"}

    info = {"info": {"features": {key: described(feature) for key, feature in features.items()}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(info)})


def _joined(episodes: Sequence[Episode], name: str) -> np.ndarray:
    joined = torch.cat([getattr(episode, name) for episode in episodes])
    return joined.numpy() if joined.dtype == torch.bool else joined.float().numpy()


def _whole(rate: float) -> int | float:
    return round(rate) if abs(rate - round(rate)) < 1e-6 else rate


def _array(value: np.ndarray) -> pa.Array:
    if value.size == len(value):  # LeRobot reads a feature of shape [1] as a plain number
        return pa.array(value.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(pa.array(value.reshape(-1)), value.shape[1])


def _tasks(instructions: Sequence[str]) -> pa.Table:
    """Return a table that pandas reads as a frame with the instruction as its index, as LeRobot expects it."""
    table = pa.table({"task_index": np.arange(len(instructions)), "task": list(instructions)})
    column = {"field_name": None, "metadata": None}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "pandas_type": "unicode", "numpy_type": "object", **column}],
        "columns": [
            {"name": "task_index", "pandas_type": "int64", "numpy_type": "int64", **column, "field_name": "task_index"},
            {"name": "task", "pandas_type": "unicode", "numpy_type": "object", **column, "field_name": "task"},
        ],
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
