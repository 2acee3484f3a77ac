"""Replay an evaluation under other instruction sets, which stand in for other machines; count what differs.

python -m embodied.eval run=<run dir> episodes=1000
python docs/results/replay_instruction_sets.py <out.json> <run dir>/eval/<name>.json ...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from embodied.report.metrics import write_json

SETTINGS = (
    {}, {"ATEN_CPU_CAPABILITY": "avx2"}, {"ATEN_CPU_CAPABILITY": "default"}, {"OPENBLAS_CORETYPE": "Haswell"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
)  # fmt: skip
"""Environment variables of torch, numpy and MKL."""


def replayed(path: Path, setting: dict[str, str]) -> dict[str, Any]:
    words = [sys.executable, "-m", "embodied.replay", f"eval={path}", "num_threads=1"]
    done = subprocess.run(words, env=os.environ | setting, stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    flips = [row for row in found["differing"] if "success_at_end" in row["was"]]
    returns = [abs(row["was"]["return"] - row["is"]["return"]) for row in found["differing"] if "return" in row["was"]]
    return {
        "setting": setting, "episodes": found["episodes"], "differing": len(found["differing"]),
        "solved_only_before": sum(row["was"]["success_at_end"] for row in flips),
        "solved_only_now": sum(row["is"]["success_at_end"] for row in flips),
        "largest_difference_of_return": max(returns, default=0.0),
        "made_with": found["made_with"], "replayed_with": found["replayed_with"],
    }  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    evaluations = []
    for path in map(Path, sys.argv[2:]):
        result = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: result[key] for key in ("task", "success_at_end", "success_at_end_ci95", "seed", "noise")}
        rows = [replayed(path, setting) for setting in SETTINGS]
        evaluations.append(kept | {"replays": rows})
        print(json.dumps(evaluations[-1], indent=1), flush=True)
    write_json(Path(sys.argv[1]), {"evaluations": evaluations})
