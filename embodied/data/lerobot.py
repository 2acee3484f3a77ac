"""Reader of LeRobotDataset v3 with pyarrow alone; lerobot_writer.py writes it.

    <dir>/meta/info.json                              features with dtype, shape and names; fps; totals; path patterns
          meta/stats.json                             min, max, mean, std, count and quantiles of every feature
          meta/tasks.parquet                          instruction (the index of a pandas frame) -> task_index
          meta/episodes/chunk-000/file-000.parquet    one row per episode: length, instructions, place of its frames
          data/chunk-000/file-000.parquet             one row per frame
          meta/units.json                             units of state and action (columns.py), in our own data sets
          meta/recorded_with.json                     words that build the environment again, in those of ``collect``

Format: https://huggingface.co/docs/lerobot/lerobot-dataset-v3. A frame holds an observation and the action that was
chosen for it; ``next.*`` are the results of that step. Images are columns of PNG files (feature type ``image``) or
frames of videos (``video``, images.py).
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from embodied.core.errors import UserError, nearest, unknown_name
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.data import columns
from embodied.data.demonstrations import Demonstrations
from embodied.data.images import center_crop, decode_png, read_videos, reading
from embodied.data.lerobot_meta import check_complete, check_consecutive, data_files, leave_out, read_info

FILE = "chunk-000/file-000.parquet"
STATE, ACTION, IMAGES, TASK = columns.NAMES["state"], columns.NAMES["action"], columns.IMAGES, "task_index"
FRAME, TIME = "frame_index", "timestamp"
UNITS, RECORDED_WITH = "meta/units.json", "meta/recorded_with.json"
DISTURBANCE, PLAN = "disturbance", "episode_plan"  # features of ``collect``: executed minus recorded action, and plan


def read(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    cameras: Sequence[str] = (),
    image_size: int | None = None,
) -> Demonstrations:
    """Read state, action, instruction and images of every frame of a LeRobotDataset v3 from any source.

    keys: columns of ``state`` and ``action`` (by default observation.state and action), each a name or the options of
    ``Column``, which also convert the numbers; and ``images``, names by camera. cameras: cameras whose images to
    decode, by default from observation.images.<camera>. image_size: pixels of a side of their ``center_crop``.
    UserError for a missing data set, another version, missing features (it lists them), frames that are not those of
    meta/ (lerobot_meta.py), numbers that are not finite, or images that are neither PNG files nor frames of videos, or
    of several sizes.
    """
    keys = keys or {}
    state, action = columns.columns_of(keys)
    info = read_info(path)
    with reading(path, UNITS):
        found = json.loads((path / UNITS).read_text(encoding="utf-8")) if (path / UNITS).is_file() else {}
        units = {column: tuple(map(str, of_entries)) for column, of_entries in found.items()}
    features = info["features"]
    for camera in keys.get("images", {}):
        if camera not in cameras:
            raise unknown_name("camera in data_keys.images", camera, [*cameras])
    images = {camera: columns.of_camera(camera, keys) for camera in cameras}
    missing = [name for name in (state.name, action.name, *images.values()) if name not in features]
    if missing:
        hints = {name: nearest(name, features) for name in missing}
        listed = ", ".join(f"{name} (did you mean {hint}?)" if hint else name for name, hint in hints.items())
        raise UserError(f"data set {path}: it lacks {listed}. It has: {', '.join(sorted(features))}")
    stored = []
    for key in images.values():
        kind = features[key].get("dtype")
        if kind not in ("image", "video"):
            raise UserError(f"data set {path}: {key} is of type {kind}, allowed: image and video")
        stored += [key] if kind == "image" else []
    further = [name for name in (FRAME, TIME, DISTURBANCE) if name in features]
    table = _frames(path, info, [state.name, action.name, *stored, "episode_index", TASK, *further])
    total = info.get("total_frames")
    if isinstance(total, int) and table.num_rows > total:
        raise UserError(f"data set {path}: data/ has {table.num_rows} frames, meta/info.json says {total}")
    episode = _column(table, "episode_index", np.int64, path)
    if len(episode) == 0 or bool((episode.diff() < 0).any()):
        raise UserError(f"data set {path}: frames must be there, and in the order of their episodes")
    if FRAME in further:
        videos = len(stored) < len(images)
        check_consecutive(_column(table, FRAME, np.int64, path), episode, path, info, from_0=videos)
    check_complete(path, info, episode)
    time = _column(table, TIME, np.float64, path) if TIME in further else None
    state_names, action_names = names_of(features[state.name]), names_of(features[action.name])
    instruction, instructions = _instructions(table, path)
    return Demonstrations(
        state_FS=columns.convert(_matrix(table, state.name, path), state_names, state, "data_keys.state"),
        action_FA=columns.convert(_matrix(table, action.name, path), action_names, action, "data_keys.action"),
        episode_F=episode, instruction_F=instruction, instructions=instructions, control_hz=float(info["fps"]),
        disturbed_F=(_matrix(table, DISTURBANCE, path) != 0).any(1) if DISTURBANCE in further else None,
        state_names=() if state.entries else state_names, action_names=() if action.entries else action_names,
        state_units=() if state.converts else units.get(state.name, ()),
        action_units=() if action.converts else units.get(action.name, ()),
        images={
            camera: _images(table, key, path, image_size)
            if key in stored
            else read_videos(path, info, key, episode, time, image_size)
            for camera, key in images.items()
        },
    )  # fmt: skip


def read_features(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return those of the numeric features that the data set has, as it stores them, [F, D] each."""
    info = read_info(path)
    table = _frames(path, info, [name for name in names if name in info["features"]])
    with reading(path, "its frames"):
        found = {name: np.asarray(table[name].to_pylist()) for name in table.column_names}
        return {name: torch.from_numpy(rows.reshape(len(rows), -1)) for name, rows in found.items()}


