"""The life of supervised parts, without processes and clocks. Random schedules: tests/runtime/protocol."""

from __future__ import annotations

from collections.abc import Mapping

from embodied.runtime.ray.supervision import Ask, End, Kill, Patience, Start, Supervision, Unresponsive

PATIENCE = Patience(
    start_s=10.0, ask_s=1.0, answer_s=5.0, operation_s=5.0, max_failures=2, window_s=100.0, max_in_window=4,
    backoff_s=0.5, max_backoff_s=1.5,
)  # fmt: skip


def up(*parts: str, operation_s: Mapping[str, float] | None = None) -> Supervision:
    """All parts are up at time 0."""
    supervision = Supervision(dict.fromkeys(parts, 0), PATIENCE, operation_s=operation_s)
    assert supervision.tick(0.0) == [Start(part, 0) for part in parts]
    for part in parts:
        supervision.started(part, 0, 0.0)
    return supervision


def test_a_part_is_asked_and_lives_on_while_it_answers() -> None:
    supervision = up("a")
    assert supervision.due_s == 1.0
    assert supervision.tick(0.9) == []
    assert supervision.tick(1.0) == [Ask("a", 0)]
    assert supervision.tick(5.9) == []
    supervision.answered("a", 0, 5.9)
    assert supervision.tick(6.0) == []
    assert supervision.tick(6.9) == [Ask("a", 0)]


def test_a_part_without_an_answer_is_replaced_after_a_delay() -> None:
    supervision = up("a", "b")
    supervision.tick(1.0)
    supervision.answered("b", 0, 1.1)
    (kill,) = [decision for decision in supervision.tick(6.0) if not isinstance(decision, Ask)]
    assert isinstance(kill, Kill)
    assert (kill.part, kill.incarnation) == ("a", 0)
    assert isinstance(kill.cause, Unresponsive)
    assert not supervision.is_up("a")
    assert supervision.is_up("b", 0)
    assert supervision.tick(6.4) == []
    assert supervision.tick(6.5) == [Start("a", 1)]
    assert supervision.restarts == 1


def test_one_operation_for_too_long_counts_as_hung() -> None:
    supervision = up("a")
    supervision.tick(1.0)
    assert supervision.answered("a", 0, 1.1, busy_s=4.9) == []
    supervision.tick(2.1)
    (kill,) = supervision.answered("a", 0, 2.2, busy_s=6.0)
    assert isinstance(kill, Kill)


def test_a_part_can_have_a_limit_of_its_own_for_one_operation() -> None:
    supervision = up("a", "learner", operation_s={"learner": 50.0})
    supervision.tick(1.0)
    assert supervision.answered("learner", 0, 1.1, busy_s=49.0) == []
    supervision.tick(2.1)
    (kill,) = supervision.answered("learner", 0, 2.2, busy_s=51.0)
    assert isinstance(kill, Kill)
    assert "51 s" in str(kill.cause)


def test_events_of_an_old_incarnation_have_no_effect() -> None:
    supervision = up("a")
    supervision.failed("a", 0, 2.0, RuntimeError("first"))
    for incarnation in (0, 1):  # the one before, and the next one, which has not been started
        assert supervision.failed("a", incarnation, 2.1, RuntimeError("again")) == []
    assert supervision.tick(2.5) == [Start("a", 1)]
    supervision.started("a", 0, 2.6)
    assert not supervision.is_up("a")
    assert supervision.failed("a", 0, 2.7, RuntimeError("late")) == []
    supervision.started("a", 1, 3.0)
    assert supervision.is_up("a", 1)
    assert not supervision.is_up("a", 0)
    assert supervision.answered("a", 0, 3.1, busy_s=100.0) == []


def test_a_crash_loop_backs_off_and_ends_with_its_first_exception() -> None:
    supervision = up("a")
    first = RuntimeError("first")
    assert supervision.failed("a", 0, 10.0, first) == [Kill("a", 0, first)]
    assert supervision.tick(10.5) == [Start("a", 1)]
    (kill,) = supervision.tick(20.5)
    assert isinstance(kill, Kill)
    assert "did not start" in str(kill.cause)
    assert supervision.due_s == 21.5
    assert supervision.tick(21.5) == [Start("a", 2)]
    assert supervision.failed("a", 2, 22.0, RuntimeError("third")) == [End("a", first)]
    assert supervision.ended
    assert supervision.tick(1000.0) == supervision.failed("a", 2, 1000.0, RuntimeError("late")) == []


def test_useful_work_ends_a_series_of_failures() -> None:
    supervision = up("a")
    now_s = 0.0
    for incarnation in range(10):
        fail_and_work(supervision, incarnation, now_s)
        now_s += 26.0


def test_failures_that_are_too_frequent_end_the_run_whatever_is_done_in_between() -> None:
    supervision = up("a")
    for incarnation in range(5):
        fail_and_work(supervision, incarnation, 30.0 * incarnation)  # no five of them within 100 s
    (end,) = supervision.failed("a", 5, 121.0, RuntimeError("5"))
    assert isinstance(end, End)
    assert str(end.cause) == "1", "the first of those that count"


def fail_and_work(supervision: Supervision, incarnation: int, now_s: float) -> None:
    """Let this incarnation fail, and the next one do useful work."""
    (kill,) = supervision.failed("a", incarnation, now_s, RuntimeError(str(incarnation)))
    assert isinstance(kill, Kill)
    now_s += 0.5
    assert supervision.tick(now_s) == [Start("a", incarnation + 1)], "the delay is the shortest every time"
    supervision.started("a", incarnation + 1, now_s)
    supervision.worked("a", incarnation + 1)


def test_what_cannot_be_cured_ends_the_run_at_once() -> None:
    error = RuntimeError("gone")
    assert up("a").failed("a", 0, 1.0, error, curable=False) == [End("a", error)]
