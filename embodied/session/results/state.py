"""Read how a run is doing from the files of its directory. Imports no torch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied.core.user_files import short_name
from embodied.report.metrics import METRICS_FILE, read_metrics, steps_of
from embodied.report.progress import share_done, time_left
from embodied.session.files import STATE_FILE, WARNINGS_FILE, lock_owner, read_json, read_sections

ROWS = 20
"""Rows of metrics.jsonl that rates and shares are means over."""
ALIVE = ("starting", "training", "evaluating")
"""States in which a process works on the run."""


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the result of ``embodied.status``. UserError if the directory is not that of a run. Imports no torch.

    progress: fraction of the steps or minutes. waits: by part, the fraction of its time in each activity (``time/*``).
    None: not known.
    """
    config = read_sections(run_dir)
    journal, locked_by = read_json(run_dir / STATE_FILE), lock_owner(run_dir)
    state = _state(journal.get("state"), locked_by is not None)
    rows = read_metrics(run_dir / METRICS_FILE, ROWS)
    last: Mapping[str, Any] = rows[-1] if rows else {}
    steps, total, wall_s = steps_of(last), journal.get("total_steps"), last.get("wall_s", 0.0)
    seconds = wall_s - rows[0]["wall_s"] if rows else 0.0
    rate = (steps - steps_of(rows[0])) / seconds if seconds > 0 else None
    minutes = config.get("max_minutes")
    max_s = 60 * minutes if minutes else None
    return {
        "run": str(run_dir),
        "state": state,
        "process": locked_by or (f"process {journal['process']} on {journal['machine']}" if journal else None),
        **{key: short_name(config.get(key, {}).get("name")) for key in ("task", "policy", "algo", "runtime")},
        "iteration": last.get("iteration", 0),
        "steps": steps,
        "total_steps": total,
        "wall_s": wall_s,
        "steps_per_s": rate,
        "progress": share_done(steps, total, wall_s, max_s),
        "left_s": time_left(steps, total, rate, wall_s, max_s) if state == "training" else None,
        "success": last.get("rollout/success_at_end"),
        "return_mean": last.get("rollout/return_mean"),
        "validation_loss": last.get("train/validation_loss"),
        "eval": _evaluation(run_dir),
        "waits": shares_of(rows),
        "staleness": {key: last.get(f"async/staleness_{key}") for key in ("mean", "p50", "p90", "max")},
        "ess": last.get("async/ess"),
        "restarts": last.get("async/restarts"),
        "error": journal.get("error"),
        "warning": _last_warning(run_dir),
    }


def _state(noted: str | None, locked: bool) -> str:
    if locked:
        return noted if noted in ALIVE else "starting"
    return "killed" if noted in ALIVE else noted or "unknown"


def _evaluation(run_dir: Path) -> dict[str, Any] | None:
    """Return the last evaluation of the training, by the steps that trained its weights; the final one wins."""
    found = [
        (int(steps), kind == "final", path)
        for path in (run_dir / "eval").glob("*.json")
        for kind, _, steps in [path.stem.partition("_")]
        if kind in ("train", "final") and steps.isdecimal()
    ]
    if not found:
        return None
    steps, final, path = max(found)
    result = read_json(path)
    kept = ("episodes", "success_at_end", "success_at_end_ci95", "return_mean")
    return {"steps": steps, "final": final, **{key: result[key] for key in kept if key in result}}


def shares_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, by part, the share of its time that it spent in each activity over the rows, the largest first."""
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        for key, seconds in row.items():
            kind, _, rest = key.partition("/")
            if kind == "time" and seconds is not None:
                part, _, activity = rest.partition("/")
                spent[part][activity.removesuffix("_s")] += seconds
    return {
        part: {name: s / sum(totals.values()) for name, s in sorted(totals.items(), key=lambda entry: -entry[1])}
        for part, totals in spent.items()
        if sum(totals.values()) > 0
    }


def _last_warning(run_dir: Path) -> str | None:
    try:
        lines = (run_dir / WARNINGS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    begins = [index for index, line in enumerate(lines) if line[:2].isdigit() and line[4:5] == "-"]
    return " ".join(" ".join(lines[begins[-1] :]).split()) if begins else None
