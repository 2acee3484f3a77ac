"""Traces: what Perfetto reads, for every runtime."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from embodied.runtime.ray.cluster import Cluster
from embodied.runtime.watch import MAX_EVENTS, Span, Trace, Track
from tests.runtime.builders import build, iterate

WORKER = {"step", "record", "wait_actor", "wait_ticket"}


def read(path: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The spans of a trace by part and track, after a check of its format."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file, parse_constant=lambda name: pytest.fail(name))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    parts: dict[int, str] = {}
    names: dict[tuple[int, int], str] = {}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {type(event["pid"]), type(event["tid"])} == {int}
        if event["ph"] == "M":
            table: Any = parts if event["name"] == "process_name" else names
            table[event["pid"] if table is parts else (event["pid"], event["tid"])] = event["args"]["name"]
            continue
        assert event["ph"] == "X", "complete events alone, which cannot be unbalanced"
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    assert tracks.keys() <= names.keys()
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    for (pid, tid), events in tracks.items():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(events)), "no overlap within a track"
        found[parts[pid]][names[pid, tid]] = events
    assert min(events[0]["ts"] for part in found.values() for events in part.values()) == 0
    return found


def activities(events: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in events}


@pytest.mark.parametrize(("name", "max_staleness"), [("sync", 0), ("local", 1)])
def test_every_part_has_a_track_with_what_it_did(name: str, max_staleness: int, tmp_path: Path) -> None:
    with build(name=name, max_staleness=max_staleness, trace=True, num_env_workers=2, eval_every=2) as runtime:
        iterate(runtime, 30)  # enough for every group to have its turn, on busy cores too
    assert runtime.trace is not None
    runtime.trace.write(tmp_path / "trace.json.gz")
    found = read(tmp_path / "trace.json.gz")
    assert set(found) == {"actor server 0", "env worker 0", "env worker 1", "evaluator", "learner"}
    for worker in ("env worker 0", "env worker 1"):
        assert list(found[worker]) == [worker, "group 0", "group 1"]
        assert all(activities(events) == WORKER for events in found[worker].values())
    assert activities(found["actor server 0"]["actor server 0"]) == {"infer", "fetch", "wait_requests"}
    assert activities(found["learner"]["learner"]) == {"learn", "publish", "wait_fragments", "other"}
    assert activities(found["evaluator"]["evaluator"]) == {"evaluate", "idle"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_run_without_the_option_has_no_trace() -> None:
    with build() as runtime:
        iterate(runtime, 1)
        assert runtime.trace is None
        assert runtime.learner.track.take_spans(False) == []  # type: ignore[attr-defined]


def test_a_trace_ends_after_its_seconds() -> None:
    trace, track = Trace(limit_s=0.0), Track("part", "wait")
    assert trace.recording
    trace.poll({"part": [track]})
    assert not trace.recording
    track.enter("work")
    assert track.take_spans(False) == []


def test_a_trace_is_bounded_and_then_complete(tmp_path: Path) -> None:
    trace = Trace()
    trace.poll({})
    spans = [Span("part", "work", float(i), i + 1.0) for i in range(1000)]
    for _ in range(MAX_EVENTS // 1000):
        assert not trace.complete
        trace.add("part", spans)
    assert trace.complete
    assert not trace.recording
    trace.add("another", spans)
    assert trace._spans["another"] == []


def test_a_part_whose_clock_jumps_back_keeps_a_track_without_overlap(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("part", [Span("part", "work", 5.0, 7.0), Span("part", "work", 6.0, 6.5), Span("part", "wait", 6.5, 9.0)])
    trace.write(tmp_path / "trace.json.gz")
    events = read(tmp_path / "trace.json.gz")["part"]["part"]
    assert [(event["ts"], event["dur"]) for event in events] == [(0.0, 2e6), (2e6, 0.0), (2e6, 2e6)]


@pytest.mark.slow(reason="starts Ray and processes that import torch")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_processes_of_ray_send_their_spans(ray_cluster: Cluster, tmp_path: Path) -> None:
    with build(name="ray", max_staleness=1, trace=True, eval_every=2, num_actor_servers=2) as runtime:
        iterate(runtime, 8)
        time.sleep(2)  # the spans so far come with the signs of life; those under way at the end may be lost
        iterate(runtime, 2)
    assert runtime.trace is not None
    runtime.trace.write(tmp_path / "trace.json.gz")
    found = read(tmp_path / "trace.json.gz")
    assert set(found) == {"actor server 0", "actor server 1", "controller", "env worker 0", "evaluator", "learner"}
    assert list(found["actor server 1"]) == ["actor server 1"]
    for name, events in found["env worker 0"].items():
        assert activities(events) == WORKER, name
    assert {"infer", "fetch"} < activities(found["actor server 0"]["actor server 0"])
    assert {"fetch", "learn", "publish", "wait_controller"} <= activities(found["learner"]["learner"])
    assert {"decide", "wait_events"} == activities(found["controller"]["controller"])
    assert "wait_fragments" in activities(found["controller"]["training loop"])
    spans = [event for part in found.values() for events in part.values() for event in events]
    assert max(event["ts"] + event["dur"] for event in spans) < 3600e6, "one clock for all processes of a machine"
