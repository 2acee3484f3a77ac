"""Show how a run is doing: ``python -m embodied.status run=<run dir> [once=true]``

  run=<run dir>     the directory that train writes; only its files are read, of a running, a finished or a killed run
  once=true         show the present state and end; that is also what happens if stderr is not a terminal

On a terminal the table is renewed every second until the run ends; Ctrl-C ends the command, not the run. It shows
whether a process trains, progress, rate, time left, success, staleness, restarts, the last error and warning, and for
each part the share of its time in each activity: who waits for whom (docs/architecture.md).

Last line of stdout: {"run", "state", "process", "task", "policy", "algo", "runtime", "iteration", "steps",
"total_steps", "wall_s", "steps_per_s", "progress", "left_s", "success", "return_mean", "validation_loss", "eval",
"waits", "staleness", "ess", "restarts", "error", "warning"}. state is starting, training, evaluating, finished,
interrupted, failed, killed (its process ended without a word), running or unknown (a run of an earlier version).
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from embodied.core.config import nest, parse_overrides
from embodied.core.errors import UserError
from embodied.core.options import config_dataclass, from_mapping
from embodied.report.metrics import METRICS_FILE, read_metrics, steps_of
from embodied.report.progress import count, duration, percent, share_done, time_left
from embodied.session.command import run_command
from embodied.session.files import CONFIG_FILE, STATE_FILE, WARNINGS_FILE, check_run_dir, lock_owner, read_json

REFRESH_S = 1.0
ROWS = 20
"""Rows of metrics.jsonl that rates and shares are means over."""
ALIVE = ("starting", "training", "evaluating", "running")
"""States in which a process works on the run; ``running`` is written by an earlier version."""


@config_dataclass
class StatusConfig:
    """Options of the command; see the top of this file."""

    run: str
    once: bool = False


def status(argv: Sequence[str]) -> dict[str, Any]:
    """Show the state of a run; return it. UserError for a directory that is not that of a run."""
    options = from_mapping(StatusConfig, nest(parse_overrides(argv)))
    run_dir = Path(options.run)
    found = read_status(run_dir)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.once or not console.is_terminal:
        for name, text in lines(found):
            console.print(f"{name}: {text}", markup=False)
        return found
    with suppress(KeyboardInterrupt), Live(table(found), console=console, auto_refresh=False) as live:
        while found["state"] in ALIVE:
            time.sleep(REFRESH_S)
            found = read_status(run_dir)
            live.update(table(found), refresh=True)
    return found


def table(found: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, text in lines(found):
        grid.add_row(f"[bold]{name}[/bold]", text.replace("[", r"\["))
    return grid


def lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of what is known of a run."""
    yield "run", f"{found['run']}: {found['task']}, {found['policy']}, {found['algo']}, runtime {found['runtime']}"
    yield "state", found["state"] + (f", {found['process']}" if found["process"] else "")
    unit = "updates" if found["validation_loss"] is not None else "steps"
    total = "" if found["total_steps"] is None else f" of {count(found['total_steps'])}"
    done = [percent(found["progress"]), f"{count(found['steps'])}{total} {unit}", f"{duration(found['wall_s'])} gone"]
    if found["state"] == "training":
        rate = "?" if found["steps_per_s"] is None else count(found["steps_per_s"])
        done += [f"{rate} {unit}/s", f"{duration(found['left_s'])} left"]
    yield "progress", "  ".join(done)
    if found["validation_loss"] is not None:
        yield "validation loss", f"{found['validation_loss']:.4f}"
    if found["success"] is not None:
        yield "success", f"{percent(found['success'])} of the training episodes that ended lately"
    elif found["return_mean"] is not None:
        yield "return", f"{found['return_mean']:.1f} in the training episodes that ended lately"
    evaluation = found["eval"] or {}
    text = f"return {evaluation['return_mean']:.1f}" if "return_mean" in evaluation else None
    if "success_at_end" in evaluation:
        low, high = evaluation["success_at_end_ci95"]
        text = f"success {evaluation['success_at_end']:.1%} ({low:.1%} to {high:.1%})"
    if text is not None:
        when = "at the end" if evaluation["final"] else f"after {count(evaluation['steps'])} steps"
        yield "evaluated", f"{text} in {evaluation['episodes']} episodes, {when}"
    for part, shares in found["waits"].items():
        yield part.replace("_", " "), "  ".join(f"{name} {share:.0%}" for name, share in shares.items())
    staleness = {key: value for key, value in found["staleness"].items() if value is not None}
    if staleness:
        ess = "" if found["ess"] is None else f"  effective sample size {found['ess']:.0%}"
        yield "staleness", "  ".join(f"{key} {value:.3g}" for key, value in staleness.items()) + ess
    if found["restarts"] is not None:
        yield "restarts", f"{found['restarts']:.0f}"
    for key in ("error", "warning"):
        if found[key] is not None:
            yield key, found[key]


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the result of the command. UserError if the directory is not that of a run. Imports no torch.

    progress: fraction of the steps or minutes. waits: by part, the fraction of its time in each activity (``time/*``).
    None: not known.
    """
    check_run_dir(run_dir)
    try:
        config = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {run_dir / CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("task"), dict):
        raise UserError(f"{run_dir / CONFIG_FILE} is not the configuration of a run")
    journal, locked_by = read_json(run_dir / STATE_FILE), lock_owner(run_dir)
    state = _state(run_dir, journal.get("state"), locked_by is not None)
    rows = read_metrics(run_dir / METRICS_FILE, ROWS)
    last: Mapping[str, Any] = rows[-1] if rows else {}
    planned = config.get("algo", {}).get("updates", config.get("total_steps"))  # of runs of earlier versions
    steps, total, wall_s = steps_of(last), journal.get("total_steps", planned), last.get("wall_s", 0.0)
    seconds = wall_s - rows[0]["wall_s"] if rows else 0.0
    rate = (steps - steps_of(rows[0])) / seconds if seconds > 0 else None
    minutes = config.get("max_minutes")
    max_s = 60 * minutes if minutes else None
    return {
        "run": str(run_dir),
        "state": state,
        "process": locked_by or (f"process {journal['process']} on {journal['machine']}" if journal else None),
        **{key: config.get(key, {}).get("name") for key in ("task", "policy", "algo", "runtime")},
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
        "waits": _shares(rows),
        "staleness": {key: last.get(f"async/staleness_{key}") for key in ("mean", "p50", "p90", "max")},
        "ess": last.get("async/ess"),
        "restarts": last.get("async/restarts"),
        "error": journal.get("error"),
        "warning": _last_warning(run_dir),
    }


def _state(run_dir: Path, noted: str | None, locked: bool) -> str:
    if noted is None:  # a run of an earlier version, without a journal
        done = any((run_dir / "eval").glob("final_*.json"))
        return "running" if locked else "finished" if done else "unknown"
    if locked:
        return noted if noted in ALIVE else "starting"
    return "killed" if noted in ALIVE else noted


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


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
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


main = partial(run_command, status, __doc__, first="run")

if __name__ == "__main__":
    sys.exit(main())
