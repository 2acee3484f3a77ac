"""Schedules: every executed action belongs to its control step, whatever the latencies."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.core.errors import UserError
from embodied.deployment.control.schedule import Schedule

DT = 0.05


def chunk(step: int, horizon: int) -> np.ndarray:
    """A chunk whose rows say which control step they are for, and which observation they come from."""
    return np.stack([[step + i, step, 0.04 if i % 2 else 0.0] for i in range(horizon)]).astype(np.float32)


def simulate(schedule: Schedule, latencies: list[int], steps: int) -> list[tuple[int, np.ndarray]]:
    """Run control steps with inferences that take so many of them each; return the executed actions by step."""
    executed, step, waiting, began, due, request = [], 0, 0, 0, 0, None
    lags = iter(latencies)
    clock = 0
    while step < steps:
        if request is not None and clock >= due:
            schedule.arrive(chunk(request.step, schedule.horizon), (due - began) * DT)
            request = None
        if request is None:
            request = schedule.request(step)
            if request is not None:
                began, due = clock, clock + next(lags)
                if due == clock:
                    schedule.arrive(chunk(request.step, schedule.horizon), 0.0)
                    request = None
        if request is not None and schedule.waits:
            clock, waiting = clock + 1, waiting + 1
            assert waiting < 1000
            continue
        executed.append((step, schedule.action(step)))
        step, clock = step + 1, clock + 1
    return executed


@pytest.mark.parametrize("seed", range(20))
def test_rtc_executes_the_row_of_each_step_from_the_newest_chunk(seed: int) -> None:
    random = np.random.default_rng(seed)
    horizon, execute = int(random.integers(2, 9)), 0
    execute = int(random.integers(1, horizon + 1))
    schedule = Schedule("rtc", horizon, execute, 3, DT)
    latencies = random.integers(0, 2 * horizon, 500).tolist()
    executed = simulate(schedule, latencies, 200)
    padded, newest, before = 0, -1, np.zeros(3)
    for step, action in executed:
        if action[0] == step:  # a row of a chunk: that of this very step
            assert action[1] >= newest
            newest = action[1]
        else:
            padded += 1
            assert np.array_equal(action, before) or not action[:2].any()
        before = action
    assert padded == len(schedule.padded)


@pytest.mark.parametrize("kind", ["synchronous", "rtc"])
def test_without_latency_chunks_are_executed_one_after_the_other(kind: str) -> None:
    schedule = Schedule(kind, 6, 4, 3, DT)
    executed = simulate(schedule, [0] * 100, 20)
    assert [int(action[1]) for _, action in executed] == [4 * (step // 4) for step in range(20)]
    assert len(schedule.padded) == 0


@pytest.mark.parametrize("kind", ["synchronous", "ensemble"])
def test_a_robot_that_waits_for_its_chunks_never_pads(kind: str) -> None:
    schedule = Schedule(kind, 4, 4, 3, DT)
    executed = simulate(schedule, [7] * 100, 24)
    np.testing.assert_allclose([action[0] for _, action in executed], range(24), atol=1e-5)
    assert len(schedule.padded) == 0


def test_rtc_plans_early_enough_for_the_measured_delay() -> None:
    schedule = Schedule("rtc", 8, 8, 3, DT)
    executed = simulate(schedule, [40, *[3] * 100], 60)  # the first latency, of warming up, is not taken for typical
    assert schedule.delay() == 3
    later = [action for step, action in executed if step > 16]
    assert all(action[0] == step for step, action in executed if step > 16)
    assert len({int(action[1]) for action in later}) >= 8


def test_the_first_latency_does_not_enter_the_estimate() -> None:
    estimate = Schedule("rtc", 8, 8, 3, DT)
    estimate.note_latency(3.0)
    assert estimate.delay() == 0
    for latency_s in (0.02, 0.126, 0.04):
        estimate.note_latency(latency_s)
    assert estimate.delay() == 3
    for _ in range(10):
        estimate.note_latency(0.05)
    assert estimate.delay() == 1


def test_a_policy_trained_for_delay_gets_the_actions_that_will_be_executed() -> None:
    schedule = Schedule("rtc", 6, 4, 3, DT, max_delay=2)
    executed = []
    for step in range(4):
        request = schedule.request(step)
        if request is not None:
            assert (request.step, request.delay) == (0, 0)
            schedule.arrive(chunk(0, 6), 1.0)
        executed.append(schedule.action(step))
    schedule.note_latency(0.08)
    request = schedule.request(4)
    assert request is not None
    assert request.delay == 2
    np.testing.assert_array_equal(request.prefix_DA, chunk(0, 6)[4:6])
    executed += [schedule.action(4), schedule.action(5)]
    schedule.arrive(chunk(4, 6), 0.1)
    np.testing.assert_array_equal(np.stack(executed[4:6]), request.prefix_DA)
    np.testing.assert_array_equal(schedule.action(6), chunk(4, 6)[2])
    assert schedule.beyond_max_delay == 0
    assert schedule.request(8) is not None
    for step in (7, 8, 9, 10):
        schedule.action(step)
    schedule.arrive(chunk(8, 6), 0.15)
    assert schedule.beyond_max_delay == 1


def test_ensembles_average_all_plans_for_a_step_oldest_first() -> None:
    schedule = Schedule("ensemble", 3, 3, 3, DT)
    for step in range(5):
        assert schedule.request(step) is not None
        schedule.arrive(chunk(step, 3), 0.0)
        action = schedule.action(step)
        assert action[0] == pytest.approx(step)
    weights = np.exp(-0.01 * np.arange(3))
    assert action[1] == pytest.approx((weights * [2, 3, 4]).sum() / weights.sum())


def test_the_last_action_is_repeated_and_then_the_arm_stands_still() -> None:
    schedule = Schedule("rtc", 2, 2, 3, DT)
    assert schedule.request(0) is not None
    schedule.arrive(chunk(0, 2), 0.0)
    last = schedule.action(1)
    assert last[-1] == np.float32(0.04)
    for step in (2, 3):
        np.testing.assert_array_equal(schedule.action(step), last)
    np.testing.assert_array_equal(schedule.action(4), np.float32([0, 0, 0.04]))
    assert len(schedule.padded) == 3


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"unknown schedule 'rct'. Did you mean 'rtc'"):
        Schedule("rct", 4, 4, 3, DT)
    with pytest.raises(UserError, match="execute: got 5, allowed: 1 to 4"):
        Schedule("rtc", 4, 5, 3, DT)
