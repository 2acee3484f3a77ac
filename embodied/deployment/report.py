"""The report of a deployment: records of control steps and episodes, files of episodes, result, interventions, page.

embodied.deploy report=<dir> ──► episodes/<n>.npz ── embodied.convert bundle=<dir> ──► LeRobotDataset
"""

import html
import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.spec import joints_of
from embodied.core.statistics import wilson_interval
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import load_arrays
from embodied.deployment.control.safety import Intervention

Array = NDArray[np.float64]
EPISODES = "episodes"  # folder of the files of episodes in that of a report
PAGE = "report.html"
RESULT = "result.json"
INTERVENTIONS = "interventions.jsonl"
SHOWN = 50  # interventions on the page
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
STYLE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Deployment report</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
td { padding: .2em 1.5em .2em 0; border-bottom: 1px solid #eee; vertical-align: top; }
svg { background: #fafafa; } video { max-width: 100%; }
</style></head><body>
"""


@dataclass
class Step:
    """One control step whose first command has left for the robot."""

    time_s: float
    """Time since the beginning of the episode."""
    state: NDArray[np.float32]
    images: dict[str, NDArray[np.uint8]]
    action: NDArray[np.float32]
    """State [S] and action [A] in physical units, and images by camera."""
    qpos: Array
    target: Array
    """Measured joint positions, and the joint targets that left for the robot last, [J]."""


@dataclass
class EpisodeRecord:
    """What happened in an episode."""

    instruction: str = ""
    """What was to be done; empty if the task has no words."""
    reason: str = ""
    """Why it ended: ``time limit``, ``stopped``, ``refused``, ``interrupted`` or an error."""
    success: bool | None = None
    """Whether the task was solved at the end; None if nobody said so."""
    duration_s: float = 0.0
    ticks: int = 0
    missed_deadlines: int = 0
    """Ticks that were carried out, and that were dropped."""
    waited_ticks: int = 0
    """Ticks in which the robot held its targets, for want of a chunk or of a measurement that can be used."""
    padded_steps: int = 0
    """Control steps for which no chunk had an action."""
    beyond_max_delay: int = 0
    """Chunks that took longer than the policy was trained for."""
    latencies_s: list[float] = field(default_factory=list)
    interventions: dict[str, int] = field(default_factory=dict)
    """Latency of each inference, and the number of the safety's interventions by kind."""
    steps: list[Step] = field(default_factory=list)
    """Control steps, each appended at once, so that an episode may end at any moment."""

    def stack(self, name: str) -> NDArray[Any]:
        """Return a field of all control steps, [steps, ...]."""
        return np.stack([getattr(step, name) for step in self.steps])

    @property
    def control_steps_hz(self) -> float:
        """Achieved rate of the control steps."""
        return len(self.steps) / self.duration_s if self.duration_s > 0 else 0.0


@dataclass
class Deployment:
    """Records of all episodes of a deployment."""

    bundle: Bundle
    bundle_path: str
    """Description of the policy, and its directory."""
    robot: str
    records: list[EpisodeRecord] = field(default_factory=list)
    log: deque[Intervention] = field(default_factory=deque)
    """What happened, by episode, and all interventions of the safety."""
    error: str | None = None
    """What ended the deployment before its time: the first cause."""
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))

    def result(self) -> dict[str, Any]:
        """Return the result of the command ``deploy``."""
        records = self.records
        latencies_ms = 1e3 * np.array([latency for record in records for latency in record.latencies_s])
        quantiles = {"p50": 50, "p90": 90, "p99": 99, "max": 100} if latencies_ms.size else {}
        latency_ms = {name: round(float(np.percentile(latencies_ms, q)), 3) for name, q in quantiles.items()}
        interventions = sum((Counter(record.interventions) for record in records), Counter[str]())
        duration_s, ticks = (sum(getattr(record, name) for record in records) for name in ("duration_s", "ticks"))
        missed, steps = sum(record.missed_deadlines for record in records), sum(len(record.steps) for record in records)
        moved = [record for record in records if len(record.steps) > 1]
        errors = [np.abs(record.stack("qpos")[1:] - record.stack("target")[:-1]) for record in moved]
        judged = [record.success for record in records if record.success is not None]
        return {
            "bundle": self.bundle_path, "policy_sha256": self.bundle.digest, "robot": self.robot, "date": self.date,
            "error": self.error, "episodes": len(records),
            "failed_episodes": [index + 1 for index, record in enumerate(records) if record.success is False],
            "judged_episodes": len(judged),
            "success_at_end": sum(judged) / len(judged) if judged else None,
            "success_at_end_ci95": [*wilson_interval(sum(judged), len(judged))] if judged else None,
            "rate_hz": round(ticks / duration_s, 3) if duration_s else None,
            "control_steps_hz": round(steps / duration_s, 3) if duration_s else None,
            "waited_ticks": sum(record.waited_ticks for record in records),
            "missed_deadlines": missed, "missed_share": round(missed / max(1, ticks + missed), 5),
            "latency_ms_p99": latency_ms.get("p99"), "latency_ms": latency_ms,
            "interventions": sum(interventions.values()), "interventions_by_kind": dict(interventions),
            "tracking_error_rad": round(float(np.concatenate(errors).mean()), 5) if errors else None,
            "padded_steps": sum(record.padded_steps for record in records),
            "beyond_max_delay": sum(record.beyond_max_delay for record in records),
            "ended": dict(Counter(record.reason for record in records)),
        }  # fmt: skip


