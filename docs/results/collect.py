"""Keep what a finished run showed: its command, configuration, curve and evaluations, as one JSON file.

python docs/results/collect.py <run directory> <file to write> "<the command that made the run>"
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

from omegaconf import OmegaConf

CURVE = ("env_steps", "wall_s", "rollout/return_mean", "rollout/success_at_end", "train/approx_kl", "train/entropy",
         "perf/env_steps_per_s", "perf/sim_s", "perf/infer_s", "perf/learn_s", "perf/wait_s", "async/staleness_mean",
         "async/ess", "train/imitation_loss", "train/grounding_loss", "train/validation_loss", "eval/found/front",
         "eval/found/wrist", "eval/error_cm/near", "eval/error_cm/far")  # fmt: skip


def collect(run: Path, command: str) -> dict[str, object]:
    """The record of a run directory that has been trained to its end."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [*rows[:: max(1, len(rows) // 100)], rows[-1]]
    evaluations = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((run / "eval").glob("*.json"))
    }
    config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    for key, folder in {"init": "runs", "data": "demos", "out": "runs"}.items():
        if config[key] and Path(config[key]).is_absolute():  # a directory of one machine
            config[key] = f"{folder}/{Path(config[key]).name}"
    return {
        "command": command,
        "machine": {"cpu": cpu(), "python": platform.python_version()},
        "wall_s": rows[-1]["wall_s"],
        "env_steps": rows[-1].get("env_steps", 0),  # 0: imitation
        "iterations": rows[-1]["iteration"],
        "final": evaluations.get(f"final_{rows[-1].get('env_steps', rows[-1]['iteration'])}"),
        "during_training": {name: value for name, value in evaluations.items() if name.startswith("train")},
        "curve": {key: [row_value(row, key) for row in kept] for key in CURVE if key in rows[-1]},
        "config": config,
    }


def row_value(row: dict[str, float], key: str) -> float | None:
    return None if row.get(key) is None else round(row[key], 5)


def cpu() -> str:
    """Model and number of the processors."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}"


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    Path(sys.argv[2]).write_text(json.dumps(collect(Path(sys.argv[1]), sys.argv[3]), indent=1) + "\n", encoding="utf-8")
