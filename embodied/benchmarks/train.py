"""Training throughput at the default settings, compared with the bound that the costs of its parts set.

    train_over_bound    throughput of runtime=local (the default) / bound
    local_over_sync     throughput of runtime=local / runtime=sync, same envs, policy, seed and batches
    ray_over_local      ``bench ray``: throughput of runtime=ray / runtime=local, ``lift`` with 1,024 envs

``runtime=sync`` gives the seconds per env step of collecting and learning with all cores to themselves (alone). Then
both run side by side without waiting, which gives those of learning (l) and collecting (c). A runtime that overlaps
them runs both until one has finished the batch, then the other alone:

    overlapped  = l + (1 - l / c) * alone(collecting)   if l < c, else   c + (1 - c / l) * alone(learning)
    alternating = alone(collecting) + alone(learning)
    bound       = 1 / min(overlapped, alternating)      env steps per second

These times contain no waiting, no channel and no limit on staleness, so the ratio shows the cost of those.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from embodied.benchmarks.measure import Report, in_turns, note, paired, trained
from embodied.runtime.sync import SyncRuntime
from embodied.session.config import RunConfig, compose_run, to_mapping
from embodied.trainers.reinforcement import build

QUIET = {"runtime.eval_every": 0, "eval_episodes": 0}
RAY = {"task": "lift", "num_envs": 1024, "runtime.max_staleness": 1}  # training that is compared on Ray and in threads
SHORT = {"num_envs": 8, "runtime.decisions": 2, "algo.epochs": 1}


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per env step of a training, or of its parts while they run side by side."""

    total_s: float
    """Wall-clock time; side by side, that of the slower part."""
    collect_s: float
    learn_s: float
    """Simulation and inference, and learning; c and l in the module's docstring."""


def measure(report: Report, short: bool) -> None:
    """Measure costs, bound and both runtimes; ``short`` only shows that it works."""
    overrides, warmup, iterations, rounds = (SHORT, 1, 1, 2) if short else ({}, 2, 4, 11)
    configs = {name: compose_run(overrides | QUIET | {"runtime": name}) for name in ("local", "sync")}
    measures: dict[str, Callable[[], Costs]]
    measures = {name: partial(run, config, warmup, iterations) for name, config in configs.items()}
    with tempfile.TemporaryDirectory() as folder, build(configs["local"], Path(folder)) as runtime:
        budget = runtime.budget
    split = {"runtime.actor_threads": budget.actor, "runtime.learner_threads": budget.learner}
    together = compose_run({**overrides, **QUIET, "runtime": "sync", **split})
    measures["side_by_side"] = partial(side_by_side, together, iterations)
    costs = in_turns(measures, rounds, warm_up=0)
    limits = [bound(sync, together) for sync, together in zip(costs["sync"], costs["side_by_side"], strict=True)]
    speeds = add_speeds(report, configs, costs, iterations)
    for name in ("sync", "side_by_side"):
        for part in ("collect", "learn"):
            cost_us = 1e6 * median(getattr(one, f"{part}_s") for one in costs[name])
            report.add(f"{part}_{name}", cost_us, "us/env step")
    report.add("bound", median(limits), "env steps/s", of_rounds=[round(limit) for limit in limits])
    report.ratio("train_over_bound", paired(speeds["local"], limits))
    report.ratio("local_over_sync", paired(speeds["local"], speeds["sync"]))


def measure_ray(report: Report, short: bool) -> None:
    """Compare runtime=ray with runtime=local on one machine; ``short`` only shows that it works."""
    overrides, warmup, iterations, rounds = (RAY | SHORT, 1, 1, 1) if short else (RAY, 4, 16, 5)
    configs = {name: compose_run(overrides | QUIET | {"runtime": name}) for name in ("local", "ray")}
    measures = {name: partial(run, config, warmup, iterations) for name, config in configs.items()}
    speeds = add_speeds(report, configs, in_turns(measures, rounds, warm_up=0), iterations)
    report.ratio("ray_over_local", paired(speeds["ray"], speeds["local"]))


def add_speeds(
    report: Report, configs: Mapping[str, RunConfig], costs: Mapping[str, Sequence[Costs]], iterations: int
) -> dict[str, list[float]]:
    """Add the median speed of each run as a row; return the speeds of all rounds, env steps per second."""
    speeds = {name: [1 / one.total_s for one in costs[name]] for name in configs}
    for name, values in speeds.items():
        config, of_rounds = to_mapping(configs[name]), [round(speed) for speed in values]
        report.add(f"train_{name}", median(values), "env steps/s", **config, iterations=iterations, of_rounds=of_rounds)
    return speeds


def bound(alone: Costs, together: Costs) -> float:
    """Return the bound, env steps per second, from the costs of the parts alone and side by side."""
    first_s = min(together.collect_s, together.learn_s)
    rest_s = (1 - first_s / together.collect_s) * alone.collect_s + (1 - first_s / together.learn_s) * alone.learn_s
    return 1 / min(first_s + rest_s, alone.collect_s + alone.learn_s)


def run(config: RunConfig, warmup: int, iterations: int) -> Costs:
    """Train from the start; return the costs of the iterations after the warm-up."""
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as runtime:
        env_steps, wall_s, metrics = trained(runtime, warmup, iterations)
    note(f"{config.runtime.name}: {env_steps / wall_s:,.0f} env steps/s")
    workers = config.runtime.num_env_workers
    collect_s = sum(found["perf/sim_s"] * workers + found["perf/infer_s"] for found in metrics)
    learn_s = sum(found["perf/learn_s"] for found in metrics)
    return Costs(wall_s / env_steps, collect_s / env_steps, learn_s / env_steps)


def side_by_side(config: RunConfig, iterations: int) -> Costs:
    """Collect in one thread and learn in another without waiting. config: of runtime=sync, with the threads of both."""
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as runtime:
        assert isinstance(runtime, SyncRuntime)
        runtime.learner.publish()
        batch = runtime.collect()
        steps = sum(fragment.num_env_steps for fragment in batch)
        runtime.learn(batch)
        stop = threading.Event()
        collected: list[tuple[float, int]] = []  # time at which a batch was complete, its env steps

        def collect() -> None:
            while not stop.is_set():
                runtime.ledger.consumed_batch()
                done = sum(fragment.num_env_steps for fragment in runtime.collect())
                collected.append((time.perf_counter(), done))

        with ThreadPoolExecutor(1) as executor:
            collecting = executor.submit(collect)
            learned, began_s = 0, time.perf_counter()
            try:  # learner.iteration exceeds the batch's version, so the batch is stale, as in runtime=local
                while (learned < iterations or len(collected) <= iterations) and not collecting.done():
                    runtime.learn(batch)
                    learned += 1
                ended_s = time.perf_counter()
            finally:
                stop.set()
            collecting.result()
    during = [entry for entry in collected if entry[0] <= ended_s]
    collect_s = (during[-1][0] - during[0][0]) / sum(env_steps for _, env_steps in during[1:])
    learn_s = (ended_s - began_s) / (learned * steps)
    return Costs(max(collect_s, learn_s), collect_s, learn_s)