def save_episode(folder: Path, record: EpisodeRecord, index: int) -> None:
    """Write an episode at once, if it has a control step.

    Arrays by control step: time (s), state, action (physical units), qpos and target (rad, m), images. Beside them
    instruction, success (False if nobody said so) and the reason of its end.
    """
    if not record.steps:
        return
    arrays: dict[str, Any] = {name: record.stack(name) for name in ("time_s", "state", "action", "qpos", "target")}
    arrays |= {"success": bool(record.success), "instruction": record.instruction, "reason": record.reason}
    for camera in record.steps[0].images:
        arrays[f"images.{camera}"] = np.stack([step.images[camera] for step in record.steps])
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{index:04d}.part"
    with part.open("wb") as file:
        np.savez_compressed(file, **{f"{index}/{name}": value for name, value in arrays.items()})
    part.replace(part.with_suffix(".npz"))


def load_episodes(source: Path, bundle: Bundle) -> list[EpisodeRecord]:
    """Read episodes that ``save_episode`` wrote, from a folder or file. UserError for others, or of another policy."""
    try:
        paths = sorted(source.glob("*.npz")) if source.is_dir() else [source]
        if not paths:
            raise UserError("it has no .npz file")
        found = []
        for arrays in map(load_arrays, paths):
            for index in sorted({int(name.partition("/")[0]) for name in arrays}):
                of_one = {name.partition("/")[2]: x for name, x in arrays.items() if name.startswith(f"{index}/")}
                found.append(_record(of_one, bundle))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"source={source} has no {EPISODES} of a report: {error}") from error
    return found


def _record(arrays: dict[str, Any], bundle: Bundle) -> EpisodeRecord:
    """Return an episode from its arrays. UserError if their shapes are not those of the bundle's policy."""
    time_s, state, action, none = arrays["time_s"], arrays["state"], arrays["action"], np.zeros(0)
    count = len(time_s)
    images = {camera.name: arrays[f"images.{camera.name}"] for camera in bundle.cameras}
    sizes = [(camera.height, camera.width, 3) for camera in bundle.cameras]
    shapes = [value.shape for value in (state, action, *images.values())]
    if shapes != [(count, *size) for size in ((bundle.state_dim,), (bundle.action_dim,), *sizes)]:
        raise UserError(f"states, actions and images of shape {shapes} are of another policy than the bundle's")
    seen = [{name: value[i] for name, value in images.items()} for i in range(count)]
    steps = [Step(time_s[i], state[i], seen[i], action[i], none, none) for i in range(count)]
    return EpisodeRecord(str(arrays["instruction"]), success=bool(arrays["success"]), steps=steps)


def write_report(deployment: Deployment, path: Path, options: Mapping[str, Any], video: str | None = None) -> None:
    """Write page, result and all interventions into a directory, each at once."""
    result = deployment.result()
    texts = {
        RESULT: json.dumps(result | {"options": dict(options)}, indent=1) + "\n",
        INTERVENTIONS: "".join(json.dumps(asdict(entry)) + "\n" for entry in deployment.log),
        PAGE: _page(deployment, result, options, video),
    }
    for name, text in texts.items():
        part = path / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(path / name)


