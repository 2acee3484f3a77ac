"""Statistics of data sets against numpy, and the metadata with which other packages read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from embodied.core.spec import EnvSpec
from embodied.data import Episode, lerobot, write
from embodied.data.lerobot_writer import QUANTILES

LENGTHS = (4, 7, 1)
FRONT = "observation.images.front"


@pytest.fixture
def episodes() -> list[Episode]:
    generator = torch.Generator().manual_seed(0)
    return [
        Episode(
            torch.randn(length, 3, generator=generator),
            torch.rand(length, 2, generator=generator),
            torch.zeros(length),
            torch.zeros(length, dtype=torch.bool),
            "do it",
            {"front": torch.randint(0, 200, (length, 5, 6, 3), generator=generator, dtype=torch.uint8)},
        )
        for length in LENGTHS
    ]


@pytest.fixture
def path(tmp_path: Path, episodes: list[Episode]) -> Path:
    write(tmp_path / "set", episodes, EnvSpec.of_sizes("test", state=3, privileged=1, action=2))
    return tmp_path / "set"


def expected(values: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of rows [n, D]."""
    found = {name: getattr(values, name)(0) for name in ("min", "max", "mean", "std")}
    return found | {key: np.quantile(values, share, axis=0) for key, share in QUANTILES.items()}


def pixels(images: torch.Tensor) -> np.ndarray:
    return images.reshape(-1, 3).double().numpy() / 255


def test_statistics_of_all_frames(path: Path, episodes: list[Episode]) -> None:
    stats = json.loads((path / "meta" / "stats.json").read_text())
    assert set(stats) == set(json.loads((path / "meta" / "info.json").read_text())["features"])
    for key, name in ((lerobot.STATE, "state_LS"), (lerobot.ACTION, "action_LA")):
        rows = torch.cat([getattr(episode, name) for episode in episodes]).double().numpy()
        for statistic, value in expected(rows).items():
            np.testing.assert_allclose(stats[key][statistic], value, rtol=1e-12, err_msg=f"{key} {statistic}")
        assert stats[key]["count"] == [sum(LENGTHS)]
    for statistic, value in expected(pixels(torch.cat([e.images["front"] for e in episodes]))).items():
        np.testing.assert_allclose(stats[FRONT][statistic], value[:, None, None], rtol=1e-12, err_msg=statistic)
    assert stats[FRONT]["count"] == [sum(LENGTHS)]
    assert stats["episode_index"]["q50"] == [1.0]


def test_statistics_of_each_episode(path: Path, episodes: list[Episode]) -> None:
    rows = pq.read_table(path / "meta" / "episodes" / lerobot.FILE).to_pylist()
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    names = {"min", "max", "mean", "std", "count", *QUANTILES}
    assert {name for name in rows[0] if name.startswith("stats/")} == {
        f"stats/{f}/{n}" for f in features for n in names
    }
    for row, episode in zip(rows, episodes, strict=True):
        for statistic, value in expected(episode.state_LS.double().numpy()).items():
            np.testing.assert_allclose(row[f"stats/observation.state/{statistic}"], value, rtol=1e-12)
        for statistic, value in expected(pixels(episode.images["front"])).items():
            np.testing.assert_allclose(row[f"stats/{FRONT}/{statistic}"], value[:, None, None], rtol=1e-12)
        assert row[f"stats/{FRONT}/count"] == row["stats/action/count"] == [len(episode)]


def test_features_are_described_for_datasets(path: Path) -> None:
    metadata = pq.read_schema(path / "data" / lerobot.FILE).metadata[b"huggingface"]
    features = json.loads(metadata)["info"]["features"]
    assert list(features) == pq.read_schema(path / "data" / lerobot.FILE).names
    assert features[FRONT] == {"_type": "Image"}
    assert features["observation.state"] == {
        "feature": {"dtype": "float32", "_type": "Value"}, "length": 3, "_type": "List",
    }  # fmt: skip
    assert features["next.success"] == {"dtype": "bool", "_type": "Value"}
