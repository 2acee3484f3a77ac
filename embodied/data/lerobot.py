"""LeRobotDataset v3 on disk, written and read with pyarrow alone.

    <dir>/meta/info.json                              features with dtype, shape and names; fps; totals; path patterns
          meta/stats.json                             min, max, mean, std and count of every feature
          meta/tasks.parquet                          instruction (the index of a pandas frame) -> task_index
          meta/episodes/chunk-000/file-000.parquet    one row an episode: length, instructions, where its frames are
          data/chunk-000/file-000.parquet             one row a frame

Format: https://huggingface.co/docs/lerobot/lerobot-dataset-v3. A frame holds the observation and the action that was
chosen on it; ``next.*`` is what the step led to. Images are columns of PNG files (feature type ``image``). We write all
episodes into one file of each kind.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow.lib import ArrowException
from torch import Tensor

from embodied.core.errors import UserError, nearest
from embodied.core.png import encode_png
from embodied.core.types import EnvSpec
from embodied.data.demonstrations import Demonstrations, Episode

VERSION = "v3.0"
FILE = "chunk-000/file-000.parquet"
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images"
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
INDEX_COLUMNS = {
    "timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64",
}  # fmt: skip


# -- writing -----------------------------------------------------------------------------------------------------------
def write(path: Path, episodes: Sequence[Episode], spec: EnvSpec, robot_type: str = "franka_panda") -> None:
    """Write ``episodes`` (one or more) as a data set at ``path``, which must not exist; nothing is left on failure."""
    assert episodes
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.writing")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(partial, episodes, spec, robot_type)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def refuse_existing(path: Path) -> None:
    """UserError if there is something at ``path``; for commands to ask before they work, as ``write`` does after."""
    if path.exists():
        raise UserError(f"out={path} exists; give a new directory")


def _write(path: Path, episodes: Sequence[Episode], spec: EnvSpec, robot_type: str) -> None:
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
    stats = {key: _stats(value) for key, value in columns.items()}
    for camera in episodes[0].images:
        key, pictures = f"{IMAGES}.{camera}", torch.cat([episode.images[camera] for episode in episodes]).numpy()
        features[key] = {"dtype": "image", "shape": list(pictures.shape[1:]), "names": ["height", "width", "channels"]}
        tables[key] = pa.array([{"bytes": encode_png(picture), "path": None} for picture in pictures], type=PICTURE)
        stats[key] = _image_stats(pictures)
    info = {
        "codebase_version": VERSION,
        "robot_type": robot_type,
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
    }
    for folder in ("meta/episodes", "data"):
        (path / folder / FILE).parent.mkdir(parents=True)
    pq.write_table(pa.table(tables), path / "data" / FILE)
    pq.write_table(pa.table(rows), path / "meta" / "episodes" / FILE)
    pq.write_table(_tasks(instructions), path / "meta" / "tasks.parquet")
    (path / "meta" / "info.json").write_text(json.dumps(info, indent=4))
    (path / "meta" / "stats.json").write_text(json.dumps(stats, indent=4))


def _joined(episodes: Sequence[Episode], name: str) -> np.ndarray:
    joined = torch.cat([getattr(episode, name) for episode in episodes])
    return joined.numpy() if joined.dtype == torch.bool else joined.float().numpy()


def _whole(rate: float) -> int | float:
    return round(rate) if abs(rate - round(rate)) < 1e-6 else rate


def _array(value: np.ndarray) -> pa.Array:
    if value.ndim == 1:
        return pa.array(value)
    return pa.FixedSizeListArray.from_arrays(pa.array(value.reshape(-1)), value.shape[1])


def _stats(value: np.ndarray) -> dict[str, list[float]]:
    """Over frames, for each entry (lists, also where there is one)."""
    rows = value.reshape(len(value), -1).astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    return {**{key: entry.tolist() for key, entry in found.items()}, "count": [len(rows)]}


def _image_stats(pictures_FHWC: np.ndarray) -> dict[str, Any]:
    """Of each colour channel over frames and pixels, of values in [0, 1]; shaped [3, 1, 1] as LeRobot has them."""
    channels = pictures_FHWC.reshape(-1, pictures_FHWC.shape[-1]) / 255.0
    found = {"min": channels.min(0), "max": channels.max(0), "mean": channels.mean(0), "std": channels.std(0)}
    return {**{key: entry[:, None, None].tolist() for key, entry in found.items()}, "count": [len(pictures_FHWC)]}


def _tasks(instructions: Sequence[str]) -> pa.Table:
    """A table that pandas reads as a frame indexed by the instruction, which is what LeRobot looks it up by."""
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


# -- reading -----------------------------------------------------------------------------------------------------------
def read(path: Path, keys: Mapping[str, str] | None = None) -> Demonstrations:
    """State, action and episode of every frame of a LeRobotDataset v3, whoever made it.

    keys: what the data set calls ``state`` and ``action`` (by default observation.state and action).
    UserError that lists what is missing, or says what is wrong: no such data set, another version, missing features,
    numbers that are not finite.
    """
    unknown = sorted(set(keys or {}) - {"state", "action"})
    if unknown:
        raise UserError(f"data_keys.{unknown[0]}: a policy here learns from state and action, nothing else")
    keys = {"state": STATE, "action": ACTION, **(keys or {})}
    info = _info(path)
    features = info["features"]
    missing = [name for name in keys.values() if name not in features]
    if missing:
        hints = {name: nearest(name, features) for name in missing}
        listed = ", ".join(f"{name}" + (f" (did you mean {hint}?)" if hint else "") for name, hint in hints.items())
        raise UserError(f"data set {path}: it lacks {listed}. It has: {', '.join(sorted(features))}")
    files = sorted((path / "data").glob("*/*.parquet"))
    if not files:
        raise UserError(f"data set {path}: there is no parquet file under data/")
    try:
        table = pa.concat_tables([pq.read_table(file, columns=[*keys.values(), "episode_index"]) for file in files])
    except (ArrowException, OSError, KeyError) as error:
        raise UserError(f"data set {path}: cannot read its frames: {error}") from error
    episode = torch.from_numpy(table["episode_index"].to_numpy().astype(np.int64))
    if len(episode) == 0 or bool((episode.diff() < 0).any()):
        raise UserError(f"data set {path}: frames must be there, and in the order of their episodes")
    return Demonstrations(
        _matrix(table, keys["state"], path),
        _matrix(table, keys["action"], path),
        episode,
        float(info["fps"]),
        _names(features[keys["state"]]),
        _names(features[keys["action"]]),
    )


def check_fits(data: Demonstrations, spec: EnvSpec, path: Path) -> None:
    """UserError unless the data set's sizes, names and control rate are those of the task."""
    rate = 1 / spec.control_dt_s
    if not math.isclose(data.control_hz, rate, rel_tol=1e-3):
        raise UserError(f"data set {path}: recorded at {data.control_hz:g} Hz, but task {spec.task} runs at {rate:g}")
    pairs = (("state", data.state_FS, data.state_names, spec.state_dim, spec.state_names),
             ("action", data.action_FA, data.action_names, spec.action_dim, spec.action_names))  # fmt: skip
    for what, values, names, size, expected in pairs:
        if values.shape[1] != size:
            raise UserError(f"data set {path}: its {what} has {values.shape[1]} entries, task {spec.task} has {size}")
        if names and expected and names != expected:
            at = next(i for i, (a, b) in enumerate(zip(names, expected, strict=True)) if a != b)
            raise UserError(
                f"data set {path}: entry {at} of its {what} is '{names[at]}', that of task {spec.task} '{expected[at]}'"
            )