def _page(deployment: Deployment, result: Mapping[str, Any], options: Mapping[str, Any], video: str | None) -> str:
    bundle, log, success = deployment.bundle, deployment.log, "not judged"
    if result["success_at_end"] is not None:
        low, high = result["success_at_end_ci95"]
        of = f"of {result['judged_episodes']} judged episodes"
        success = f"{result['success_at_end']:.1%} {of} (95% interval {low:.1%} to {high:.1%})"
    numbers = {
        "Success at the end": success,
        "Episodes": f"{result['episodes']} of {options['episodes']}",
        "Failed episodes": ", ".join(map(str, result["failed_episodes"])) or "none",
        **({"Ended early by": deployment.error} if deployment.error else {}),
        "Began": deployment.date,
        "Bundle": deployment.bundle_path,
        "SHA-256 of the policy": result["policy_sha256"],
        "Achieved rate": f"{result['rate_hz']} Hz",
        "Control steps": f"{result['control_steps_hz']} of {1 / bundle.control_dt_s:g} Hz",
        "Ticks that waited for a chunk or a measurement": result["waited_ticks"],
        "Missed deadlines": f"{result['missed_deadlines']} ({result['missed_share']:.2%} of the ticks)",
        "Inference latency, ms": ", ".join(f"{name} {value:g}" for name, value in result["latency_ms"].items()),
        "Tracking error, mean": f"{result['tracking_error_rad']} rad",
        "Interventions of the safety in episodes": _counts(result["interventions_by_kind"]) or "none",
        "Steps without an action": result["padded_steps"],
        **({"Chunks that took longer than trained for": result["beyond_max_delay"]} if bundle.max_delay else {}),
        "Episodes ended by": _counts(result["ended"]),
    }
    last = (deployment.records or [EpisodeRecord()])[-1]
    shown = [*log][-SHOWN:]
    left_out = f"<p>The last {SHOWN} of {len(log)}; {INTERVENTIONS} has all.</p>" if len(log) > SHOWN else ""
    parts = [
        STYLE,
        f"<h1>{html.escape(f'{bundle.origin.task}: {bundle.origin.policy} on {deployment.robot}')}</h1>",
        _table(numbers),
        f'<h2>First episode</h2><video controls src="{html.escape(video)}"></video>' if video else "",
        "<h2>Episodes</h2>",
        _table({f"episode {i + 1}": _in_words(record) for i, record in enumerate(deployment.records)}),
        "<h2>Latency of the inferences</h2>",
        _histogram([1e3 * latency for record in deployment.records for latency in record.latencies_s]),
        "<h2>Last episode: commanded and measured joints</h2>",
        _tracking(last, [*joints_of(bundle.arms)]),
        "<h2>Interventions</h2>" + left_out,
        _table({f"{i.during}, {i.time_s:.2f} s, {i.kind}": i.detail for i in shown}) if log else "<p>None.</p>",
        "<h2>Units of states and actions</h2>",
        _table({f"{term.name}[{term.size}]": term.unit or "1" for term in bundle.state}),
        _table({f"action {term.name}": term.unit or "1" for term in bundle.action}),
        "<h2>Options</h2>",
        _table(options),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _table(rows: Mapping[str, Any]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def _in_words(record: EpisodeRecord) -> str:
    solved = {True: "solved", False: "not solved", None: "not judged"}[record.success]
    events = f"; interventions: {_counts(record.interventions)}" if record.interventions else ""
    return f"{solved}; {record.reason}; {len(record.steps)} control steps in {record.duration_s:.1f} s{events}"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in found.items())


def _histogram(values_ms: Sequence[float]) -> str:
    """Return a histogram of numbers from 0 on as SVG."""
    if not values_ms:
        return "<p>No inference.</p>"
    counts, edges = np.histogram(values_ms, bins=40, range=(0.0, max(values_ms) or 1.0))
    heights, width = 140 * counts / counts.max(), 20
    bars = "".join(
        f'<rect x="{i * width}" y="{140 - height:.1f}" width="{width - 1}" height="{height:.1f}" fill="{COLOURS[0]}"/>'
        for i, height in enumerate(heights)
    )
    labels = f'<text y="156">{edges[0]:.3g} ms</text><text x="800" y="156" text-anchor="end">{edges[-1]:.3g} ms</text>'
    return f'<svg width="800" height="162" font-size="12">{bars}{labels}</svg>'


def _tracking(record: EpisodeRecord, names: Sequence[str]) -> str:
    """Return the joints of an episode as SVG: measured as lines, commanded dashed, relative to the first position."""
    count = len(record.steps)
    if count < 2:
        return "<p>No complete control step.</p>"
    moves = np.stack([record.stack("qpos"), record.stack("target")])  # [measured and commanded, steps, J]
    moves = moves - moves[0, 0]
    low, high = moves.min(), moves.max()
    x, y = np.linspace(0, 800, count), 260 - 260 * (moves - low) / max(high - low, 1e-9)
    lines, legend = [], []
    for i, name in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        for values, dash in zip(y[:, :, i], ("", "3 3"), strict=True):
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, values, strict=True))
            lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>')
        place = f'x="{10 + i % 8 * 98}" y="{278 + 14 * (i // 8)}"'
        legend.append(f'<text {place} fill="{colour}">{html.escape(name)}</text>')
    scale = f"rad (m for a slide) from the first position, {low:+.2f} to {high:+.2f}; {record.steps[-1].time_s:.1f} s"
    note = f"<p>Solid: measured, dashed: commanded; {scale}.</p>"
    height = 284 + 14 * ((len(names) - 1) // 8)
    return f'{note}<svg width="800" height="{height}" font-size="12">{"".join(lines)}{"".join(legend)}</svg>'
