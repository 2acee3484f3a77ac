"""The report of a deployment: a self-contained HTML page, its numbers as JSON, and all interventions. numpy only."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from embodied.deployment.report.record import Deployment, EpisodeRecord

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
        success = f"{result['success_at_end']:.1%} (95% interval {low:.1%} to {high:.1%})"
    numbers = {
        "Success at the end": success,
        "Episodes": result["episodes"],
        "Failed episodes": ", ".join(map(str, result["failed_episodes"])) or "none",
        **({"Ended early by": deployment.error} if deployment.error else {}),
        "Began": deployment.date,
        "Bundle": deployment.bundle_path,
        "SHA-256 of the policy": result["policy_sha256"],
        "Achieved rate": f"{result['rate_hz']} Hz",
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
        _tracking(last, [joint.name for joint in bundle.arm.joints]),
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
        legend.append(f'<text x="{10 + i * 90}" y="278" fill="{colour}">{html.escape(name)}</text>')
    scale = f"rad (m for a slide) from the first position, {low:+.2f} to {high:+.2f}; {record.steps[-1].time_s:.1f} s"
    note = f"<p>Solid: measured, dashed: commanded; {scale}.</p>"
    return f'{note}<svg width="800" height="284" font-size="12">{"".join(lines)}{"".join(legend)}</svg>'
