"""Reads the tracks of all parts once per iteration: who worked and who waited, how old the data, how long the queues.

totals of the parts ── less those of the reading before ──► time/*, perf/*, queue/*, bytes/*, histograms
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from embodied.core.algorithm import Metrics
from embodied.core.clock import running_s
from embodied.core.statistics import quantile_of_counts

Histograms = dict[str, Counter[int]]
"""How often each whole number occurred, by name."""
HISTOGRAMS = {"staleness": "async/staleness", "requests": "queue/requests"}
"""Names of histograms by the prefix of their counts."""
QUANTILES = (50, 90)
"""Percentiles of a histogram in the metrics."""
EDGES = ("requests", "replies", "fragments", "weights")
"""Kinds of messages between processes whose bytes are counted."""


class Counted(Protocol):
    """A part, or several parts of a kind together."""

    def totals(self) -> Mapping[str, float]:
        """Return the seconds of each activity and the counts so far (``Track.totals``)."""
        ...


class Meter:
    """Differences between readings; the first is that of its creation."""

    def __init__(self, workers: Sequence[Counted], actor: Counted, learner: Counted) -> None:
        self._workers, self._actor, self._learner = workers, actor, learner
        self._last_s, self._last = running_s(), self._read()

    def read(self) -> tuple[Metrics, Histograms]:
        """Return metrics and histograms of the time since the last reading.

        ``time/<part>/<activity>_s``: seconds of each activity, the mean over parts of a kind. ``perf/sim_s``,
        ``infer_s``, ``learn_s``: when simulator, policy and learner were busy. ``perf/wait_s``: when the learner lacked
        data.
        """
        now_s, present = running_s(), self._read()
        passed_s, self._last_s = now_s - self._last_s, now_s
        new = {kind: _difference(totals, self._last[kind]) for kind, totals in present.items()}
        self._last = present
        spent = {
            f"time/{kind}/{name}": amount
            for kind, totals in new.items()
            for name, amount in sorted(totals.items())
            if name.endswith("_s")
        }
        sent = {edge: sum(totals.get(f"{edge}_bytes", 0.0) for totals in new.values()) for edge in EDGES}
        learner, queue = new["learner"], new["learner"].get("fragments")
        metrics: Metrics = {
            "perf/sim_s": new["env_worker"].get("step_s", 0.0),
            "perf/infer_s": new["actor_server"].get("infer_s", 0.0) + new["actor_server"].get("fetch_s", 0.0),
            "perf/learn_s": learner.get("learn_s", 0.0) + learner.get("publish_s", 0.0),
            "perf/wait_s": learner.get("wait_fragments_s", 0.0) + learner.get("fetch_s", 0.0),
            **spent,
            **({} if queue is None else {"queue/fragments": queue}),
            **{f"bytes/{edge}_per_s": amount / passed_s for edge, amount in sent.items() if amount},
        }
        histograms = {name: _histogram(f"{prefix}/", new.values()) for prefix, name in HISTOGRAMS.items()}
        for name, counts in histograms.items():
            if not counts:
                continue
            metrics |= {f"{name}_p{share}": float(quantile_of_counts(counts, share / 100)) for share in QUANTILES}
        return metrics, histograms

    def _read(self) -> dict[str, Mapping[str, float]]:
        """Return the totals by kind of part."""
        return {
            "env_worker": joined([worker.totals() for worker in self._workers]),
            "actor_server": self._actor.totals(),
            "learner": self._learner.totals(),
        }


def joined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the totals of parts of a kind together: of seconds the mean, of counts the sum."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return {name: amount / len(parts) if name.endswith("_s") else amount for name, amount in total.items()}


def _difference(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - then.get(name, 0.0) for name, amount in now.items()}


def _histogram(prefix: str, parts: Iterable[Mapping[str, float]]) -> Counter[int]:
    """Return how often each value was counted under ``<prefix><value>``."""
    counts: Counter[int] = Counter()
    for part in parts:
        for name, amount in part.items():
            if name.startswith(prefix) and amount:
                counts[int(name.removeprefix(prefix))] += round(amount)
    return counts
