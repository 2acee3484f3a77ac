"""How much faster is an update of PPO whose loss torch compiles, and how long does that take?

python docs/results/compiled_update.py <file to write>

The default command, a Gaussian policy of 256 x 256, and vla_tiny after imitation, on decisions of random observations
that are repeated. One thread. Ratios are medians over rounds in turns, so they are valid beside other programs.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from embodied.algos.ppo import PPO
from embodied.benchmarks.gpu import random_fragment
from embodied.benchmarks.measure import Report, in_turns, paired, timed
from embodied.core.types import Fragment
from embodied.report.metrics import write_json
from embodied.runtime import threads
from embodied.session.config import compose_run
from embodied.session.factories import make_policy, make_spec

ROUNDS = 9
CASES: dict[str, dict[str, Any]] = {
    "default": {"task": "pick_place"},
    "gaussian": {
        "task": "lift", "policy": "gaussian", "policy.actor_hidden": [256, 256], "policy.critic_hidden": [256, 256],
        "num_envs": 64, "runtime.decisions": 64, "algo.num_minibatches": 4, "algo.epochs": 5,
    },
    "vla_tiny": {
        "task": "tabletop", "policy": "vla_tiny", "policy.horizon": 4, "policy.execute": 4, "runtime.decisions": 8,
        "init": "a run of imitation", "algo.critic_warmup": 0,
    },
}  # fmt: skip


def make(words: dict[str, Any], compiled: bool) -> tuple[PPO, Fragment]:
    """Build the algorithm of a run, and a fragment with as many decisions as its updates have."""
    config = compose_run(words)
    torch.manual_seed(0)
    policy = make_policy(config, make_spec(config)).eval()
    fragment = random_fragment(policy, config.runtime.decisions, config.num_envs, torch.device("cpu"))
    algorithm = PPO(policy, config.algo.options, seed=0, device=torch.device("cpu"))
    if compiled:
        algorithm.loss = torch.compile(algorithm.loss)  # type: ignore[method-assign]
    return algorithm, fragment


def measure() -> Report:
    report = Report("compiled updates")
    for name, words in CASES.items():
        made = {kind: make(words, kind == "compiled") for kind in ("plain", "compiled")}
        updates = {kind: partial(timed, partial(algo.update, [part], 0)) for kind, (algo, part) in made.items()}
        first_s = updates["compiled"]()
        seconds = in_turns(updates, ROUNDS)
        for kind, values in seconds.items():
            report.add(f"{name}_{kind}", 1e3 * median(values), "ms", rounds=ROUNDS, threads=1)
        report.add(f"{name}_compiles", first_s, "s")
        report.ratio(f"{name}_compiled_over_plain", paired(seconds["compiled"], seconds["plain"]))
    return report


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    threads.use(1)
    write_json(Path(sys.argv[1]), measure().to_mapping())
