"""Runs of a page, groups of runs that differ only in the seed, and their curves as series for uPlot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from embodied.core.statistics import t_interval, wilson_interval
from embodied.report.metrics import steps_of

MOST_POINTS = 400  # of a curve
SUCCESS = "success_at_end"
METRICS = {SUCCESS: "success", "return_mean": "return"}
"""What evaluations are compared by: the first that they have."""
Series = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a page shows of a run."""

    status: Mapping[str, Any]
    """Its state, as ``embodied.status`` returns it."""
    config: Mapping[str, Any]
    """Values of ``config.yaml`` by their whole keys."""
    defaults: Mapping[str, Any]
    """Defaults of the keys that differ from them."""
    rows: Sequence[Mapping[str, Any]]
    """Rows of ``metrics.jsonl``."""
    waits: Mapping[str, Mapping[str, float]]
    """Shares of the time of each part by activity."""
    evaluations: Sequence[Mapping[str, Any]]
    """Evaluations during training in order, with ``steps`` and ``wall_s`` of the weights."""
    results: Mapping[str, Mapping[str, Any]]
    """Other evaluations by name; ``final`` is that at the end of training."""
    certificate: Mapping[str, Any]
    doubt: str | None
    """Why the certificate says nothing of the last checkpoint; None if it does, or there is none."""
    faults: Sequence[str]
    """What is wrong with the other files."""

    @property
    def last(self) -> Mapping[str, Any]:
        """The evaluation at the end of training, otherwise the last one during it; empty if there is none."""
        return self.results.get("final") or (self.evaluations[-1] if self.evaluations else {})


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, each with its own seed."""

    label: str
    runs: Sequence[Run]
    colour: int
    metric: str

    @property
    def scale(self) -> float:
        return 100.0 if self.metric == SUCCESS else 1.0

    @property
    def final(self) -> bool:
        """Whether all runs have the evaluation at the end of training."""
        return all("final" in run.results for run in self.runs)

    def result(self) -> tuple[float, Sequence[float] | None, str] | None:
        """Return the last value, its 95% interval where known, and a note on it; None without an evaluation."""
        found = [run.last for run in self.runs if self.metric in run.last]
        if not found:
            return None
        values, episodes = [e[self.metric] for e in found], sum(e["episodes"] for e in found)
        fresh = "fresh episodes" if self.final else "episodes during training"
        if len({*values}) > 1:
            note = f"t interval of the mean of {len(found)} seeds, {episodes} {fresh}"
            return fmean(values), t_interval(values), note
        if self.metric != SUCCESS:
            return values[0], None, "a return has an interval over seeds alone"
        note = "other seeds may differ by more" if len(found) == 1 else f"all {len(found)} seeds ended alike"
        interval = wilson_interval(round(values[0] * episodes), episodes)
        return values[0], interval, f"95% Wilson interval of {episodes} {fresh}; {note}"

    def reached(self, success: float) -> tuple[float, float] | None:
        """Return mean steps and seconds of the first evaluations with so much success; None if a run has none."""
        first = [e for run in self.runs for e in [e for e in run.evaluations if e.get(SUCCESS, 0) >= success][:1]]
        done = len(first) == len(self.runs)
        return (fmean(e["steps"] for e in first), fmean(e["wall_s"] for e in first)) if done else None

    def series(self, x: Sequence[float], y: Sequence[float], label: str = "", **more: Any) -> Series:
        return {"label": f"{self.label} {label}".strip(), "colour": self.colour, "x": x, "y": y, **more}

    def evaluations(self, axis: str) -> list[Series]:
        """Return the curve of the evaluations, and the final one as a point. axis: ``steps`` or ``wall_s``.

        Of one run with Wilson's intervals. Of several the mean between their evaluations, with the interval of t, where
        all of them have values.
        """
        runs = [[e for e in run.evaluations if self.metric in e] for run in self.runs]
        found, key, most = list[Series](), f"{self.metric}_ci95", self.scale if self.metric == SUCCESS else np.inf
        if len(runs) == 1 and runs[0]:
            bounds = self.scale * np.array([e.get(key, [e[self.metric]] * 2) for e in runs[0]])
            found.append(self.series([e[axis] for e in runs[0]], [self.scale * e[self.metric] for e in runs[0]],
                                     low=bounds[:, 0].tolist(), high=bounds[:, 1].tolist(), whiskers=True))  # fmt: skip
        elif all(runs):
            begin, end = max(run[0][axis] for run in runs), min(run[-1][axis] for run in runs)
            x = sorted({e[axis] for run in runs for e in run if begin <= e[axis] <= end})
            of = [np.interp(x, [e[axis] for e in run], [self.scale * e[self.metric] for e in run]) for run in runs]
            bounds = np.array([t_interval(values) for values in np.stack(of, -1).tolist()]).reshape(-1, 2)
            bounds = bounds.clip(-most if most == np.inf else 0, most)
            found.append(self.series(x, np.mean(of, 0).tolist(), low=bounds[:, 0].tolist(), high=bounds[:, 1].tolist()))
        result = self.result()
        if result and self.final and all(run.rows for run in self.runs):
            low, high = result[1] or (result[0], result[0])
            found.append(self.series([fmean(run.status[axis] for run in self.runs)], [self.scale * result[0]], "final",
                                     low=[self.scale * low], high=[self.scale * high], whiskers=True))  # fmt: skip
        return found

    def rows(self, axis: str, key: str, label: str = "", scale: float = 1.0, thin: bool = False) -> list[Series]:
        """Return the curve of a key of ``metrics.jsonl`` for each run that has it. axis: ``steps`` or ``wall_s``."""
        found = list[Series]()
        for run in self.runs:
            rows = [row for row in run.rows if row.get(key) is not None]
            rows = rows[:: len(rows) // MOST_POINTS + 1]
            x = [steps_of(row) if axis == "steps" else row["wall_s"] for row in rows]
            more = {"thin": thin, "unnamed": bool(found)}
            found += [self.series(x, [scale * row[key] for row in rows], label, **more)] if rows else []
        return found


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs together whose configurations differ only in seed and directory."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        rest = {key: value for key, value in run.config.items() if key not in ("seed", "out")}
        groups.setdefault(json.dumps(rest, sort_keys=True), []).append(run)
    metric = next((key for key in METRICS if any(key in run.last for run in runs)), SUCCESS)
    paths = [(Path(group[0].status["run"]).absolute(), len(group)) for group in groups.values()]
    folders = [path.parent if size > 1 else path for path, size in paths]
    unique = len({path.name for path in folders}) == len(folders)
    labels = [path.name if unique else str(run) for path, (run, _) in zip(folders, paths, strict=True)]
    return [
        Group(label + (f", {len(group)} seeds" if len(group) > 1 else ""), group, i % 6, metric)
        for i, (label, group) in enumerate(zip(labels, groups.values(), strict=True))
    ]