def cameras_of(path: Path) -> list[str]:
    """Return the names of the cameras whose images a data set has, without those that only ``data_keys`` reaches."""
    features, start = read_info(path)["features"], f"{IMAGES}."
    of_images = [name for name, feature in features.items() if feature.get("dtype") in ("image", "video")]
    return [name.removeprefix(start) for name in of_images if name.startswith(start)]


def check_sizes(path: Path, spec: EnvSpec, keys: Mapping[str, Any] | None = None) -> None:
    """Raise UserError if the declared sizes of images differ from the task's, before any image is decoded."""
    features = read_info(path)["features"]
    for camera in spec.cameras:
        feature = features.get(columns.of_camera(camera.name, keys or {}), {})
        shape = feature.get("shape")
        sizes = dict(zip(names_of(feature), shape if isinstance(shape, list) else (), strict=False))
        _check_size(path, camera, sizes.get("height", camera.height), sizes.get("width", camera.width))


def _check_size(path: Path, camera: CameraSpec, height: int, width: int) -> None:
    if (height, width) != (camera.height, camera.width):
        pixels = f"{height}x{width} pixels, needed is {camera.height}x{camera.width}"
        other = f", or give policy.image_size={height} if the policy takes such pictures"
        cure = "resize them" + (other if height == width else ", to a square")
        raise UserError(f"data set {path}: pictures of camera {camera.name} have {pixels}: {cure}")


def check_fits(data: Demonstrations, spec: EnvSpec, path: Path, keys: Mapping[str, Any] | None = None) -> list[str]:
    """Return lines of what may differ from the task: units, robot, instructions. keys: the ``keys`` given to ``read``.

    UserError unless sizes, names, images and control rate are those of the task, and actions are in its space.
    """
    rate, where = 1 / spec.control_dt_s, f"data set {path}"
    pairs = (("state", data.state_FS, data.state_names, spec.state_names),
             ("action", data.action_FA, data.action_names, spec.action_names))  # fmt: skip
    for what, values, names, expected in pairs:
        found, needed = values.shape[1], len(expected)
        hint = f"data_keys.{what}.entries=[...] names those of its entries that are the task's, in the task's order"
        if found < needed:
            hint = f"It needs all of the task's; an environment of your own can have this {what} (docs/simulators.md)"
            if names and all(name.endswith(".pos") for name in names):
                hint = "These are joint positions: python -m embodied.convert makes a data set of the task of them"
            elif what == "state" and not spec.cameras and set(names) < set(expected) and cameras_of(path):
                seen = ",".join(cameras_of(path))
                hint = (
                    f"It is that of a policy with cameras: give policy=gaussian policy.cameras=[{seen}], or another one"
                )
        if found != needed:
            extra, missing = (", ".join(x for x in a if x not in b) for a, b in ((names, expected), (expected, names)))
            beyond = f". In the data set alone: {extra or 'none'}; in the task alone: {missing or 'none'}"
            differs = f"its {what} has {found} entries, task {spec.task} has {needed}. {hint}"
            raise UserError(f"{where}: {differs}{beyond if names else ''}")
        for i, (name, other) in enumerate(zip(names, expected, strict=False)):
            if name != other:
                differs = f"entry {i} of its {what} is '{name}', that of task {spec.task} '{other}'"
                raise UserError(f"{where}: {differs}. {hint}")
    for camera in spec.cameras:
        if camera.name in data.images:
            _check_size(path, camera, *data.images[camera.name].shape[1:3])
    doubts, told = list[str](), [data.instructions[i] for i in data.instruction_F.unique().tolist()]
    if not spec.cameras and len(told) > 1 and not set(told) <= set(spec.texts):
        unread = f"{where}: its episodes have {len(told)} instructions, which a policy on the state does not read"
        doubts.append(f"{unread}: {', '.join(told[:5])}")
    if spec.cameras and data.uninstructed and len(spec.texts) == 1:
        doubts.append(f"{where}: its episodes have no instruction, so they get the task's: {spec.texts[0]}")
    robot = read_info(path).get("robot_type") if (path / RECORDED_WITH).is_file() else None
    if robot and spec.robot and robot != spec.robot:
        doubts.append(f"{where}: it was recorded with robot {robot}, but that of task {spec.task} is {spec.robot}")
    if not math.isclose(data.control_hz, rate, rel_tol=1e-3):
        differs = f"{where}: recorded at {data.control_hz:g} Hz, but task {spec.task}"
        if "control_dt_s" not in spec.assumed:
            raise columns.Unfit(f"{differs} runs at {rate:g}")
        doubts.append(f"{differs} states no rate ({rate:g} is assumed): one action must be one step of it")
    state, action = columns.columns_of(keys or {})
    return [
        *columns.check_units(data.state_units, columns.state_units(spec), spec.state_names, "state", path),
        *columns.check_units(data.action_units, columns.action_units(spec), spec.action_names, "action", path),
        *columns.check_state(data.state_FS, spec, state, path),
        *columns.check_actions(data.action_FA, spec, action, path, bool(data.action_units)),
        *doubts,
    ]


