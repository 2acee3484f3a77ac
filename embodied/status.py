"""Show how a run is doing: ``python -m embodied.status run=<run dir> [once=true]``

  run=<run dir>     the directory that train writes; only its files are read, of a running, a finished or a killed run
  once=true         show the present state and end; that is also what happens if stderr is not a terminal

On a terminal the table is renewed every second until the run ends; Ctrl-C ends the command, not the run. It shows
whether a process trains, progress, rate, time left, success, staleness, restarts, the last error and warning, and for
each part the share of its time in each activity: who waits for whom (docs/architecture.md).

Last line of stdout: {"run", "state", "process", "task", "policy", "algo", "runtime", "iteration", "steps",
"total_steps", "wall_s", "steps_per_s", "progress", "left_s", "success", "return_mean", "validation_loss", "eval",
"waits", "staleness", "ess", "restarts", "error", "warning"}. state is starting, training, evaluating, finished,
interrupted, failed, killed (its process ended without a word) or unknown (there is no state.json).
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from embodied.core.options import config_dataclass
from embodied.report.progress import count, duration, percent
from embodied.session.command import command
from embodied.session.results.state import ALIVE, read_status

REFRESH_S = 1.0


@config_dataclass
class StatusConfig:
    run: str
    once: bool = False


@command(first="run")
def main(options: StatusConfig) -> dict[str, Any]:
    """Show the state of a run; return it. UserError for a directory that is not that of a run."""
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


if __name__ == "__main__":
    sys.exit(main())
