"""Write the page of one run or several as one HTML file, which loads nothing: answers, curves, tables, commands.

All texts of a run are escaped. A cell of a table is text unless it is ``Html``.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

import embodied
from embodied.core.user_files import short_name
from embodied.core.words import word
from embodied.report.curves import METRICS, SUCCESS, Group, Run, group_runs
from embodied.report.progress import count, duration

UPLOT = Path(embodied.__file__).parent / "assets" / "uplot"
CLOCKS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
ROW_CHARTS = {
    "validation loss": "train/validation_loss", "steps per second": "perf/env_steps_per_s",
    "staleness, versions of the weights": "async/staleness_mean",
}  # fmt: skip
RESULTS = ("run", "evaluation", "goal", "episodes", "success", "", "95% interval", "with other noise", "return")
CHECKS = ("run", "checkpoint", "check", "holds", "")
FINAL = "final: after training, on episodes that neither training nor a rule that ended it saw"
HASHES = ("task.robot_sha256", "task.scene_sha256", "task.task_sha256")  # follow from the files
SETTLED = ("seed", "out", "runtime.device", "runtime.groups_per_worker", *HASHES)  # by the run or its machine


class Html(str):
    """Text that is HTML already."""


@dataclass(frozen=True)
class Film:
    """An MP4 of an episode. solved: None if the task reports no success."""

    mp4: bytes
    solved: bool | None
    note: str


def page(runs: Sequence[Run], films: Sequence[Film] = ()) -> str:
    """Return the page. Runs that differ only in the seed are shown as one, with the spread over the seeds."""
    groups = group_runs(runs)
    of = {tuple(short_name(run.config.get(f"{part}.name", "")) for part in ("task", "policy", "algo")) for run in runs}
    title = escape(" · ".join(map(str, of.pop())) if len(of) == 1 else f"{len(runs)} runs")
    heads, charts = "".join(map(heading, runs)), make_charts(groups)
    heads = heads if len(runs) == 1 else f"<details><summary>{len(runs)} runs</summary>{heads}</details>"
    boxes = [f'<div class="box"><h3>{chart["title"]}</h3><div id="{chart["id"]}"></div></div>' for chart in charts]
    body = [
        f"<h1>{title}</h1>", heads, cards(groups), grid(boxes),
        section("Videos", films and grid(map(figure, films), "films"), "episodes of the final evaluation"),
        section("Results", table(RESULTS, [row for run in runs for row in results(run)]), FINAL),
        section("Who waits for whom", table(("run", "part", "time", ""), [row for run in runs for row in waits(run)])),
        section("Certificate", table(CHECKS, [row for run in runs for row in checks(run)])),
        section("Go on", "".join(commands(run, group, run is runs[0]) for group in groups for run in group.runs)),
        section("Configuration", configuration(groups), "what differs from the defaults"),
    ]  # fmt: skip
    files = [UPLOT / name for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE")]
    js, css, licence = (path.read_text(encoding="utf-8") for path in files)
    return Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")).substitute(
        title=title, body="\n".join(body), charts=json.dumps(charts).replace("<", "\\u003c"),
        uplot_js=js, uplot_css=css, licence=licence,
    )  # fmt: skip


def unit_of(run: Run) -> str:
    """Return what a training counts: control steps, or the updates of a supervised one."""
    return "steps" if run.status["validation_loss"] is None else "updates"


def heading(run: Run) -> str:
    found, device = run.status, run.config.get("runtime.device")
    parts = [found["run"], f"seed {run.config.get('seed')}", found["state"]]
    parts += [f"{count(found['steps'])} {unit_of(run)}", duration(found["wall_s"])] if run.rows else []
    parts.append(f"runtime {found['runtime']} on {device}")
    trouble = [text for text in (found["error"], found["warning"], *run.faults, run.doubt) if text]
    trouble += ["a check of the certificate fails"] if run.certificate.get("passed") is False else []
    lines = [f'<p class="bad">{escape(line)}</p>' for line in trouble]
    return f'<p class="quiet">{escape(" · ".join(parts))}</p>{"".join(lines)}'


def section(title: str, content: object, note: str = "") -> str:
    """Return a section; nothing without content."""
    head = f'<h2 id="{title.split()[0].lower()}">{title}</h2><p class="quiet">{note}</p>'
    return f'{head}<div class="box scroll">{content}</div>' if content else ""


def grid(boxes: Iterable[str], kind: str = "") -> str:
    return f'<div class="grid {kind}">{"".join(boxes)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table, or nothing without rows. Cells that are None are empty."""
    cells = [[x if isinstance(x, Html) else escape("" if x is None else str(x)) for x in row] for row in (head, *rows)]
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in cells]
    return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>" if rows else ""