def _frames(path: Path, info: Mapping[str, Any], wanted: Sequence[str]) -> pa.Table:
    """Return columns of all frames."""
    files = data_files(path, info)
    with reading(path, "its frames"):
        return pa.concat_tables([pq.read_table(file, columns=wanted) for file in files]).select(wanted)


def _column(table: pa.Table, key: str, dtype: type, path: Path) -> Tensor:
    """Return a column of one number per frame, [F]."""
    with reading(path, key):
        return torch.from_numpy(table[key].to_numpy().astype(dtype))


def names_of(feature: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a feature's entries; () if it does not name each."""
    names, shape = feature.get("names"), feature.get("shape")
    if isinstance(names, Mapping):
        groups = list(names.values())
        if all(isinstance(place, int) for place in groups):  # {"delta_x": 0, ...}
            names = sorted(names, key=names.__getitem__)
        else:  # {"motors": [...]}
            names = [name for group in groups if isinstance(group, list) for name in group]
    names = names if isinstance(names, list) else []
    if isinstance(shape, list) and len(shape) == 1 and len(names) != shape[0]:  # one name for the whole vector
        return ()
    return tuple(map(str, names))


def _matrix(table: pa.Table, key: str, path: Path) -> Tensor:
    """Return a column of numbers or lists of numbers as float32 [F, D]. UserError unless rectangular and finite."""
    try:
        rows = np.asarray(table[key].to_pylist(), dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"data set {path}: {key} is not a list of numbers of one length in every frame") from error
    values = torch.from_numpy(rows.reshape(len(rows), -1))
    broken = (~values.isfinite().all(1)).nonzero().squeeze(1)
    if len(broken):
        episodes = table["episode_index"].to_pylist()
        episode = episodes[first := int(broken[0])]
        where = f"the first is frame {first - episodes.index(episode)} of episode {episode}"
        command = leave_out(path, sorted({episodes[row] for row in broken.tolist()}))
        cure = f"Mend it, or leave out its episode: {command}"
        raise columns.Unfit(f"data set {path}: {key} is not finite in {len(broken)} frames, {where}", cure)
    return values


def _instructions(table: pa.Table, path: Path) -> tuple[Tensor, tuple[str, ...]]:
    """Return each frame's index of its instruction, int64 [F], and all instructions, which are pandas' index."""
    with reading(path, "its instructions, meta/tasks.parquet"):
        rows = pq.read_table(path / "meta" / "tasks.parquet")
        index = [*(rows.schema.pandas_metadata or {}).get("index_columns", ()), "task"]
        others = [name for name in rows.column_names if name != TASK]
        (name,) = [name for name in index if name in others][:1] or others
        indices, texts = rows[TASK].to_pylist(), tuple(map(str, rows[name].to_pylist()))
    place = {index: i for i, index in enumerate(indices)}
    try:
        return torch.tensor([place[index] for index in table[TASK].to_pylist()]), texts
    except KeyError as error:
        raise UserError(f"data set {path}: {TASK} {error} of its frames is not in meta/tasks.parquet") from error


def _images(table: pa.Table, key: str, path: Path, size: int | None) -> Tensor:
    """Decode a column of PNG files, uint8 [F, h, w, 3], their ``center_crop`` of ``size``."""
    images = []
    for frame, row in enumerate(table[key].to_pylist()):
        try:
            if not row or not row.get("bytes"):
                raise ValueError("the picture is not in the parquet file")
            images.append(center_crop(decode_png(row["bytes"]), size))
        except ValueError as error:
            raise UserError(f"data set {path}: {key} of frame {frame}: {error}") from error
        if images[-1].shape != images[0].shape:
            raise UserError(f"data set {path}: {key} has pictures of several sizes, the first is in frame {frame}")
    return torch.from_numpy(np.stack(images))
