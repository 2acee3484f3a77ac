"""Writer of LeRobotDataset v3 (layout: lerobot.py), with all episodes in one file of each kind.

``meta/stats.json`` has the statistics of every feature over all frames, ``meta/episodes`` those of each episode, from
which LeRobot's tools compute the statistics of a changed data set. LeRobot estimates quantiles from histograms and
image statistics from samples; here both are exact. Policies such as π0.5 normalise by quantiles.
"""

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
from embodied.data.columns import action_units, state_units
from embodied.data.demonstrations import Episode
from embodied.data.images import encode_png
from embodied.data.lerobot import ACTION, FILE, IMAGES, RECORDED_WITH, STATE, TASK, TIME, UNITS
from embodied.data.lerobot_meta import VERSION

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
Array = NDArray[Any]


def write(path: Path, episodes: Sequence[Episode], spec: EnvSpec, words: Mapping[str, Any] | None = None) -> None:
    """Write one or more episodes as a data set, or nothing. UserError if ``path`` exists or cannot be written.

    words: of the command line, that build the environment again, such as ``task.robot``.
    """
    assert episodes
    partial = path.with_name(f".{path.name}.writing")
    try:
        if path.exists():
            raise UserError(f"out={path} exists; give a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        _write(partial, episodes, spec)
        if words is not None:
            (partial / RECORDED_WITH).write_text(json.dumps(words, indent=4), encoding="utf-8")
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
    columns: dict[str, Array] = {
        STATE: _joined([episode.state_LS for episode in episodes]),
        ACTION: _joined([episode.action_LA for episode in episodes]),
        "next.reward": _joined([episode.reward_L for episode in episodes]),
        "next.success": _joined([episode.success_L for episode in episodes]),
        "next.done": frame_index == np.repeat(lengths, lengths) - 1,
        TIME: (frame_index * spec.control_dt_s).astype(np.float32),
        "frame_index": frame_index,
        "episode_index": np.repeat(np.arange(len(episodes)), lengths),
        "index": np.arange(ends[-1]),
        TASK: np.repeat([instructions.index(episode.instruction) for episode in episodes], lengths),
        **{name: _joined([episode.extra[name] for episode in episodes]) for name in episodes[0].extra},
    }
    images = {f"{IMAGES}.{camera}": _joined([e.images[camera] for e in episodes]) for camera in episodes[0].images}
    names = {STATE: list(spec.state_names), ACTION: list(spec.action_names)}
    features: dict[str, dict[str, Any]] = {
        key: {"dtype": str(value.dtype), "shape": list(value.shape[1:]) or [1], "names": names.get(key)}
        for key, value in columns.items()
    }
    tables = {key: _array(value) for key, value in columns.items()}
    for key, frames in images.items():
        features[key] = {"dtype": "image", "shape": list(frames.shape[1:]), "names": ["height", "width", "channels"]}
        tables[key] = pa.array([{"bytes": encode_png(frame), "path": None} for frame in frames], type=IMAGE)
    fps = 1 / spec.control_dt_s
    info = {
        "codebase_version": VERSION, "robot_type": spec.robot or None,
        "total_episodes": len(episodes), "total_frames": int(ends[-1]), "total_tasks": len(instructions),
        "chunks_size": 1000, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200,
        "fps": round(fps) if abs(fps - round(fps)) < 1e-6 else fps, "splits": {"train": f"0:{len(episodes)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_path": None,
        "features": features,
    }  # fmt: skip
    zeros = np.zeros(len(episodes), np.int64)
    rows = {
        "episode_index": np.arange(len(episodes)), "tasks": [[episode.instruction] for episode in episodes],
        "length": lengths, "data/chunk_index": zeros, "data/file_index": zeros, "dataset_from_index": ends - lengths,
        "dataset_to_index": ends, "meta/episodes/chunk_index": zeros, "meta/episodes/file_index": zeros,
    }  # fmt: skip
    stats = [_stats(columns | images, slice(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    for key, found in stats[0].items():
        for name in found:
            rows[f"stats/{key}/{name}"] = pa.array([of_episode[key][name] for of_episode in stats])
    for folder in ("meta/episodes", "data"):
        (path / folder / FILE).parent.mkdir(parents=True)
    pq.write_table(_with_features(pa.table(tables), features), path / "data" / FILE)
    pq.write_table(pa.table(rows), path / "meta" / "episodes" / FILE)
    pq.write_table(_tasks(instructions), path / "meta" / "tasks.parquet")
    described = {
        "meta/info.json": info,
        UNITS: {STATE: state_units(spec), ACTION: action_units(spec)},
        "meta/stats.json": _stats(columns | images, slice(None)),
    }
    for name, content in described.items():
        (path / name).write_text(json.dumps(content, indent=4), encoding="utf-8")


def _joined(parts: Sequence[torch.Tensor]) -> Array:
    joined = torch.cat(list(parts))
    values: Array = joined.float().numpy() if joined.is_floating_point() else joined.numpy()
    return values


def _array(value: Array) -> pa.Array:
    if value.size == len(value):  # LeRobot reads a feature of shape [1] as a plain number
        return pa.array(value.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(pa.array(value.reshape(-1)), value.shape[1])


def _stats(columns: Mapping[str, Array], frames: slice) -> dict[str, dict[str, list[Any]]]:
    """Return statistics of every feature over some frames, in LeRobot's shapes.

    Numbers [F] or [F, D] have [D] each (D = 1 for [F]). Images have [3, 1, 1], of each colour in [0, 1] over frames and
    pixels. ``count`` is the number of frames, [1].
    """
    stats = {}
    for key, column in columns.items():
        values = column[frames]
        largest, shape = (255, (3, 1, 1)) if values.ndim == 4 else (1, (-1,))
        rows = values.reshape(-1, 3) if values.ndim == 4 else values.reshape(len(values), -1).astype(float)
        found = [[x.min(), x.max(), x.mean(), x.std(), *np.quantile(x, list(QUANTILES.values()))] for x in rows.T]
        by_name = zip(("min", "max", "mean", "std", *QUANTILES), np.array(found).T / largest, strict=True)
        stats[key] = {name: value.reshape(shape).tolist() for name, value in by_name} | {"count": [len(values)]}
    return stats


def _with_features(table: pa.Table, features: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """Add the features as the package ``datasets`` (version 4) writes them, so that it decodes images by default."""
    described: dict[str, Any] = {}
    for key, feature in features.items():
        value, (size, *_) = {"dtype": feature["dtype"], "_type": "Value"}, feature["shape"]
        if feature["dtype"] == "image":
            described[key] = {"_type": "Image"}
        else:
            described[key] = value if size == 1 else {"feature": value, "length": size, "_type": "List"}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": described}})})


def _tasks(instructions: Sequence[str]) -> pa.Table:
    """Return a table that pandas reads as a frame with the instruction as its index, as LeRobot expects it."""
    table = pa.table({TASK: np.arange(len(instructions)), "task": list(instructions)})
    empty = {"field_name": None, "metadata": None}
    text = {**empty, "pandas_type": "unicode", "numpy_type": "object"}
    index = {**empty, "name": TASK, "field_name": TASK, "pandas_type": "int64", "numpy_type": "int64"}
    pandas = {
        "index_columns": ["task"], "column_indexes": [{**text, "name": None}],
        "columns": [index, {**text, "name": "task", "field_name": "task"}], "pandas_version": "2.2.0",
    }  # fmt: skip
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
