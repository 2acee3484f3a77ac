"""What the progress line says, and how often."""

from __future__ import annotations

import io

from embodied.report.progress import Progress, Status, duration

STATUS = Status(iteration=3, env_steps=250_000, wall_s=100.0, env_steps_per_s=2500.0, success=0.25, eval_success=0.5)


def test_a_plain_line_has_rate_success_and_time_left() -> None:
    stream = io.StringIO()
    progress = Progress(total_steps=1_000_000, max_minutes=None, stream=stream)
    progress.update(STATUS)
    assert stream.getvalue() == (
        " 25%  250.0k of 1.0M steps  2.5k steps/s  success 25%  evaluated 50%  1m40s gone  5m00s left\n"
    )


def test_what_learns_from_data_counts_updates_and_slow_ones_too() -> None:
    stream = io.StringIO()
    Progress(1_000, 10.0, stream).update(Status(100, 100, 240.0, 0.42, loss=0.25))
    assert stream.getvalue() == (
        " 40%  100 of 1.0k updates  0.4 updates/s  validation loss 0.2500  4m00s gone  6m00s left\n"
    )


def test_plain_lines_are_rare_but_messages_are_not_lost() -> None:
    stream = io.StringIO()
    progress = Progress(1_000_000, None, stream)
    for _ in range(100):
        progress.update(STATUS)
    progress.message("saved [step_3]")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1] == "saved [step_3]"


def test_time_left_is_until_the_first_limit() -> None:
    assert Progress(1_000_000, None, io.StringIO()).seconds_left(STATUS) == 300.0
    assert Progress(1_000_000, 2.0, io.StringIO()).seconds_left(STATUS) == 20.0
    idle = Status(0, 0, 0.0, 0.0)
    assert Progress(10, None, io.StringIO()).seconds_left(idle) is None


def test_durations() -> None:
    assert [duration(s) for s in (None, 5.2, 75, 3700)] == ["?", "5s", "1m15s", "1h01m"]


def test_returns_are_shown_where_there_is_no_success() -> None:
    for evaluated, text in ((None, "-"), (480.0, "480.0")):
        stream = io.StringIO()
        progress = Progress(1_000_000, None, stream)
        progress.update(Status(1, 1000, 2.0, 500.0, return_mean=123.456, eval_return=evaluated))
        progress.close()
        assert f"return 123.5  evaluated {text}" in stream.getvalue()
