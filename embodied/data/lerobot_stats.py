"""Statistics of a LeRobotDataset's features: of all frames for ``meta/stats.json``, and of each episode.

LeRobot's tools compute the statistics of a changed data set from the statistics of its episodes. LeRobot estimates
quantiles from histograms and image statistics from samples; here both are exact. Policies such as
π0.5 normalise by quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
Stats = dict[str, NDArray[Any]]


def number_stats(values: NDArray[Any]) -> Stats:
    """Return statistics over the frames of numbers [F] or [F, D]: float64 [D] each (D = 1 for [F]), ``count`` [1]."""
    rows = values.reshape(len(values), -1).astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    quantiles = dict(zip(QUANTILES, np.quantile(rows, list(QUANTILES.values()), axis=0), strict=True))
    return {**found, "count": np.array([len(rows)]), **quantiles}


def image_stats(images_FHWC: NDArray[np.uint8]) -> Stats:
    """Return statistics of each colour in [0, 1] over frames and pixels, in LeRobot's shape [3, 1, 1]; ``count`` [1].

    ``count`` is the number of frames. All statistics are computed from counts of the 256 levels.
    """
    levels = np.arange(256) / 255.0
    columns: dict[str, list[float]] = {key: [] for key in ("min", "max", "mean", "std", *QUANTILES)}
    for channel in range(images_FHWC.shape[-1]):
        occurs = np.bincount(images_FHWC[..., channel].ravel(), minlength=256)
        upto, present = occurs.cumsum(), levels[occurs > 0]
        mean = float(occurs @ levels / upto[-1])
        columns["min"].append(present[0])
        columns["max"].append(present[-1])
        columns["mean"].append(mean)
        columns["std"].append(float(np.sqrt(occurs @ (levels - mean) ** 2 / upto[-1])))
        for key, share in QUANTILES.items():  # interpolate between two sorted pixels, as np.quantile
            place = share * (upto[-1] - 1)
            around = np.floor(place), np.ceil(place)
            low, high = (levels[np.searchsorted(upto, index, side="right")] for index in around)
            columns[key].append(low + (high - low) * (place - int(place)))
    stats = {key: np.array(column)[:, None, None] for key, column in columns.items()}
    return {**stats, "count": np.array([len(images_FHWC)])}


def as_json(stats: Mapping[str, Stats]) -> dict[str, dict[str, Any]]:
    """Return the statistics by feature as ``meta/stats.json`` holds them."""
    return {feature: {key: value.tolist() for key, value in found.items()} for feature, found in stats.items()}


def episode_columns(per_episode: Sequence[Mapping[str, Stats]]) -> dict[str, pa.Array]:
    """Return columns ``stats/<feature>/<statistic>`` for ``meta/episodes``, with a row for each episode."""
    return {
        f"stats/{feature}/{key}": pa.array([stats[feature][key].tolist() for stats in per_episode])
        for feature, found in per_episode[0].items()
        for key in found
    }
