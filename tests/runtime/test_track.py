"""Who did what for how long: tracks of parts, and what a run reports of them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from embodied.core.clock import running_s
from embodied.runtime.watch import MAX_SPANS, Track
from tests.runtime.builders import DECISIONS, NUM_ENVS, build, iterate
from tests.runtime.point_env import PointEnv

PARTS = {
    "env_worker": {"step_s", "record_s", "wait_actor_s", "wait_ticket_s"},
    "actor_server": {"infer_s", "fetch_s", "wait_requests_s"},
    "learner": {"learn_s", "publish_s", "wait_fragments_s", "other_s"},
}


class SlowEnv(PointEnv):
    """Takes five milliseconds per decision."""

    def step(self, action: torch.Tensor) -> Any:
        time.sleep(0.005)
        return super().step(action)


def test_the_seconds_of_a_track_add_up_to_the_time_that_passed() -> None:
    before_s = running_s()
    track = Track("part", "wait")
    began_s = running_s()
    with track.during("work"):
        time.sleep(0.01)
        assert track.enter("detail") == "work"
    track.add("things", 3)
    totals = track.totals()
    after_s = running_s()
    assert totals.pop("things") == 3
    assert totals["work_s"] >= 0.01
    assert set(totals) == {"wait_s", "work_s", "detail_s"}
    assert after_s - began_s <= sum(totals.values()) + (began_s - before_s) <= after_s - before_s + 1e-6


def test_spans_are_kept_only_while_recording_and_follow_one_another() -> None:
    track = Track("part", "wait")
    track.enter("work")
    track.take_spans(True)
    for activity in ("wait", "work", "wait"):
        track.enter(activity)
    spans = track.take_spans(False)
    track.enter("work")
    assert [span.activity for span in spans] == ["work", "wait", "work", "wait"]
    assert all(span.track == "part" and span.began_s <= span.ended_s for span in spans)
    assert all(a.ended_s == b.began_s for a, b in pairwise(spans))
    assert track.take_spans(False) == []


def test_spans_that_nobody_takes_are_bounded() -> None:
    track = Track("part", "wait")
    track.take_spans(True)
    for _ in range(MAX_SPANS + 10):
        track.enter("work")
    assert len(track.take_spans(True)) == MAX_SPANS


@pytest.mark.parametrize(("name", "max_staleness"), [("sync", 0), ("local", 0), ("local", 2)])
def test_every_iteration_says_who_waited_for_whom(name: str, max_staleness: int) -> None:
    with build(lambda num_envs, _: SlowEnv(num_envs), name=name, max_staleness=max_staleness) as runtime:
        iterate(runtime, 1)
        began_s = running_s()
        done = iterate(runtime, 5)
        passed_s = running_s() - began_s
    for part, activities in PARTS.items():
        found = {key.split("/")[2] for key in done[-1].metrics if key.startswith(f"time/{part}/")}
        spent_s = sum(i.metrics[f"time/{part}/{key}"] for i in done for key in activities)
        assert found == activities
        assert 0 < spent_s <= passed_s + 1e-6, part
    for iteration in done:
        metrics = iteration.metrics
        assert metrics["time/env_worker/step_s"] == metrics["perf/sim_s"] > 0
        assert metrics["time/actor_server/wait_requests_s"] > metrics["time/actor_server/infer_s"]
        assert metrics["time/learner/wait_fragments_s"] == metrics["perf/wait_s"] > 0
        staleness = iteration.histograms["async/staleness"]
        assert sum(staleness.values()) == DECISIONS * NUM_ENVS
        assert max(staleness) == metrics["async/staleness_max"] <= max_staleness
        assert metrics["async/staleness_p50"] <= metrics["async/staleness_p90"] <= metrics["async/staleness_max"]
        assert ("queue/fragments" in metrics) == (name == "local")
    served = sum((iteration.histograms["queue/requests"] for iteration in done), done[0].histograms["queue/requests"])
    assert set(served) <= {1, 2}, "there are two groups"
