"""Asynchronous against synchronous training: runs whose parts are slow."""

from __future__ import annotations

from itertools import islice
from statistics import fmean

import pytest

from embodied import bench
from embodied.benchmarks.asynchrony import ARRIVAL, ASYNC, SYNC, Mode, Setup, measured
from tests.commands.helpers import run

RATIOS = {"tail_over_sync", "tail_over_bound", "tail_async_2_over_bound", "inference_over_bound", "robot_over_bound"}


def test_latencies_are_a_function_of_the_seed_and_have_the_mean() -> None:
    tail = Setup(0.2, workers=1, sigma=1.0)
    latencies_s = list(islice(tail.latencies_s((3, 1)), 20_000))
    assert latencies_s == list(islice(tail.latencies_s((3, 1)), 20_000))
    assert latencies_s[:5] != list(islice(tail.latencies_s((3, 2)), 5))
    assert fmean(latencies_s) == pytest.approx(0.2, rel=0.05)
    assert sum(latency_s > 4.7 * 0.2 for latency_s in latencies_s) == pytest.approx(20_000 / 50, rel=0.2)


@pytest.mark.parametrize("mode", [SYNC, ASYNC, ARRIVAL])
def test_a_run_with_slow_parts_is_a_run_and_takes_its_time(mode: Mode) -> None:
    setup = Setup(0.004, workers=2, envs=2, decisions=2, infer_s=0.002, update_s=0.02)
    found = measured(setup, mode, draw=0, iterations=3)
    assert found.env_steps == round((1 - found.dropped) * 3 * 2 * 2 * 2)  # batches, workers, envs, decisions
    assert 0 <= found.staleness <= mode["max_staleness"]
    assert found.wall_s >= 3 * 0.02  # sleeps are never shorter


@pytest.mark.slow(reason="trains a dozen times, a few iterations each")
def test_bench_async_reports_every_ratio() -> None:
    outcome = run(bench.main, ["async", "short=true"])
    assert outcome.code == 0, outcome.stderr
    ratios = outcome.result["ratios"]
    assert set(ratios) >= RATIOS
    assert all(ratio > 0 for ratio in ratios.values())
    rows = {row["name"]: row for row in outcome.result["rows"]}
    assert rows["tail_async"]["settings"]["order"] == "arrival"
    assert rows["tail_sync"]["settings"]["max_staleness"] == 0
    assert rows["tail_async"]["settings"]["sigma"] == 1.0
    assert {"tail_bound", "inference_bound", "robot_bound"} <= set(rows)
