"""The curve on disk: what a reader gets, also after a crash and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embodied.report.metrics import METRICS_FILE, MetricsWriter, read_metrics, write_atomically, write_json


def write_rows(run: Path, iterations: range, loss: float, last_iteration: int | None = None) -> None:
    writer = MetricsWriter(run, last_iteration)
    for iteration in iterations:
        writer.write({"iteration": iteration, "env_steps": 10 * iteration, "train/loss": loss})
    writer.close()


def test_rows_and_events_hold_the_same_numbers(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4), loss=0.5)
    assert read_metrics(tmp_path / METRICS_FILE)[2] == {"iteration": 3, "env_steps": 30, "train/loss": 0.5}
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 0.5), (20, 0.5), (30, 0.5)]
    assert events.Tags()["scalars"] == ["train/loss"]


def test_an_evaluation_is_at_the_steps_of_its_weights(tmp_path: Path) -> None:
    """It runs beside training, so it arrives some iterations later."""
    writer = MetricsWriter(tmp_path)
    writer.write(
        {"iteration": 4, "env_steps": 40, "train/loss": 0.5, "eval/env_steps": 20, "eval/success_at_end": 0.25}
    )
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/success_at_end")] == [(20, 0.25)]
    assert events.Scalars("train/loss")[0].step == 40
    assert set(events.Tags()["scalars"]) == {"eval/success_at_end", "train/loss"}


def test_histograms_are_in_tensorboard(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"iteration": 1, "env_steps": 10}, {"async/staleness": {0: 3, 2: 1}, "queue/requests": {}})
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["histograms"] == ["async/staleness"]
    [event] = events.Histograms("async/staleness")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (10, 0, 2, 4, 2, 4)
    assert list(zip(value.bucket_limit, value.bucket, strict=True)) == [(-0.5, 0), (0.5, 3), (1.5, 0), (2.5, 1)]


def test_resume_removes_the_work_that_will_be_redone(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 6), loss=1.0)
    (tmp_path / "eval").mkdir()
    for name in ("train_20", "train_30", "train_50", "final_30"):
        (tmp_path / "eval" / f"{name}.json").touch()
    write_rows(tmp_path, range(4, 8), loss=2.0, last_iteration=3)
    assert {path.stem for path in (tmp_path / "eval").iterdir()} == {"train_20", "train_30", "final_30"}
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["train/loss"] for row in rows] == [1.0] * 3 + [2.0] * 4
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [e.step for e in scalars] == [10, 20, 30, 40, 50, 60, 70]


@pytest.mark.parametrize("kept", [0, 3], ids=["to the beginning", "to a checkpoint"])
def test_a_rewind_leaves_no_doubled_steps_in_the_events(tmp_path: Path, kept: int) -> None:
    """A learner that was lost: the same writer repeats iterations, which consume other numbers of steps than before."""
    writer = MetricsWriter(tmp_path)
    for iteration in range(1, 6):
        writer.write({"iteration": iteration, "env_steps": 10 * iteration, "train/loss": 1.0}, {"age": {0: 1}})
    for loss in (2.0, 3.0):
        writer.rewind(kept)
        for iteration in range(kept + 1, 8):
            steps = 10 * iteration - int(loss)
            writer.write({"iteration": iteration, "env_steps": steps, "train/loss": loss}, {"age": {0: int(loss)}})
    writer.close()
    expected = [(10 * i, 1.0) if i <= kept else (10 * i - 3, 3.0) for i in range(1, 8)]
    assert [(row["env_steps"], row["train/loss"]) for row in read_metrics(tmp_path / METRICS_FILE)] == expected
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == expected
    assert [(event.step, event.histogram_value.num) for event in events.Histograms("age")] == expected


def test_a_line_cut_short_by_a_crash_is_dropped_on_resume(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 3), loss=1.0)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 3, "env_')
    write_rows(tmp_path, range(3, 4), loss=2.0, last_iteration=2)
    assert [row["iteration"] for row in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"iteration": 1, "env_steps": 1, "a/nan": float("nan"), "a/inf": float("inf"), "a/b": 1.0})
    writer.close()
    line = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {
        "iteration": 1, "env_steps": 1, "a/nan": None, "a/inf": None, "a/b": 1.0,
    }  # fmt: skip


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "last.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_atomically(path, 3)  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["last.json"]
