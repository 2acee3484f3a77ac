"""Trace of a run: what every part did when, in the Trace Event format that Perfetto and Chrome show.

    tracks of the parts ── poll, in every iteration ──► Trace ── write ──► trace.json.gz
    processes of Ray ── spans in their signs of life ──┘

Each part is a process of the trace, and each of its tracks a thread, on which spans follow one another without overlap.
Format: the JSON object form, complete events ("ph": "X", times in microseconds) and metadata ("ph": "M"). Times are
those of the clock of each machine.
"""

import gzip
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied.core.clock import running_s
from embodied.runtime.watch.track import Span, Track

TRACE_S = 60.0
"""Seconds of a trace."""
GRACE_S = 2.0
"""Seconds after the end in which processes of Ray hand over their last spans."""
MAX_EVENTS = 500_000
"""Most spans of a trace; some 30 MB of JSON before compression."""


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
            self.add(part, take(tracks, self.recording))

    def add(self, part: str, spans: Sequence[Span]) -> None:
        """Add spans of a part, up to the limit."""
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


def take(tracks: Iterable[Track], recording: bool) -> list[Span]:
    """Return the spans of tracks since the last call, and let them record from now on or not."""
    spans: list[Span] = []
    for track in tracks:
        track.record(recording)
        spans += track.take_spans()
    return spans


def _events(parts: Mapping[str, Sequence[Span]]) -> Iterator[dict[str, Any]]:
    """Yield the metadata and the spans of each track in order, from time 0 on."""
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
