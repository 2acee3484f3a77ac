"""Measure trained runs on the perturbed simulated arm under latencies, in lock-step and in real time, into one file.

python docs/results/deploy_latency.py <file to write> "<the commands that made the runs>" <run directory> ...
    --episodes 100   episodes of each measurement

Each run is exported, then driven by real-time chunking. Lock-step repeats exactly and shares cores without harm. Real
time needs two idle cores: ``missed_share`` of its result says how many deadlines it missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from collect import cpu  # beside this file
from omegaconf import OmegaConf

COMMON = ("robot=sim", "perturbation=real", "schedule=rtc", "home=false")
CONDITIONS = {
    "90 ms": ("latency_ms=90", "lockstep=true"),
    "101 ms": ("latency_ms=101", "lockstep=true"),
    "120 ms": ("latency_ms=120", "lockstep=true"),
    "100 ms, real time": ("latency_ms=100",),
}
"""Options of ``embodied.deploy`` by measurement."""


def command(name: str, *words: str) -> dict[str, Any]:
    """Run a command of the platform; return its result. CalledProcessError if it fails."""
    done = subprocess.run([sys.executable, "-m", f"embodied.{name}", *words], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured(run: Path, episodes: int) -> dict[str, Any]:
    """Export a run and return its seed and what each measurement showed."""
    found: dict[str, Any] = {"run": f"runs/{run.name}", "seed": OmegaConf.load(run / "config.yaml").seed}
    with TemporaryDirectory() as folder:
        bundle = f"{folder}/bundle"
        found |= {"parity_max": command("export", f"run={run}", f"out={bundle}")["parity_max"], "results": {}}
        for name, options in CONDITIONS.items():
            words = (*COMMON, f"episodes={episodes}", *options)
            result = command("deploy", f"bundle={bundle}", *words)
            said = {"command": " ".join(["python -m embodied.deploy bundle=<bundle>", *words])}
            found["results"][name] = said | {key: value for key, value in result.items() if key != "bundle"}
            print(f"{run}, {name}: success {result['success_at_end']:.1%}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("runs_of")
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--episodes", type=int, default=100)
    words = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    record = {
        "command": f'python docs/results/deploy_latency.py {words.file} "<runs_of>" '
        + " ".join(f"runs/{run.name}" for run in words.run),
        "runs_of": words.runs_of,
        "commit": commit,
        "machine": {"cpu": cpu(), "python": platform.python_version()},
        "runs": [],
    }
    for run in words.run:
        record["runs"].append(measured(run, words.episodes))
        text = json.dumps(record, indent=1) + "\n"
        words.file.write_text(text, encoding="utf-8")  # what is there survives a later failure


if __name__ == "__main__":
    main()
