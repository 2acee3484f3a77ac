"""Who waits for whom: what each part does over time, metrics of it per iteration, and a trace for Perfetto.

    part ── Track.enter("step") ──► seconds of each activity, counts ──► Meter.read: time/*, perf/*, queue/*, bytes/*
                               ├──► spans, while a trace is recorded ──► Trace.write: trace.json.gz
                               └──► Track.present ──► the watchdog of ThreadGroup

A part is in one activity at any time, so the seconds of all its activities add up to the time that has passed.
"""

import gzip
import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embodied.core.algorithm import Metrics
from embodied.core.clock import running_s

MAX_SPANS = 50_000
"""Spans that a track keeps until they are taken; later ones are dropped."""
UNIX_S = time.time() - running_s()
"""Unix time at 0 of ``running_s`` in this process, read once so that the spans of a track never overlap."""
TRACE_S = 60.0
GRACE_S = 2.0
"""Seconds after the end in which processes of Ray hand over their last spans."""
MAX_EVENTS = 500_000
"""Most spans of a trace; some 30 MB of JSON before compression."""
HISTOGRAMS = {"staleness": "async/staleness", "requests": "queue/requests"}
"""Names of histograms by the prefix of their counts."""
QUANTILES = (50, 90)
EDGES = ("requests", "replies", "fragments", "weights")
"""Kinds of messages between processes whose bytes are counted."""

Totals = Mapping[str, float]
"""Seconds of each activity and counts so far (``Track.totals``), of a part or of several parts of a kind together."""
Histograms = dict[str, Counter[int]]


class Span(NamedTuple):
    """An activity from its beginning to its end, Unix times."""

    track: str
    activity: str
    began_s: float
    ended_s: float


