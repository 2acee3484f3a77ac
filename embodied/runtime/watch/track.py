"""What a part does over time: seconds of each activity, counts, and spans while a trace is recorded.

    part ── enter("step") ── enter("wait_actor") ──► totals: {"step_s": ..., "wait_actor_s": ...}
                                                └──► spans: (began, ended, "step"), ...

A part is in one activity at any time, so the seconds of all its activities add up to the time that has passed.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from embodied.core.clock import running_s

MAX_SPANS = 50_000
"""Spans that a track keeps until they are taken; later ones are dropped."""
UNIX_S = time.time() - running_s()
"""Unix time at 0 of ``running_s`` in this process, read once so that the spans of a track never overlap."""


class Span(NamedTuple):
    """An activity from its beginning to its end."""

    track: str
    """Name of the track."""
    activity: str
    """What the part did."""
    began_s: float
    """Unix time."""
    ended_s: float
    """Unix time."""


class Track:
    """Activities of one part. The part writes, one thread at a time; any thread may read.

    name: of the part, or of a group of it. activity: the first one.
    """

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
        """Add to a count."""
        with self._lock:
            self._totals[name] += amount

    def totals(self) -> dict[str, float]:
        """Return ``<activity>_s``, the seconds of each activity up to now, and all counts."""
        with self._lock:
            totals = dict(self._totals)
            key = f"{self._activity}_s"
            return totals | {key: totals.get(key, 0.0) + running_s() - self._since}

    def record(self, recording: bool) -> None:
        """Keep spans from now on, or keep none; the present activity is cut in two."""
        with self._lock:
            if recording != self._recording:
                self._close()
                self._recording = recording

    def take_spans(self) -> list[Span]:
        """Return the spans that were kept since the last call, in order."""
        with self._lock:
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
