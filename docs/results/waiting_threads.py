"""How long should a thread of torch wait for the others before it yields its core? Training steps/s by the answer.

python docs/results/waiting_threads.py <file to write>

Each row is a training of its own process, in turns, on idle cores and beside one busy program (busy=1). ``unset`` is
OpenMP's own answer. Medians over the rounds; ``of_rounds`` has all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from embodied.benchmarks.measure import Report, in_turns
from embodied.report.metrics import write_json

TRAIN = """
import json, sys
from embodied.benchmarks.train import QUIET, run
from embodied.session.config import compose_run
print(1 / run(compose_run(QUIET | json.loads(sys.argv[1])), 3, 10).total_s)
"""
TRAININGS = {
    "default": {"task": "pick_place"},
    "sync": {"task": "pick_place", "runtime": "sync"},
    "hopper": {"task": "envpool/Hopper-v5"},
}
SPINS = {"unset": {"OMP_WAIT_POLICY": ""}, "1000": {"GOMP_SPINCOUNT": "1000"}, "10000": {"GOMP_SPINCOUNT": "10000"}}
ROUNDS = 3


def steps_per_s(words: dict[str, str], spin: dict[str, str]) -> float:
    """Train a little; return the throughput."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(words)], env=kept | spin, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    report = Report("threads that wait")
    for busy in (0, 1):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            for name, words in TRAININGS.items():
                measures = {spin: lambda words=words, spin=spin: steps_per_s(words, SPINS[spin]) for spin in SPINS}
                for spin, values in in_turns(measures, ROUNDS, warm_up=0).items():
                    of_rounds = [round(value) for value in values]
                    report.add(f"{name}/{spin}", median(values), "steps/s", busy=busy, of_rounds=of_rounds)
        finally:
            for other in others:
                other.kill()
    write_json(Path(sys.argv[1]), report.to_mapping())


if __name__ == "__main__":
    main()
