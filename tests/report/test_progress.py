"""What the progress line says, and how often."""

from __future__ import annotations

import io

import pytest

from embodied.report import progress
from embodied.report.progress import Line, Progress, duration, time_left

STATUS = {
    "iteration": 3, "env_steps": 250_000, "wall_s": 100.0, "perf/env_steps_per_s": 2500.0,
    "rollout/success_at_end": 0.25, "eval/success_at_end": 0.5,
}  # fmt: skip


def test_a_plain_line_has_rate_success_and_time_left() -> None:
    stream = io.StringIO()
    line = Progress(total_steps=1_000_000, max_minutes=None, stream=stream)
    line.update(STATUS)
    assert stream.getvalue() == (
        " 25%  250.0k of 1.0M steps  2.5k steps/s  success 25%  evaluated 50%  1m40s gone  5m00s left\n"
    )


def test_what_learns_from_data_counts_updates_and_slow_ones_too() -> None:
    stream = io.StringIO()
    row = {"iteration": 100, "wall_s": 240.0, "perf/updates_per_s": 0.42, "train/validation_loss": 0.25}
    Progress(1_000, 10.0, stream=stream).update(row)
    assert stream.getvalue() == (
        " 40%  100 of 1.0k updates  0.4 updates/s  validation loss 0.2500  4m00s gone  6m00s left\n"
    )


def test_plain_lines_are_rare_but_messages_are_not_lost() -> None:
    stream = io.StringIO()
    line = Progress(1_000_000, None, stream=stream)
    for _ in range(100):
        line.update(STATUS)
    line.message("saved [step_3]")
    line.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1] == "saved [step_3]"


def test_time_left_is_until_the_first_limit() -> None:
    assert time_left(250_000, 1_000_000, 2500.0, 100.0, None) == 300.0
    assert time_left(250_000, 1_000_000, 2500.0, 100.0, 120.0) == 20.0
    assert time_left(0, 10, 0.0, 0.0, None) is None


def test_durations() -> None:
    assert [duration(s) for s in (None, 5.2, 75, 3700)] == ["?", "5s", "1m15s", "1h01m"]


def test_returns_are_shown_where_there_is_no_success() -> None:
    for evaluation, text in (({}, "-"), ({"eval/return_mean": 480.0}, "480.0")):
        stream = io.StringIO()
        line = Progress(1_000_000, None, has_success=False, stream=stream)
        line.update({"iteration": 1, "wall_s": 2.0, "rollout/return_mean": 123.456, **evaluation})
        line.close()
        assert f"return 123.5  evaluated {text}" in stream.getvalue()


def test_before_the_first_episode_has_ended_the_kind_of_result_is_known() -> None:
    for has_success, text in ((False, "return -  evaluated -"), (True, "success -  evaluated -")):
        stream = io.StringIO()
        Progress(1_000_000, None, has_success, stream).update({"iteration": 1, "wall_s": 2.0})
        assert text in stream.getvalue()


def test_an_evaluation_shows_its_share_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    times = iter([10.0, 10.0, 40.0])
    monkeypatch.setattr(progress, "running_s", lambda: next(times))
    stream = io.StringIO()
    watch = Line(stream).evaluating("200 episodes")
    watch(0.0)
    watch(0.25)
    assert stream.getvalue().splitlines() == [
        "  0%  of 200 episodes evaluated  0s gone  ? left",
        " 25%  of 200 episodes evaluated  30s gone  1m30s left",
    ]


def test_a_short_evaluation_prints_nothing() -> None:
    stream = io.StringIO()
    Line(stream).evaluating("4 episodes")(1.0)
    assert stream.getvalue() == ""
