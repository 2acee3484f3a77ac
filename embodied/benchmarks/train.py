"""Training throughput at the default settings, compared with the bound that the costs of its parts set.

    train_over_bound    throughput of runtime=local (the default) / bound
    local_over_sync     throughput of runtime=local / runtime=sync, same envs, policy, seed and batches
    ray_over_local      ``bench ray``: throughput of runtime=ray / runtime=local, ``lift`` with 1,024 envs

How the bound is measured. In ``runtime=sync`` the parts run one after the other on the data of real training. That
gives the seconds per env step of simulator, inference and learner with all cores to themselves (alone). Then learning
and collecting (simulator and inference) run side by side with their threads in ``local``. The learner updates again and
again on one batch while the others fill new batches, and neither waits for the other. That gives the seconds per env
step of learning (l) and collecting (c) while they share the cores. A runtime that overlaps them runs both until the
first has finished the batch, and then the other one alone:

    overlapped  = l + (1 - l / c) * alone(collecting)   if l < c, else   c + (1 - c / l) * alone(learning)
    alternating = alone(collecting) + alone(learning)
    bound       = 1 / min(overlapped, alternating)      env steps per second

These times contain no waiting, no channel and no limit on staleness, so the ratio shows the cost of those. (The bound
contains the cost of two threads sharing one interpreter.) The runs take turns. Each starts from the same seed, and its
first iterations, while pipelines fill, do not count. Evaluation during training is off.

The row ``bound_independent_cores`` is a bound for cores that do not slow each other down: max(sum of the parts' costs
on one thread / cores, the largest of their costs on all cores). Cores that share caches or memory never reach it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from embodied.benchmarks.measure import Report, in_turns, note, paired
from embodied.core.device import resolve_device
from embodied.runtime import threads
from embodied.runtime.sync import SyncRuntime
from embodied.session import config as run_config
from embodied.trainers.reinforcement import build

PARTS = ("sim", "infer", "learn")
ONE_THREAD = {"runtime.sim_threads": 1, "runtime.actor_threads": 1, "runtime.learner_threads": 1}
RUNS: dict[str, dict[str, Any]] = {
    "local": {"runtime": "local"},
    "sync": {"runtime": "sync"},
    "one_thread": {"runtime": "sync", **ONE_THREAD},
}
DEFINITION = "see the docstring of embodied/benchmarks/train.py: costs side by side until one part is done, then alone"
RAY: dict[str, Any] = {"task": "lift", "num_envs": 1024, "runtime.max_staleness": 1}
"""Training that is compared on Ray and in threads."""
SHORT: dict[str, Any] = {"num_envs": 8, "runtime.decisions": 2, "algo.epochs": 1}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the benchmark."""

    warmup: int = 2
    """First iterations of a run, which do not count."""
    iterations: int = 4
    """Iterations of a run that count."""
    rounds: int = 11
    """Rounds, each with every run once."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the measured iterations of a run."""

    env_steps: int
    """Control steps of all envs."""
    wall_s: float
    """Wall-clock seconds."""
    busy_s: dict[str, float]
    """Seconds in which each of PARTS was busy."""

    @property
    def speed(self) -> float:
        """Env steps per second."""
        return self.env_steps / self.wall_s

    def per_step(self, part: str) -> float:
        """Return the seconds of a part per env step."""
        return self.busy_s[part] / self.env_steps


@dataclass(frozen=True, slots=True)
class Shared:
    """Seconds per env step of collecting and of learning while both run all the time."""

    collect_s: float
    """Of collecting, c in the module's docstring."""
    learn_s: float
    """Of learning, l in the module's docstring."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds in seconds per env step; see the module's docstring."""

    overlapped_s: float
    """For parts that overlap."""
    alternating_s: float
    """For parts that run one after the other."""
    independent_cores_s: float
    """For parts on cores that do not slow each other down."""

    @classmethod
    def of(cls, one_thread: Costs, all_cores: Costs, shared: Shared, cores: int) -> Bound:
        """Compute the bounds from costs on one thread, on all cores, and side by side."""
        work = sum(one_thread.per_step(part) for part in PARTS)
        alone = [all_cores.per_step(part) for part in PARTS]
        collect, learn = alone[0] + alone[1], alone[2]
        together = min(shared.collect_s, shared.learn_s)
        rest = (1 - together / shared.collect_s) * collect + (1 - together / shared.learn_s) * learn
        return cls(together + rest, sum(alone), max(work / cores, max(alone)))

    @property
    def speed(self) -> float:
        """Env steps per second."""
        return 1 / min(self.overlapped_s, self.alternating_s)