def bar(shares: Iterable[float]) -> Html:
    parts = [f'<i style="width:{100 * share:.1f}%"></i>' for share in shares]
    return Html(f'<div class="bar">{"".join(parts)}</div>')


# -- answers of the first screen ---------------------------------------------------------------------------------------


def cards(groups: Sequence[Group]) -> str:
    """Return four questions, each with an answer for each group; without notes if these are many."""
    found: dict[str, str] = {}
    for group in groups:
        label = f'<b style="color:var(--c{group.colour})">{escape(group.label)}</b>' if len(groups) > 1 else ""
        for question, (kind, strong, note) in answers(group).items():
            text = f'{label}<strong class="{kind}">{escape(strong)}</strong>'
            text += f'<p class="quiet">{note}</p>' if len(groups) <= 2 else ""
            found[question] = found.get(question, "") + text
    return grid((f"<div><h3>{question}</h3>{text}</div>" for question, text in found.items()), "cards")


def answers(group: Group) -> dict[str, tuple[str, str, str]]:
    """Return by question a class of style, a short text and a note in HTML."""

    def written(value: float) -> str:
        return f"{value:.1%}" if group.metric == SUCCESS else f"{value:.4g}"

    value, interval, kind = group.result() or (None, None, "there is no evaluation yet")
    word, name = verdict(group), METRICS[group.metric]
    first = [e for run in group.runs for e in run.evaluations[:1] if group.metric in e]
    since = "" if group.final else "; of the last evaluation during training, not of a final one"
    if first:
        since = f"; {written(fmean(e[group.metric] for e in first))} after {count(first[0]['steps'])} steps{since}"
    if value is None:
        learned = ("", "Not known", kind)
    elif group.metric != SUCCESS:
        learned = ("", written(value), f"{name} at the end{since}; the task reports no success")
    else:
        style = {"yes": "good", "no": "bad"}.get(word, "")
        learned = (style, f"{word.capitalize()}: {written(value)}", f"of the episodes end with success{since}")
    steps, wall_s = (fmean(run.status[key] for run in group.runs) for key in ("steps", "wall_s"))
    unit = unit_of(group.runs[0])
    whole = f"{duration(wall_s)} and {count(steps)} {unit} in all, {count(steps / max(wall_s, 1e-9))} {unit}/s"
    slow = "no evaluation during training showed 90% success; " if group.metric == SUCCESS else ""
    fast, reached = ("", f"{duration(wall_s)} in all", f"{slow}{whole}"), group.reached(0.9)
    if not all(run.rows for run in group.runs):
        fast = ("", "Not known", "there are no metrics")
    elif reached is not None:
        fast = ("", f"{duration(reached[1])} to 90%", f"success, after {count(reached[0])} steps; {whole}")
    run = next((run for run in group.runs if run.status["state"] != "finished"), group.runs[0])
    if run.status["state"] in ("starting", "training", "evaluating"):
        choice, why = "Watch", "it still trains"
    elif run.status["state"] == "finished" and unit == "updates":
        choice, why = "Reinforcement learning", "from the policy of this run"
    elif run.status["state"] != "finished" or (group.metric == SUCCESS and word != "yes"):
        choice = "Go on"
        why = "more steps may help" if run.status["state"] == "finished" else "training was cut short"
    else:
        choice, why = ("More seeds", "do others end alike?") if len(group.runs) == 1 else ("Export", "for a robot")
    command = escape(next_commands(run, group)[choice])
    return {
        "Did it learn?": learned,
        "How sure?": ("", " to ".join(map(written, interval)) if interval else "Not known", kind),
        "How fast?": fast,
        "What next?": ("", choice, f'{why} <a href="#go">All commands</a><br><code>{command}</code>'),
    }


