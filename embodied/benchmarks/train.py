"""Training throughput at the default settings, beside what its parts' costs allow.

    train_over_bound    throughput of runtime=local (the default) / bound
    local_over_sync     throughput of runtime=local / runtime=sync, same envs, policy, seed and batches

How the bound is measured. In ``runtime=sync`` the simulator, inference and the learner run one after the other, each
alone on the machine, on the data of real training. Two such runs give the costs of each part, in seconds per env step:

    c   on one thread: what the part needs of a core, its cheapest way to run
    w   on all C cores: the shortest time in which the part can be done

A runtime that overlaps the parts cannot be faster than all cores busy with nothing but them, nor than the slowest part
by itself; one that does not overlap them needs their sum:

    overlapped  = max(sum of c / C, largest w)        alternating = sum of w
    bound       = 1 / min(overlapped, alternating)    env steps per second

Neither time has any room for recording, merging, waiting or locks: that is what the ratio shows. The three runs take
turns, each starts afresh from the same seed, and its first iterations, while pipelines fill, do not count.
Evaluation during training is off, since it is no part of the work that is compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from embodied import experiment
from embodied.benchmarks.measure import Report, note, paired
from embodied.runtime import threads
from embodied.runtime.build import resolve_device
from embodied.train import build

PARTS = ("sim", "infer", "learn")
ONE_THREAD = {"runtime.sim_threads": 1, "runtime.actor_threads": 1, "runtime.learner_threads": 1}
RUNS: dict[str, dict[str, Any]] = {
    "local": {"runtime": "local"},
    "sync": {"runtime": "sync"},
    "one_thread": {"runtime": "sync", **ONE_THREAD},
}
DEFINITION = (
    "1 / min(max(sum of one-thread costs / cores, largest all-cores cost), sum of all-cores costs); "
    "costs of simulator, inference and learner, each alone on the machine within runtime=sync"
)
SHORT: dict[str, Any] = {"num_envs": 8, "runtime.decisions": 2, "algo.epochs": 1}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: iterations that do not count, iterations that do, rounds."""

    warmup: int = 2
    iterations: int = 3
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Costs:
    """A piece of a run: env steps, wall-clock seconds, and seconds in which each part was busy."""

    env_steps: int
    wall_s: float
    busy_s: dict[str, float]

    @property
    def speed(self) -> float:
        """Env steps per second."""
        return self.env_steps / self.wall_s

    def per_step(self, part: str) -> float:
        """Seconds of a part for one env step."""
        return self.busy_s[part] / self.env_steps


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds per env step that the costs allow, see the module's docstring."""

    overlapped_s: float
    alternating_s: float

    @classmethod
    def of(cls, one_thread: Costs, all_cores: Costs, cores: int) -> Bound:
        work = sum(one_thread.per_step(part) for part in PARTS)
        alone = [all_cores.per_step(part) for part in PARTS]
        return cls(max(work / cores, max(alone)), sum(alone))

    @property
    def speed(self) -> float:
        """Env steps per second."""
        return 1 / min(self.overlapped_s, self.alternating_s)


def measure(short: bool) -> Report:
    """Costs, bound and both runtimes; ``short`` only shows that it works."""
    sizes = Sizes(1, 1, 2) if short else Sizes()
    report = Report("train")
    cores = threads.available_cores()
    rounds: dict[str, list[Costs]] = {name: [] for name in RUNS}
    for number in range(sizes.rounds):
        for name, overrides in RUNS.items():
            costs = run((SHORT if short else {}) | overrides, sizes)
            rounds[name].append(costs)
            note(f"round {number + 1}/{sizes.rounds}: {name:10s} {costs.speed:10,.0f} env steps/s")
    bounds = [Bound.of(one, every, cores) for one, every in zip(rounds["one_thread"], rounds["sync"], strict=True)]

    settings = {name: describe((SHORT if short else {}) | overrides) for name, overrides in RUNS.items()}
    extent = {"iterations": sizes.iterations, "rounds": sizes.rounds}
    for name in RUNS:
        speed = median(costs.speed for costs in rounds[name])
        report.add(f"train_{name}", speed, "env steps/s", **settings[name], **extent)
    for part in PARTS:
        for label, name in (("one_thread", "one_thread"), ("all_cores", "sync")):
            cost_us = 1e6 * median(costs.per_step(part) for costs in rounds[name])
            report.add(f"{part}_alone_{label}", cost_us, "us/env step", **settings[name])
    for label in ("overlapped", "alternating"):
        speed = median(1 / getattr(bound, f"{label}_s") for bound in bounds)
        report.add(f"bound_{label}", speed, "env steps/s", cores=cores)
    local = [costs.speed for costs in rounds["local"]]
    speeds = [bound.speed for bound in bounds]
    report.add("bound", median(speeds), "env steps/s", cores=cores, definition=DEFINITION)
    report.ratio("train_over_bound", paired(local, speeds))
    report.ratio("local_over_sync", paired(local, [costs.speed for costs in rounds["sync"]]))
    return report


def run(overrides: Mapping[str, Any], sizes: Sizes) -> Costs:
    """Train afresh; what the iterations after the warm-up cost."""
    config = experiment.compose_run({**overrides, "runtime.eval_every": 0, "eval_episodes": 0})
    workers = config.runtime_config().num_workers
    busy_s = dict.fromkeys(PARTS, 0.0)
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as runtime:
        began_s, first_step = time.perf_counter(), 0
        for iteration in runtime.iterations():
            if iteration.index > sizes.warmup:
                for part in PARTS:
                    busy_s[part] += iteration.metrics[f"perf/{part}_s"] * (workers if part == "sim" else 1)
            now_s = time.perf_counter()
            if iteration.index == sizes.warmup:
                began_s, first_step = now_s, iteration.env_steps
            if iteration.index == sizes.warmup + sizes.iterations:
                break
        return Costs(iteration.env_steps - first_step, now_s - began_s, busy_s)


def describe(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's numbers depend on: its parts, sizes and threads."""
    config = experiment.compose_run(overrides)
    options = config.runtime_config()
    budget = threads.plan(options, resolve_device(options.device))
    return {
        "task": config.task["name"], "policy": config.policy["name"], "algo": config.algo["name"],
        "runtime": options.name, "max_staleness": options.max_staleness, "num_envs": config.num_envs,
        "decisions": options.decisions, "execute": config.policy.get("execute"), "epochs": config.algo.get("epochs"),
        "num_minibatches": config.algo.get("num_minibatches"), "device": resolve_device(options.device).type,
        "sim_threads": budget.sim, "actor_threads": budget.actor, "learner_threads": budget.learner,
    }  # fmt: skip