class Track:
    """Activities of one part, written by one thread at a time, read by any. activity: the first one."""

    def __init__(self, name: str, activity: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._activity, self._since = activity, running_s()
        self._spans: list[Span] = []
        self._recording = False

    def enter(self, activity: str) -> str:
        """Begin an activity, which ends the present one; return the name of that one."""
        with self._lock:
            left = self._close()
            self._activity = activity
            return left

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Be in an activity, and afterwards again in the present one."""
        left = self.enter(activity)
        try:
            yield
        finally:
            self.enter(left)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._totals[name] += amount

    def totals(self) -> dict[str, float]:
        """Return ``<activity>_s``, the seconds of each activity up to now, and all counts."""
        with self._lock:
            totals = dict(self._totals)
            key = f"{self._activity}_s"
            return totals | {key: totals.get(key, 0.0) + running_s() - self._since}

    @property
    def present(self) -> tuple[str, float]:
        """The present activity, and when it began (``running_s``)."""
        with self._lock:
            return self._activity, self._since

    def take_spans(self, recording: bool) -> list[Span]:
        """Return the spans since the last call, in order. recording: whether to keep those from now on."""
        with self._lock:
            if recording != self._recording:
                self._close()
                self._recording = recording
            spans, self._spans = self._spans, []
            return spans

    def _close(self) -> str:
        """End the present activity and begin it anew; return its name."""
        now, activity = running_s(), self._activity
        self._totals[f"{activity}_s"] += now - self._since
        if self._recording and len(self._spans) < MAX_SPANS:
            self._spans.append(Span(self.name, activity, UNIX_S + self._since, UNIX_S + now))
        self._since = now
        return activity


def joined(parts: Sequence[Totals]) -> dict[str, float]:
    """Return the totals of parts of a kind together: of seconds the mean, of counts the sum."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return {name: amount / len(parts) if name.endswith("_s") else amount for name, amount in total.items()}


class Meter:
    """Differences between readings, the first at its creation. totals: of env_worker, actor_server and learner."""

    def __init__(self, totals: Callable[[], dict[str, Totals]]) -> None:
        self._totals = totals
        self._last_s, self._last = running_s(), totals()

    def read(self) -> tuple[Metrics, Histograms]:
        """Return metrics and histograms of the time since the last reading.

        ``time/<part>/<activity>_s``: the mean over parts of a kind. ``perf/sim_s``, ``infer_s``, ``learn_s``: the
        simulator, policy and learner were busy. ``perf/wait_s``: the learner lacked data.
        """
        now_s, present = running_s(), self._totals()
        new = {
            kind: {name: amount - self._last[kind].get(name, 0.0) for name, amount in totals.items()}
            for kind, totals in present.items()
        }
        passed_s, self._last_s, self._last = now_s - self._last_s, now_s, present
        actor, learner = new["actor_server"], new["learner"]
        metrics: Metrics = {
            "perf/sim_s": new["env_worker"].get("step_s", 0.0),
            "perf/infer_s": actor.get("infer_s", 0.0) + actor.get("fetch_s", 0.0),
            "perf/learn_s": learner.get("learn_s", 0.0) + learner.get("publish_s", 0.0),
            "perf/wait_s": learner.get("wait_fragments_s", 0.0) + learner.get("fetch_s", 0.0),
        }
        for kind, totals in new.items():
            metrics |= {f"time/{kind}/{name}": totals[name] for name in sorted(totals) if name.endswith("_s")}
        if "fragments" in learner:
            metrics["queue/fragments"] = learner["fragments"]
        for edge in EDGES:
            sent = sum(totals.get(f"{edge}_bytes", 0.0) for totals in new.values())
            if sent:
                metrics[f"bytes/{edge}_per_s"] = sent / passed_s
        histograms = {}
        for prefix, name in HISTOGRAMS.items():
            histograms[name] = counts = Counter[int]()
            for totals in new.values():
                for key, amount in totals.items():
                    if key.startswith(f"{prefix}/") and amount:
                        counts[int(key.removeprefix(f"{prefix}/"))] += round(amount)
            if counts:
                shares = [share / 100 for share in QUANTILES]
                found = np.quantile([*counts], shares, weights=[*counts.values()], method="inverted_cdf").tolist()
                metrics |= {f"{name}_p{share}": float(value) for share, value in zip(QUANTILES, found, strict=True)}
        return metrics, histograms


class Trace:
    """Thread-safe collection of spans by part. It records from its creation, and its seconds count from ``poll``."""

    def __init__(self, limit_s: float = TRACE_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._spans: dict[str, list[Span]] = {}
        self._num = 0
        self._end_s = float("inf")

    @property
    def recording(self) -> bool:
        """Whether spans are wanted."""
        return running_s() < self._end_s and self._num < MAX_EVENTS

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        return running_s() >= self._end_s + GRACE_S or self._num >= MAX_EVENTS

    def poll(self, parts: Mapping[str, Sequence[Track]]) -> None:
        """Take the spans of tracks of this process, and start or stop their recording. parts: tracks by part."""
        if self._end_s == float("inf"):
            self._end_s = running_s() + self._limit_s
        for part, tracks in parts.items():
            recording = self.recording
            self.add(part, [span for track in tracks for span in track.take_spans(recording)])

    def add(self, part: str, spans: Sequence[Span]) -> None:
        with self._lock:
            spans = spans[: MAX_EVENTS - self._num]
            self._spans.setdefault(part, []).extend(spans)
            self._num += len(spans)

    def write(self, path: Path) -> None:
        """Write the trace, compressed, so that readers see a whole file or none."""
        with self._lock:
            events = list(_events(self._spans))
        trace = {"traceEvents": events, "displayTimeUnit": "ms"}
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with gzip.open(partial, "wt", encoding="utf-8", compresslevel=5) as file:
                json.dump(trace, file, separators=(",", ":"))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _events(parts: Mapping[str, Sequence[Span]]) -> Iterator[dict[str, Any]]:
    """Yield the metadata and the spans of each track in order, from time 0 on, in the Trace Event format.

    Each part is a process of the trace, and each of its tracks a thread on which spans follow without overlap.
    """
    zero_s = min((span.began_s for spans in parts.values() for span in spans), default=0.0)
    for pid, (part, spans) in enumerate(sorted(parts.items()), 1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": part}}
        tracks = sorted({span.track for span in spans}, key=lambda name: (name != part, name))
        for tid, track in enumerate(tracks, 1):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
            end_us = 0.0
            for span in sorted((span for span in spans if span.track == track), key=lambda span: span.began_s):
                begin_us = max(end_us, round(1e6 * (span.began_s - zero_s), 3))  # a replaced part has its own clock
                end_us = max(begin_us, round(1e6 * (span.ended_s - zero_s), 3))
                duration_us = round(end_us - begin_us, 3)
                yield {"ph": "X", "name": span.activity, "cat": part, "pid": pid, "tid": tid, "ts": begin_us,
                       "dur": duration_us}  # fmt: skip