def verdict(group: Group) -> str:
    """Return yes if the interval is above 50%, no if it is below 5%, partly if it is above that of the beginning."""
    value, interval, _ = group.result() or (0.0, None, "")
    low, high = interval or (value, value)
    first = [e.get(f"{SUCCESS}_ci95", (0, 1))[1] for run in group.runs for e in run.evaluations[:1]]
    return "yes" if low > 0.5 else "no" if high < 0.05 else "partly" if first and low > max(first) else "not shown"


# -- tables ------------------------------------------------------------------------------------------------------------


def results(run: Run) -> Iterator[list[Any]]:
    """Yield rows of evaluations, each followed by those of its splits and goals."""
    for name, found in run.results.items():
        splits = found.get("splits", {})
        parts = [(name, "", found), *((split, "", rates) for split, rates in splits.items())]
        parts += [(split, *goal) for split, rates in splits.items() for goal in rates.get("goals", {}).items()]
        for part, goal, rates in parts:
            value, interval = rates.get(SUCCESS), rates.get(f"{SUCCESS}_ci95")
            shown = ("", "") if value is None else (f"{value:.1%}", bar([value]))
            other = rates.get("other_noise", {})
            yield [
                run.status["run"], part, goal, rates["episodes"], *shown,
                interval and f"{interval[0]:.1%} to {interval[1]:.1%}",
                f"{other[SUCCESS]:.1%} ({other['noise']})" if SUCCESS in other else "", rates.get("return_mean"),
            ]  # fmt: skip


def waits(run: Run) -> Iterator[list[Any]]:
    for part, shares in run.waits.items():
        text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        yield [run.status["run"], part.replace("_", " "), bar(shares.values()), text.replace("_", " ")]


def checks(run: Run) -> Iterator[list[Any]]:
    """Yield rows of the checks of a certificate, after one that says why it is not of the last checkpoint."""
    if run.doubt:
        yield [run.status["run"], None, "is of the last checkpoint", Html('<b class="bad">no</b>'), run.doubt]
    for name, check in run.certificate.get("checks", {}).items():
        word, kind = {True: ("yes", "good"), False: ("no", "bad"), None: ("open", "quiet")}[check["passed"]]
        word, kind = ("outdated", "quiet") if run.doubt else (word, kind)
        holds, value = Html(f'<b class="{kind}">{word}</b>'), check.get("value")
        reason = f"{'' if value is None else f'{value:.3g} '}{check['reason']}"
        yield [run.status["run"], run.certificate.get("checkpoint"), name.replace("_", " "), holds, reason]


def figure(film: Film) -> str:
    kind, word = {True: ("good", "success"), False: ("bad", "failure"), None: ("", "")}[film.solved]
    source = f"data:video/mp4;base64,{base64.b64encode(film.mp4).decode()}"
    caption = f'<b class="{kind}">{word}</b> {escape(film.note)}'
    video = f'<video controls muted loop playsinline src="{source}"></video>'
    return f"<figure>{video}<figcaption>{caption}</figcaption></figure>"


