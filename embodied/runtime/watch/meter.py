"""Reads the tracks of all parts once per iteration: who worked and who waited, how old the data, how long the queues.

totals of the parts ── less those of the reading before ──► time/*, perf/*, queue/*, bytes/*, histograms
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from embodied.core.algorithm import Metrics
from embodied.core.clock import running_s
from embodied.core.statistics import quantile_of_counts

Totals = Mapping[str, float]
"""Seconds of each activity and counts so far (``Track.totals``), of a part or of several parts of a kind together."""
Histograms = dict[str, Counter[int]]
"""How often each whole number occurred, by name."""
HISTOGRAMS = {"staleness": "async/staleness", "requests": "queue/requests"}
"""Names of histograms by the prefix of their counts."""
QUANTILES = (50, 90)
"""Percentiles of a histogram in the metrics."""
EDGES = ("requests", "replies", "fragments", "weights")
"""Kinds of messages between processes whose bytes are counted."""


class Meter:
    """Differences between readings; the first is that of its creation.

    totals: reads those of env_worker, actor_server and learner.
    """

    def __init__(self, totals: Callable[[], dict[str, Totals]]) -> None:
        self._totals = totals
        self._last_s, self._last = running_s(), totals()

    def read(self) -> tuple[Metrics, Histograms]:
        """Return metrics and histograms of the time since the last reading.

        ``time/<part>/<activity>_s``: seconds of each activity, the mean over parts of a kind. ``perf/sim_s``,
        ``infer_s``, ``learn_s``: when simulator, policy and learner were busy. ``perf/wait_s``: when the learner lacked
        data.
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
                metrics |= {f"{name}_p{share}": float(quantile_of_counts(counts, share / 100)) for share in QUANTILES}
        return metrics, histograms


def joined(parts: Sequence[Totals]) -> dict[str, float]:
    """Return the totals of parts of a kind together: of seconds the mean, of counts the sum."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return {name: amount / len(parts) if name.endswith("_s") else amount for name, amount in total.items()}
