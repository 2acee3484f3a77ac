"""Asynchronous training next to synchronous training: the same work on the same cores, and the bound of each.

    uniform_over_sync      (a) default run, whose parts compete for the cores: runtime=local / runtime=sync
    tail_over_sync         (b) simulators with heavy-tailed latency: max_staleness=1 order=arrival / max_staleness=0
    tail_over_bound        the same / bound; tail_async_2_over_bound: with max_staleness=2
    inference_over_bound   (c) slow inference, as of a large policy on an accelerator
    robot_over_bound       (d) robots, whose steps take the time that they take
    tail_success           (b) success after equal steps, asynchronous less synchronous training, share of episodes
    tail_time_to_level     (b) seconds until half of the episodes succeed, synchronous / asynchronous training
    model_error            greatest relative error of the model (plant.py) over the rows of (b), (c) and (d)

In (b), (c) and (d) the parts sleep (latency.py), so they do not compete for cores. Synchronous means max_staleness=0 in
``runtime=local``: all workers step in parallel, then the learner updates. ``runtime=sync`` would step them in turn.
``ticket`` rows are max_staleness=1 with order=ticket, the default, in which a batch waits for its slowest fragment.

A bound is the throughput that would be reached if no part ever waited. In (b), (c) and (d) it is one batch per
``Setup.bound_s``: the mean time of a worker's steps or of the update, whichever is longer. In (a) parts share cores,
and the bound is that of ``bench train``. Decisions that are masked because of their age count in no throughput.

Modes take turns, and a ratio is the median over rounds. A round draws new latencies, the same for all modes.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any, Literal, get_args

from embodied.benchmarks import train
from embodied.benchmarks.latency import Latency, Run, Setup, build, measured
from embodied.benchmarks.measure import Report, note, paired
from embodied.benchmarks.plant import Model, Plant, Prediction, Times
from embodied.core.options import config_dataclass
from embodied.runtime import threads
from embodied.session import config as run_config
from embodied.session.evaluation import evaluate_policy

Mode = Mapping[str, Any]
Part = Literal["uniform", "tail", "inference", "robot", "learning"]

SYNC: Mode = {"max_staleness": 0}
ASYNC: Mode = {"max_staleness": 1}
ARRIVAL: Mode = {"max_staleness": 1, "order": "arrival"}
ARRIVAL_2: Mode = {"max_staleness": 2, "order": "arrival"}
WARMUP = 2
LEVEL = 0.5
RECENT = 200  # latest episodes whose success is compared with LEVEL


@dataclass(frozen=True, slots=True)
class Scenario:
    """A setup, the modes that are compared in it, and how long they are measured."""

    setup: Setup
    modes: Mapping[str, Mode]
    iterations: int
    rounds: int = 3


TAIL = Setup(Latency(0.15, sigma=1.0), workers=32, decisions=6, update_s=0.09)
SCENARIOS = {
    "tail": Scenario(TAIL, {"sync": SYNC, "ticket": ASYNC, "async": ARRIVAL, "async_2": ARRIVAL_2}, iterations=10),
    "tail_long_update": Scenario(replace(TAIL, update_s=0.6), {"sync": SYNC, "async": ARRIVAL}, 10, rounds=1),
    "inference": Scenario(
        Setup(Latency(0.04), workers=4, groups=3, decisions=8, infer_s=0.03, update_s=0.48),
        {"sync": SYNC, "async": ASYNC},
        iterations=4,
        rounds=2,
    ),
    "inference_two_groups": Scenario(
        Setup(Latency(0.04), workers=4, groups=2, infer_s=0.03, update_s=0.24), {"sync": SYNC, "async": ASYNC}, 6, 1
    ),
    "robot": Scenario(
        Setup(Latency(0.2, sigma=0.1), workers=4, envs=1, update_s=0.6), {"sync": SYNC, "async": ASYNC}, 6, rounds=1
    ),
}
LEARNING = Setup(Latency(0.05, sigma=1.0), workers=16)
SIZES: dict[str, dict[str, Any]] = {
    "uniform_small": {"policy.actor_hidden": [32, 32], "policy.head_hidden": [32]},
    "uniform": {},
    "uniform_large": {"policy.actor_hidden": [384, 384], "policy.head_hidden": [384]},
}


@dataclass(frozen=True, slots=True)
class Learned:
    """Result of a training with slow parts."""

    success: float
    """Success of the deterministic policy at the end of 200 episodes from fixed initial states."""
    level_steps: int | None
    """Control steps until half of the latest episodes succeeded; None if they never did."""
    level_s: float | None
    """Seconds until then."""
    wall_s: float
    """Seconds of the whole training."""


@config_dataclass
class AsyncOptions:
    """Options of ``bench async``."""

    parts: tuple[Part, ...] = get_args(Part)
    """What to measure: (a) with all sizes of the policy, (b), (c), (d), and success after equal steps in (b)."""


def measure(short: bool) -> Report:
    """Measure all parts; ``short`` only shows that it works."""
    return measure_parts(AsyncOptions(), short)


def measure_parts(options: AsyncOptions, short: bool) -> Report:
    """Measure the parts that are asked for; ``short`` only shows that it works."""
    parts, report = options.parts, Report("async")
    errors = []
    for name, scenario in SCENARIOS.items():
        if name.partition("_")[0] in parts:
            errors += measure_scenario(report, name, _shortened(scenario) if short else scenario)
    if errors:
        report.ratio("model_error", max(errors))
    for name, overrides in SIZES.items():
        if "uniform" in parts and (not short or name == "uniform"):
            measure_uniform(report, name, overrides, short)
    if "learning" not in parts:
        return report
    if short:
        measure_learning(report, _shortened(SCENARIOS["tail"]).setup, seeds=1, total_steps=500, episodes=4)
    else:
        measure_learning(report, LEARNING, seeds=3, total_steps=100_000, episodes=200)
    return report


def measure_uniform(report: Report, name: str, overrides: Mapping[str, Any], short: bool) -> None:
    """Add the rows of a size of the policy, whose parts compete for the cores."""
    tiny = train.SHORT if short else {}
    extent = train.Sizes(1, 1, 1) if short else train.Sizes(1, 2, 3 if name == "uniform" else 1)
    speeds: dict[str, list[float]] = {"local": [], "sync": []}
    bounds: list[float] = []
    for _ in range(extent.rounds):
        costs = {mode: train.run({**tiny, **overrides, "runtime": mode}, extent) for mode in speeds}
        for mode, cost in costs.items():
            speeds[mode].append(cost.speed)
            note(f"{name} {mode}: {cost.speed:,.0f} env steps/s")
        shared = train.side_by_side({**tiny, **overrides}, extent)
        bound = train.Bound.of(costs["sync"], costs["sync"], shared, threads.available_cores())
        bounds.append(bound.speed)
    for mode, of_rounds in speeds.items():
        settings = train.describe({**tiny, **overrides, "runtime": mode}) | dict(overrides)
        report.add(f"{name}_{mode}", median(of_rounds), "env steps/s", **settings, of_rounds=_digits(of_rounds))
    report.add(f"{name}_bound", median(bounds), "env steps/s", of_rounds=_digits(bounds))
    report.ratio(f"{name}_over_sync", paired(speeds["local"], speeds["sync"]))
    report.ratio(f"{name}_over_bound", paired(speeds["local"], bounds))


def measure_scenario(report: Report, name: str, scenario: Scenario) -> list[float]:
    """Add the rows of a scenario with slow parts; return the model's relative error of each mode."""
    setup, iterations = scenario.setup, scenario.iterations
    runs: dict[str, list[Run]] = {mode: [] for mode in scenario.modes}
    models: dict[str, list[Prediction]] = {mode: [] for mode in scenario.modes}
    for number in range(scenario.rounds):
        for mode, options in scenario.modes.items():
            run = measured(setup, options, number, iterations, WARMUP)
            runs[mode].append(run)
            models[mode].append(predict(setup, options, number, run))
            note(f"{name} {mode}: {run.speed:,.0f} env steps/s")
    bounds = [run.env_steps / iterations / setup.bound_s for run in runs["sync"]]
    errors = []
    for mode, options in scenario.modes.items():
        speeds = [run.speed for run in runs[mode]]
        predicted_s = [prediction.batch_s for prediction in models[mode]]
        errors.append(median(model / (run.wall_s / iterations) - 1
                             for model, run in zip(predicted_s, runs[mode], strict=True)))  # fmt: skip
        report.add(
            f"{name}_{mode}", median(speeds), "env steps/s", of_rounds=_digits(speeds), **options,
            batch_s=_digits(run.wall_s / iterations for run in runs[mode]), model_batch_s=_digits(predicted_s),
            model_error=round(errors[-1], 4), staleness=round(fmean(run.staleness for run in runs[mode]), 3),
            dropped=round(fmean(run.dropped for run in runs[mode]), 4), iterations=iterations,
            call_s=_digits(run.call_s for run in runs[mode]), updates_s=_digits(run.update_s for run in runs[mode]),
            overhead_s=_digits(run.overhead_s for run in runs[mode]), **asdict(setup),
        )  # fmt: skip
    report.add(f"{name}_bound", median(bounds), "env steps/s", bound_s=setup.bound_s)
    base = [run.speed for run in runs["sync"]]
    for mode in scenario.modes:
        speeds = [run.speed for run in runs[mode]]
        prefix = name if mode == "async" else f"{name}_{mode}"
        if mode != "sync":
            report.ratio(f"{prefix}_over_sync", paired(speeds, base))
        report.ratio(f"{prefix}_over_bound", paired(speeds, bounds))
    return [abs(error) for error in errors]