def _info(path: Path) -> dict[str, Any]:
    try:
        info = json.loads((path / "meta" / "info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data={path} is not a LeRobotDataset: no readable meta/info.json ({error})") from error
    missing = [key for key in ("codebase_version", "fps", "features") if key not in info]
    if missing:
        raise UserError(f"data set {path}: meta/info.json lacks {', '.join(missing)}")
    if not str(info["codebase_version"]).startswith("v3."):
        raise UserError(
            f"data set {path} has format {info['codebase_version']}, needed is {VERSION}: LeRobot's "
            "convert_dataset_v21_to_v30 converts older ones"
        )
    return dict(info)


def _names(feature: Mapping[str, Any]) -> tuple[str, ...]:
    names = feature.get("names")
    if isinstance(names, Mapping):  # {"motors": [...]}, as some recorders write it
        names = [name for group in names.values() for name in group]
    return tuple(map(str, names or ()))


def _matrix(table: pa.Table, key: str, path: Path) -> Tensor:
    """A column of numbers or lists of numbers as float32 [F, D]; UserError unless it is rectangular and finite."""
    try:
        rows = np.asarray(table[key].to_pylist(), dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"data set {path}: {key} is not a list of numbers of one length in every frame") from error
    values = torch.from_numpy(rows.reshape(len(rows), -1))
    broken = (~values.isfinite().all(1)).nonzero().squeeze(1)
    if len(broken):
        raise UserError(f"data set {path}: {key} is not finite in {len(broken)} frames, the first is {int(broken[0])}")
    return values
