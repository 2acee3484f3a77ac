"""Training curves: the same numbers in ``metrics.jsonl`` (one object per iteration) and in TensorBoard events."""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from embodied.core.spec import TRAIN

METRICS_FILE = "metrics.jsonl"
EVALUATED_STEPS = "eval/env_steps"  # of the weights that the other numbers under eval/ are of
MAX_ROW_BYTES = 8192


class MetricsWriter:
    """Append rows to the curves of a run directory.

    last_iteration: on resume, the iteration of the checkpoint. Later rows, and later evaluations of the training, are
    removed, because that work was lost and will be repeated. ``newest`` has the newest number of every key, over all
    rows.
    """

    def __init__(self, run_dir: Path, last_iteration: int | None = None) -> None:
        self._path = run_dir / METRICS_FILE
        self._open(last_iteration)

    def rewind(self, last_iteration: int) -> None:
        """Remove the rows and evaluations after an iteration, which will be repeated."""
        self.close()
        self._open(last_iteration)

    def _open(self, last_iteration: int | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and readers do not need it

        self.newest: dict[str, float] = {}
        purge_step = None
        if last_iteration is not None:
            kept = [row for row in read_metrics(self._path) if row["iteration"] <= last_iteration]
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
            self.newest = {key: value for row in kept for key, value in row.items() if value is not None}
            purge_step = steps_of(self.newest) + 1 if kept else 0
            for path in (self._path.parent / "eval").glob("train_*.json"):
                steps = path.stem.partition("_")[2]
                if steps.isdecimal() and int(steps) >= purge_step and (kept or not last_iteration):
                    path.unlink()  # but not where rows are missing
            # TensorBoard reads its files in the order of their names, which begin with the second of their creation
            seconds = {int(path.name.split(".")[3]) for path in self._path.parent.glob("events.out.tfevents.*")}
            while int(time.time()) in seconds:
                time.sleep(0.01)
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(self._path.parent), purge_step=purge_step, flush_secs=30)

    def write(
        self, row: Mapping[str, float | int], histograms: Mapping[str, Mapping[int, int]] = MappingProxyType({})
    ) -> None:
        """Append one iteration; numbers that are not finite become null. histograms: counts of whole numbers."""
        finite = {key: value for key, value in row.items() if math.isfinite(value)}
        self._file.write(json.dumps({key: finite.get(key) for key in row}) + "\n")
        self._file.flush()
        self.newest |= finite
        steps, evaluated = steps_of(row), row.get(EVALUATED_STEPS, steps_of(row))
        for key, value in finite.items():
            if "/" in key and key != EVALUATED_STEPS:
                self._tensorboard.add_scalar(key, value, evaluated if key.startswith("eval/") else steps)
        for name, counts in histograms.items():
            if counts:
                values = range(min(counts), max(counts) + 1)  # each has a bin from n - 1/2 to n + 1/2
                self._tensorboard.add_histogram_raw(
                    name, min=values[0], max=values[-1], num=sum(counts.values()), global_step=steps,
                    sum=sum(value * count for value, count in counts.items()),
                    sum_squares=sum(value * value * count for value, count in counts.items()),
                    bucket_limits=[values[0] - 0.5, *(value + 0.5 for value in values)],
                    bucket_counts=[0, *(counts.get(value, 0) for value in values)],
                )  # fmt: skip

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def steps_of(row: Mapping[str, Any]) -> int:
    """Return the control steps of a row, or without a simulator its updates."""
    return int(row.get("env_steps", row.get("iteration", 0)))


def evaluated_success(row: Mapping[str, Any]) -> float | None:
    """Return the success of the evaluation in a row, on instructions that are trained on; None if it has none."""
    success: float | None = row.get(f"eval/{TRAIN}/success_at_end", row.get("eval/success_at_end"))
    return success


def read_metrics(path: Path, last: int = 0) -> list[dict[str, Any]]:
    """Read the whole rows of a ``metrics.jsonl``. last: only so many at the end, without reading the whole file."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - last * MAX_ROW_BYTES) if last else 0)
        for line in file:
            with suppress(ValueError):  # the first line may be cut, and the last one is not whole while it is written
                rows.append(json.loads(line))
    return rows[-last:]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result as indented JSON, atomically; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old or the new content, even if the writer is killed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