def configuration(groups: Sequence[Group]) -> str:
    """Return what differs from the defaults in any group, with a column for each, and all values of the first."""
    first = [group.runs[0] for group in groups]
    defaults = {key: value for run in first for key, value in run.defaults.items() if key not in SETTLED}
    rows = [[key, value, *(run.config.get(key) for run in first)] for key, value in sorted(defaults.items())]
    names = [group.label for group in groups] if len(groups) > 1 else ["here"]
    whole = escape("\n".join(f"{key}: {value}" for key, value in first[0].config.items()))
    every = f"<details><summary>all values of {escape(groups[0].label)}</summary><pre>{whole}</pre></details>"
    return (table(("key", "default", *names), rows) or "<p>nothing</p>") + every


# -- commands ----------------------------------------------------------------------------------------------------------


def next_commands(run: Run, group: Group) -> dict[str, str]:
    """Return commands to go on with by what they do. A run that was cut short goes on to its limits, others beyond."""
    path, config, seed = run.status["run"], run.config, max(run.config.get("seed", 0) for run in group.runs)
    longest = "total_steps" if unit_of(run) == "steps" else "algo.updates"
    longer = {longest: 2 * (run.status["total_steps"] or run.status["steps"])}
    longer |= {key: None for key in ("max_minutes", "stop_at_success") if config.get(key) is not None}
    chosen = {key: value for key, value in config.items() if key in run.defaults and key not in SETTLED}
    again = {key.removesuffix(".name"): value for key, value in ({"task": config.get("task.name")} | chosen).items()}
    commands = {
        "Evaluate": ("eval", {"run": path, "episodes": 1000}),
        "Go on": ("train", {"resume": path, **(longer if run.status["state"] == "finished" else {})}),
        "More seeds": ("train", again),
        "Add videos to this page": ("report", {"run": path}),
        "Film other episodes": ("eval", {"run": path, "seed": seed + 1, "video": True}),
        "Export": ("export", {"run": path, "out": f"bundles/{Path(path).name}"}),
        "Certify": ("audit", {"run": path}),
        "Watch": ("status", {"run": path}),
    }
    if longest != "total_steps":
        words = {"task": again["task"], "policy": config["policy.name"], "init": path}
        commands = {"Reinforcement learning": ("train", words), **commands}
    found = {
        name: " ".join((f"python -m embodied.{command}", *(word(key, value) for key, value in words.items())))
        for name, (command, words) in commands.items()
    }
    return found | {"More seeds": f"{found['More seeds']} seed={seed + 1},{seed + 2}"}


def commands(run: Run, group: Group, shown: bool) -> str:
    found = "".join(f"<p>{name}</p><pre>{escape(line)}</pre>" for name, line in next_commands(run, group).items())
    return f"<details {'open' if shown else ''}><summary>{escape(run.status['run'])}</summary>{found}</details>"


def make_charts(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the charts for the script in page.html: ids, titles, axes and series."""
    longest = max(run.status["wall_s"] for group in groups for run in group.runs)
    second, clock = next(((s, name) for s, name in CLOCKS if longest >= 3 * s), CLOCKS[-1])
    first, axes, charts = groups[0], {"steps": "steps", "wall_s": clock}, []
    for axis, label in axes.items():
        lines = [line for group in groups for line in group.evaluations(axis)]
        if len(groups) == len(first.runs) == 1:
            lines += first.rows(axis, f"rollout/{first.metric}", "in training", first.scale, thin=True)
        charts.append((f"{METRICS[first.metric]} over {label}", axis, "%" if first.metric == SUCCESS else "", lines))
    for title, key in ROW_CHARTS.items():
        charts.append((title, "wall_s", "", [line for group in groups for line in group.rows("wall_s", key)]))
    for _, axis, _, lines in charts:
        for line in lines if axis == "wall_s" else ():
            line["x"] = [s / second for s in line["x"]]
    return [
        {"id": f"chart{i}", "title": title, "x_label": axes[axis], "unit": unit, "from_zero": i > 2, "series": lines}
        for i, (title, axis, unit, lines) in enumerate(charts)
        if any(len(line["x"]) > 1 for line in lines)
    ]
