"""Run LeRobot's own tools, in an environment of its own: ``python run.py <data set> <folder for the results>``

Every data set that LeRobot loads is saved as it gives it, in ``<name>.npz``, beside its statistics in ``<name>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset
from lerobot.datasets.dataset_tools import delete_episodes, merge_datasets, split_dataset
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.datasets.utils import serialize_dict

KEY = "observation.images.front"
RECORDED = (5, 8, 6)  # frames of the episodes that LeRobot records, with videos
SIZE = 64  # pixels of these


def save(out: Path, name: str, dataset: LeRobotDataset) -> None:
    """Save every frame and the statistics."""
    items = [dataset[i] for i in range(len(dataset))]
    np.savez(
        out / f"{name}.npz",
        state=np.stack([item["observation.state"].numpy() for item in items]),
        action=np.stack([item["action"].reshape(-1).numpy() for item in items]),
        images=np.stack([(item[KEY] * 255).round().byte().permute(1, 2, 0).numpy() for item in items]),
        episode=np.array([int(item["episode_index"]) for item in items]),
        task=np.array([item["task"] for item in items]),
    )
    (out / f"{name}.json").write_text(json.dumps(serialize_dict(dataset.meta.stats)))


def record(root: Path) -> LeRobotDataset:
    """Record episodes with videos; frame i of all has brightness 10 + 12 i and state i."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        KEY: {"dtype": "video", "shape": (SIZE, SIZE, 3), "names": ["height", "width", "channels"]},
    }
    dataset = LeRobotDataset.create("test/recorded", fps=20, features=features, root=root, use_videos=True)
    for episode, length in enumerate(RECORDED):
        for frame in range(length):
            index = sum(RECORDED[:episode]) + frame
            picture = np.full((SIZE, SIZE, 3), 10 + 12 * index, np.uint8)
            state, action = np.full(3, index, np.float32), np.full(2, episode, np.float32)
            dataset.add_frame({"observation.state": state, "action": action, KEY: picture, "task": "do it"})
        dataset.save_episode()
    dataset.finalize()
    return LeRobotDataset("test/recorded", root=root)


def main(ours: Path, out: Path) -> None:
    dataset = LeRobotDataset("test/ours", root=ours)
    save(out, "ours", dataset)
    save(out, "deleted", delete_episodes(dataset, [1], output_dir=out / "deleted", repo_id="test/deleted"))
    parts = split_dataset(dataset, {"train": [0, 2], "val": [1]}, output_dir=out)
    for name, part in parts.items():
        save(out, name, part)
    merged = merge_datasets(list(parts.values()), "test/merged", output_dir=out / "merged")
    save(out, "merged", merged)
    untold = Dataset.from_parquet(str(ours / "data/chunk-000/file-000.parquet"), cache_dir=str(out / "cache"))
    np.savez(out / "untold.npz", images=np.stack([np.asarray(picture) for picture in untold[KEY]]))
    recorded = record(out / "recorded")
    delete_episodes(recorded, [1], output_dir=out / "recorded_deleted", repo_id="test/recorded_deleted")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # threads that the libraries leave running can abort the interpreter's ordinary end