def predict(setup: Setup, mode: Mode, draw: int, run: Run) -> Prediction:
    """Return what the model predicts of a run from its latencies and the mean times of its parts.

    What a step takes beside its latency varies, so that requests of several workers do not come at the same moment.
    """
    jitter = random.Random(draw)
    plant = Plant(setup.workers, setup.groups, setup.decisions, merge=mode["max_staleness"] > 0, **mode)
    streams = [setup.step.stream((draw, group)) for group in range(plant.batch_fragments)]
    times = Times(
        step=lambda group: next(streams[group]) + jitter.expovariate(1 / max(run.overhead_s, 1e-6)),
        infer=lambda acting, valued: run.call_s if acting else 0.0,
        update=lambda: run.update_s,
    )
    return Model(plant, times).run(run.iterations, WARMUP)


def measure_learning(report: Report, setup: Setup, seeds: int, total_steps: int, episodes: int) -> None:
    """Add success and time to a level of both modes, with paired seeds."""
    learned: dict[str, list[Learned]] = {"sync": [], "async": []}
    for seed in range(seeds):
        for mode, options in (("sync", SYNC), ("async", ARRIVAL)):
            learned[mode].append(learn(setup, options, seed, total_steps, episodes))
            note(f"tail learning {mode}, seed {seed}: {learned[mode][-1]}")
    for mode, of_seeds in learned.items():
        report.add(
            f"tail_learning_{mode}", fmean(one.success for one in of_seeds), "success at the end",
            total_steps=total_steps, episodes=episodes, of_seeds=[asdict(one) for one in of_seeds], **asdict(setup),
        )  # fmt: skip
    pairs = list(zip(learned["async"], learned["sync"], strict=True))
    report.ratio("tail_success", fmean(a.success - b.success for a, b in pairs))
    reached = [b.level_s / a.level_s for a, b in pairs if a.level_s and b.level_s]
    if len(reached) == seeds:
        report.ratio("tail_time_to_level", median(reached))


