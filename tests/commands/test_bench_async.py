"""Asynchronous against synchronous training: runs whose parts are slow, and the model that predicts them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from statistics import fmean
from typing import Any

import pytest

from embodied import bench
from embodied.benchmarks.asynchrony import ARRIVAL, ASYNC, SYNC, Mode, predict
from embodied.benchmarks.latency import Latency, Setup, measured
from embodied.benchmarks.plant import Model, Plant, Prediction, Times
from tests.commands.helpers import run

RATIOS = {
    "uniform_over_sync", "uniform_over_bound", "tail_over_sync", "tail_over_bound", "inference_over_bound",
    "robot_over_bound", "tail_success", "model_error",
}  # fmt: skip


def model(step: Callable[[int], float], update_s: float, infer_s: float = 0.0, **plant: Any) -> Prediction:
    """The prediction of 30 batches."""
    times = Times(step, lambda acting, valued: infer_s if acting else 0.0, lambda: update_s)
    return Model(Plant(**plant), times).run(30, warmup=5)


def test_parts_take_turns_without_staleness_and_overlap_with_it() -> None:
    plant = {"workers": 3, "decisions": 2}
    sync = model(lambda group: 1.0, 3.0, **plant)
    assert sync.batch_s == pytest.approx(2 * 1.0 + 3.0)
    assert sync.worker_busy == pytest.approx(2 / 5)
    assert sync.learner_busy == pytest.approx(3 / 5)
    assert sync.staleness_max == 0
    overlapped = model(lambda group: 1.0, 3.0, **plant, max_staleness=1)
    assert overlapped.batch_s == pytest.approx(3.0)
    assert overlapped.staleness_max == 1
    assert model(lambda group: 2.0, 3.0, **plant, max_staleness=1).batch_s == pytest.approx(4.0)


def test_a_second_group_hides_inference_and_requests_are_merged_or_not() -> None:
    plant: dict[str, Any] = {"workers": 1, "decisions": 4, "max_staleness": 1}
    assert model(lambda group: 1.0, 0.1, 0.5, **plant, groups=1).batch_s == pytest.approx(4 * 1.5)
    assert model(lambda group: 1.0, 0.1, 0.5, **plant, groups=2).worker_busy > 0.9  # but for the ends of fragments
    assert model(lambda group: 1.0, 0.0, 0.5, workers=5, decisions=1).batch_s == pytest.approx(0.5 + 1.0)
    alone: dict[str, Any] = {"workers": 5, "decisions": 1, "merge": False}
    assert model(lambda group: 1.0, 0.0, 0.5, **alone).batch_s == pytest.approx(5 * 0.5 + 1.0)
    assert model(lambda group: 1.0, 0.0, 0.5, **alone, servers=5).batch_s == pytest.approx(0.5 + 1.0)


def test_a_slow_worker_holds_up_a_batch_of_tickets_but_not_of_arrivals() -> None:
    def step(group: int) -> float:
        return 9.0 if group == 0 else 1.0

    plant: dict[str, Any] = {"workers": 10, "decisions": 1, "max_staleness": 1}
    tickets, arrivals = model(step, 0.1, **plant), model(step, 0.1, **plant, order="arrival")
    assert tickets.batch_s > 4.0  # two batches wait for each step of the slow worker
    assert tickets.used == 1.0
    assert arrivals.batch_s < 1.3
    assert 0.95 < arrivals.used < 1.0  # what the slow worker delivers is too old
    assert max(tickets.staleness_max, arrivals.staleness_max) == 1


@pytest.mark.parametrize("order", ["ticket", "arrival"])
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_no_decision_that_counts_is_older_than_the_limit(max_staleness: int, order: Any) -> None:
    draws = Latency(1.0, sigma=1.5).stream(max_staleness)
    plant: dict[str, Any] = {"workers": 7, "groups": 2, "servers": 2, "max_staleness": max_staleness, "order": order}
    prediction = model(lambda group: next(draws), 2.0, 0.2, **plant)
    assert prediction.staleness_max <= max_staleness
    assert prediction.batch_s >= 2 * 4 * 0.5


def test_draws_are_a_function_of_the_seed_and_have_the_mean() -> None:
    tail = Latency(0.2, sigma=1.0)
    draws = list(islice(tail.stream((3, 1)), 20_000))
    assert draws == list(islice(tail.stream((3, 1)), 20_000))
    assert draws[:5] != list(islice(tail.stream((3, 2)), 5))
    assert fmean(draws) == pytest.approx(0.2, rel=0.05)
    assert sum(draw > 4.7 * 0.2 for draw in draws) == pytest.approx(20_000 / 50, rel=0.2)


@pytest.mark.parametrize("mode", [SYNC, ASYNC, ARRIVAL])
def test_a_run_with_slow_parts_is_a_run_and_takes_its_time(mode: Mode) -> None:
    setup = Setup(Latency(0.004), workers=2, envs=2, decisions=2, infer_s=0.002, update_s=0.02)
    found = measured(setup, mode, draw=0, iterations=3)
    assert found.env_steps == round((1 - found.dropped) * 3 * 2 * 2 * 2)  # batches, workers, envs, decisions
    assert 0 <= found.staleness <= mode["max_staleness"]
    assert found.wall_s >= 3 * 0.02  # sleeps are never shorter
    assert found.call_s >= 0.002
    assert found.update_s >= 0.02
    assert found.overhead_s >= 0
    predicted = predict(setup, mode, 0, found)
    assert predicted.batch_s >= setup.bound_s


@pytest.mark.slow(reason="trains a dozen times, a few iterations each")
def test_bench_async_reports_every_ratio() -> None:
    outcome = run(bench.main, ["async", "short=true"])
    assert outcome.code == 0, outcome.stderr
    ratios = outcome.result["ratios"]
    assert set(ratios) >= RATIOS
    assert all(ratios[name] > 0 for name in RATIOS - {"tail_success"})
    rows = {row["name"]: row for row in outcome.result["rows"]}
    assert rows["tail_async"]["settings"]["order"] == "arrival"
    assert rows["tail_sync"]["settings"]["max_staleness"] == 0
    assert rows["tail_async"]["settings"]["step"]["sigma"] == 1.0
    assert {"tail_bound", "inference_bound", "robot_bound", "uniform_bound", "tail_learning_async"} <= set(rows)


def test_bench_scale_says_what_more_workers_would_give() -> None:
    outcome = run(bench.main, ["scale", "short=true"])
    assert outcome.code == 0, outcome.stderr
    ratios = outcome.result["ratios"]
    assert {"async_over_sync_8", "async4_over_sync_8", "one_learner_8", "pool_1.0_8"} <= set(ratios)
    assert ratios["async_over_sync_8"] > 1
    assert ratios["pool_1.0_8"] > ratios["pool_0.25_8"], "a heavier tail leaves more to gain"
    rows = {row["name"]: row for row in outcome.result["rows"]}
    assert rows["sync_8"]["value"] < rows["ticket_8"]["value"] < rows["async_8"]["value"] <= 1.05
    assert rows["tail_for_AReaL"]["value"] == pytest.approx((2.57 - 0.25) / 0.75, abs=0.001)