def measure(short: bool) -> Report:
    """Measure costs, bound and both runtimes; ``short`` only shows that it works."""
    sizes = Sizes(1, 1, 2) if short else Sizes()
    report = Report("train")
    cores = threads.available_cores()
    rounds: dict[str, list[Costs]] = {name: [] for name in RUNS}
    shared: list[Shared] = []
    for number in range(sizes.rounds):
        for name, overrides in RUNS.items() if number % 2 else reversed(RUNS.items()):
            costs = run((SHORT if short else {}) | overrides, sizes)
            rounds[name].append(costs)
            note(f"round {number + 1}/{sizes.rounds}: {name:10s} {costs.speed:10,.0f} env steps/s")
        shared.append(side_by_side(SHORT if short else {}, sizes))
    costs_of_rounds = zip(rounds["one_thread"], rounds["sync"], shared, strict=True)
    bounds = [Bound.of(one, every, together, cores) for one, every, together in costs_of_rounds]

    settings = {name: describe((SHORT if short else {}) | overrides) for name, overrides in RUNS.items()}
    extent = {"iterations": sizes.iterations, "rounds": sizes.rounds}
    for name in RUNS:
        speeds = [round(costs.speed) for costs in rounds[name]]
        report.add(f"train_{name}", median(speeds), "env steps/s", **settings[name], **extent, of_rounds=speeds)
    for part in PARTS:
        for label, name in (("one_thread", "one_thread"), ("all_cores", "sync")):
            cost_us = 1e6 * median(costs.per_step(part) for costs in rounds[name])
            report.add(f"{part}_alone_{label}", cost_us, "us/env step", **settings[name])
    for part in ("collect", "learn"):
        cost_us = 1e6 * median(getattr(costs, f"{part}_s") for costs in shared)
        report.add(f"{part}_side_by_side", cost_us, "us/env step", **settings["local"])
    for label in ("overlapped", "alternating", "independent_cores"):
        speed = median(1 / getattr(bound, f"{label}_s") for bound in bounds)
        report.add(f"bound_{label}", speed, "env steps/s", cores=cores)
    local = [costs.speed for costs in rounds["local"]]
    limits = [bound.speed for bound in bounds]
    of_rounds = [round(limit) for limit in limits]
    report.add("bound", median(limits), "env steps/s", cores=cores, definition=DEFINITION, of_rounds=of_rounds)
    report.ratio("train_over_bound", paired(local, limits))
    report.ratio("local_over_sync", paired(local, [costs.speed for costs in rounds["sync"]]))
    return report


def measure_ray(short: bool) -> Report:
    """Compare runtime=ray with runtime=local on one machine; ``short`` only shows that it works."""
    sizes = Sizes(1, 1, 1) if short else Sizes(warmup=4, iterations=16, rounds=5)
    report = Report("ray")
    recipe = {**RAY, **(SHORT if short else {})}

    def speed(runtime: str) -> float:
        return run({**recipe, "runtime": runtime}, sizes).speed

    speeds = in_turns({name: partial(speed, name) for name in ("local", "ray")}, sizes.rounds)
    for name, of_rounds in speeds.items():
        settings = describe({**recipe, "runtime": name}) | {"iterations": sizes.iterations}
        rounded = [round(speed) for speed in of_rounds]
        report.add(f"train_{name}", median(rounded), "control steps/s", **settings, of_rounds=rounded)
    report.ratio("ray_over_local", paired(speeds["ray"], speeds["local"]))
    return report


def run(overrides: Mapping[str, Any], sizes: Sizes) -> Costs:
    """Train from the start; return the costs of the iterations after the warm-up."""
    config = run_config.compose_run({**overrides, "runtime.eval_every": 0, "eval_episodes": 0})
    workers = config.runtime.num_env_workers
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


def side_by_side(overrides: Mapping[str, Any], sizes: Sizes) -> Shared:
    """Collect in one thread and learn in another without waiting, with the thread budget of runtime=local."""
    config = run_config.compose_run({**overrides, "runtime": "local"})
    budget = threads.plan(config.runtime, resolve_device(config.runtime.device))
    split = {"runtime.actor_threads": budget.actor, "runtime.learner_threads": budget.learner}
    quiet = {"runtime": "sync", "runtime.eval_every": 0, "eval_episodes": 0}
    config = run_config.compose_run({**overrides, **quiet, **split})
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as runtime:
        assert isinstance(runtime, SyncRuntime)
        runtime.learner.publish()
        batch = runtime.collect()
        steps = sum(fragment.num_env_steps for fragment in batch)
        runtime.learn(batch)
        stop = threading.Event()
        collected: list[tuple[float, int]] = []  # time at which a batch was complete, its env steps
        failures: list[Exception] = []

        def collect() -> None:
            try:
                while not stop.is_set():
                    runtime.ledger.consumed_batch()
                    done = sum(fragment.num_env_steps for fragment in runtime.collect())
                    collected.append((time.perf_counter(), done))
            except Exception as error:  # of any kind: the main thread raises it
                failures.append(error)

        collector = threading.Thread(target=collect)
        collector.start()
        learned, began_s = 0, time.perf_counter()
        try:  # learner.iteration exceeds the batch's version, so the batch is stale, as in runtime=local
            while (learned < sizes.iterations or len(collected) <= sizes.iterations) and not failures:
                runtime.learn(batch)
                learned += 1
            wall_s = time.perf_counter() - began_s
        finally:
            stop.set()
            collector.join()
        if failures:
            raise failures[0]
        during = [entry for entry in collected if entry[0] <= began_s + wall_s]
        done = sum(env_steps for _, env_steps in during[1:])
    return Shared((during[-1][0] - during[0][0]) / done, wall_s / (learned * steps))


def describe(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run's numbers depend on: its parts, sizes and threads."""
    config = run_config.compose_run(overrides)
    options = config.runtime
    budget = threads.plan(options, resolve_device(options.device))
    return {
        "task": config.task.name, "policy": config.policy.name, "algo": config.algo.name,
        "runtime": options.name, "max_staleness": options.max_staleness, "num_envs": config.num_envs,
        "decisions": options.decisions, "execute": config.policy.options.execute, "epochs": config.algo.options.epochs,
        "num_minibatches": config.algo.options.num_minibatches, "device": resolve_device(options.device).type,
        "sim_threads": budget.sim, "actor_threads": budget.actor, "learner_threads": budget.learner,
    }  # fmt: skip
