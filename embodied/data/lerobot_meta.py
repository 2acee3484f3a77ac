"""Description of a LeRobotDataset in its ``meta/``, and a check that the frames in ``data/`` are those it describes.

Videos are found by episode, so a set whose rows were deleted or renumbered in ``data/`` alone would pair states with
pictures of other moments. Commands of LeRobot in messages were tried with lerobot 0.4.4.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from torch import Tensor

from embodied.core.errors import UserError
from embodied.data.images import reading

VERSION, CONVERTER = "v3.0", "lerobot.datasets.v30.convert_dataset_v21_to_v30"
DATA_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
PLACES = ["data/chunk_index", "data/file_index"]  # where the frames of an episode are, in meta/episodes
LENGTHS = ["episode_index", "length"]


def read_info(path: Path) -> dict[str, Any]:
    """Return ``meta/info.json``. UserError if it cannot be read, or has another version."""
    try:
        info: dict[str, Any] = json.loads((path / "meta" / "info.json").read_text(encoding="utf-8"))
        version, fps, features = info["codebase_version"], float(info["fps"]), info["features"]
        if not (0 < fps < math.inf and all(isinstance(feature, dict) for feature in features.values())):
            raise ValueError(f"fps {fps:g}, or features that are none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"data={path} is not a LeRobotDataset: no readable meta/info.json ({error})") from error
    if not str(version).startswith("v3."):
        cure = "LeRobot's convert_dataset_v21_to_v30 converts older ones"
        if version == "v2.1":
            folder, name = (shlex.quote(str(part)) for part in _place(path))
            words = f"--repo-id={name} --root={folder} --push-to-hub=false"
            cure = f"to convert it in its place, where LeRobot 0.4 is installed: python -m {CONVERTER} {words}"
        raise UserError(f"data set {path} has format {version}, needed is {VERSION}: {cure}")
    return info


def leave_out(path: Path, episodes: Sequence[int] = ()) -> str:
    """Return the command of LeRobot that copies a data set without some episodes, to ``<name>-kept`` beside it."""
    folder, name = (str(part) for part in _place(path))
    indices = f"[{','.join(map(str, episodes)) or '...'}]"
    words = (f"--repo_id={name}", f"--new_repo_id={name}-kept", "--operation.type=delete_episodes")
    command = ["lerobot-edit-dataset", *words, f"--operation.episode_indices={indices}"]
    return f"HF_LEROBOT_HOME={shlex.quote(folder)} {shlex.join(command)}"


def data_files(path: Path, info: Mapping[str, Any]) -> list[Path]:
    """Return the data files in order. UserError if there is none, or one lacks that meta/episodes names."""
    files = sorted((path / "data").glob("*/*.parquet"))
    if not files:
        raise UserError(f"data set {path}: it has no data files, data/*/*.parquet")
    with reading(path, "meta/episodes"):
        pattern = str(info.get("data_path") or f"data/{DATA_FILE}")
        places = sorted({tuple(map(int, row.values())) for row in _episodes(path, PLACES)})
        named = [pattern.format(chunk_index=chunk, file_index=file) for chunk, file in places]
    if missing := [name for name in named if path / name not in files]:
        raise UserError(f"data set {path}: {', '.join(missing[:5])} missing, which meta/episodes names")
    return files


def check_complete(path: Path, info: Mapping[str, Any], episode_F: Tensor) -> None:
    """Raise UserError unless the frames are those that meta/ describes: their number in all and in each episode.

    A data set without meta/episodes/ has its number in all alone.
    """
    episodes, counts = episode_F.unique_consecutive(return_counts=True)
    found = dict(zip(episodes.tolist(), counts.tolist(), strict=True))
    with reading(path, "meta/episodes"):
        told = {int(row["episode_index"]): int(row["length"]) for row in _episodes(path, LENGTHS)}
    total, differs, others = info.get("total_frames"), "", sorted(found.keys() ^ told.keys())
    changed = [episode for episode, count in found.items() if told.get(episode) != count]
    if told and others:
        where = "data/" if others[0] in told else "meta/episodes"
        differs = f"data/ has {len(found)} episodes, meta/episodes {len(told)}; {where} lacks episode {others[0]}"
    elif told and changed:
        one = changed[0]
        differs = f"data/ has {found[one]} frames of episode {one}, meta/episodes says {told[one]}"
    elif isinstance(total, int) and len(episode_F) != total:
        differs = f"data/ has {len(episode_F)} frames, meta/info.json says {total}"
    if differs:
        cure = "Go back to the data set as it was recorded. This leaves out episodes, also in meta/ and in videos"
        raise UserError(f"data set {path}: {differs}. {cure}: {leave_out(path, [] if others else changed)}")


def check_consecutive(frame_F: Tensor, episode_F: Tensor, path: Path, info: Mapping[str, Any], from_0: bool) -> None:
    """Raise UserError unless the frames of an episode are numbered one by one; from_0: and begin at 0."""
    gaps = ((episode_F.diff() == 0) & (frame_F.diff() != 1)).nonzero().squeeze(1)
    if len(gaps):
        row = first = int(gaps[0]) + 1
        for file in data_files(path, info):
            if first < (count := pq.read_metadata(file).num_rows):
                break
            first -= count
        gap = f"frame {int(frame_F[row])} follows frame {int(frame_F[row - 1])} in episode {int(episode_F[row])}"
        raise UserError(f"data set {path}: {gap} of {file.relative_to(path)} (frame_index must rise by 1)")
    first_F = episode_F.diff(prepend=episode_F[:1] - 1) != 0
    late = (first_F & (frame_F != 0)).nonzero().squeeze(1)
    if from_0 and len(late):
        one, frame = int(episode_F[late[0]]), int(frame_F[late[0]])
        raise UserError(f"data set {path}: episode {one} begins with frame {frame}, needed for its video: 0")


def _episodes(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of those files of meta/episodes that have the columns."""
    files = sorted((path / "meta" / "episodes").glob("*/*.parquet"))
    told = [file for file in files if {*columns} <= {*pq.read_schema(file).names}]
    return [row for file in told for row in pq.read_table(file, columns=list(columns)).to_pylist()]


def _place(path: Path) -> tuple[Path, str]:
    """Return the folder that a data set is in, and its name there."""
    whole = path.resolve()
    return whole.parent, whole.name