def learn(setup: Setup, mode: Mode, seed: int, total_steps: int, episodes: int) -> Learned:
    """Train for ``total_steps`` control steps and evaluate the policy."""
    config = run_config.compose_run({**setup.overrides(mode), "seed": seed})
    recent: deque[bool] = deque(maxlen=RECENT)
    level: tuple[int, float] | tuple[None, None] = None, None
    with build(setup, config, draw=seed) as runtime:
        began_s = time.perf_counter()
        for iteration in runtime.iterations(max_env_steps=total_steps):
            recent += iteration.episodes.success_at_end_M.tolist() if len(iteration.episodes) else []
            if level[0] is None and len(recent) == RECENT and fmean(recent) >= LEVEL:
                level = iteration.env_steps, time.perf_counter() - began_s
        wall_s = time.perf_counter() - began_s
        result = evaluate_policy(config, runtime.policy, episodes, seed, ("zero",), num_threads=1)[0]
    return Learned(result["success_at_end"], level[0], level[1], wall_s)


def _shortened(scenario: Scenario) -> Scenario:
    setup = scenario.setup
    quick = replace(setup, workers=2, step=replace(setup.step, mean_s=0.002), infer_s=setup.infer_s / 10, update_s=0.01)
    return replace(scenario, setup=quick, iterations=2, rounds=1)


def _digits(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
