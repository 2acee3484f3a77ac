"""Asynchronous next to synchronous training where parts wait: slow simulators, slow inference, robots.

    tail_over_sync         simulators with heavy-tailed latency: max_staleness=1 order=arrival / max_staleness=0
    tail_over_bound        the same / bound; tail_async_2_over_bound: with max_staleness=2
    inference_over_bound   slow inference, as of a large policy on an accelerator
    robot_over_bound       robots, whose steps take the time that they take

Each part does its real work and sleeps for the rest of a given time, so the cores stay free. ``ticket`` rows are
max_staleness=1 with order=ticket, the default. The bound is the throughput if no part ever waited: one batch per
``Setup.bound_s``. Throughput counts only decisions that were not masked because of their age. A round draws new
latencies, the same for all modes. ``bench train`` compares parts that share the cores.
"""

import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, repeat
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from embodied.benchmarks.measure import Report, in_turns, note, paired, trained
from embodied.runtime.sync import OneProcess
from embodied.session.config import compose_run
from embodied.trainers.reinforcement import build

Mode = Mapping[str, Any]

SYNC: Mode = {"max_staleness": 0}
ASYNC: Mode = {"max_staleness": 1}
ARRIVAL: Mode = {"max_staleness": 1, "order": "arrival"}
ARRIVAL_2: Mode = {"max_staleness": 2, "order": "arrival"}
WARMUP = 2  # first iterations of a run, which do not count
LIGHT = {
    "task": "reach", "policy": "gaussian", "runtime": "local",
    "policy.horizon": 1, "policy.execute": 1, "policy.actor_hidden": [32, 32], "policy.critic_hidden": [32, 32],
    "algo.epochs": 2, "algo.num_minibatches": 1, "runtime.sim_threads": 1, "runtime.actor_threads": 1,
    "runtime.learner_threads": 1, "runtime.eval_every": 0, "eval_episodes": 0, "device": "cpu",
}  # fmt: skip
"""Overrides of a run that computes little, so that the latencies are what it takes."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Parts of a run, and the least time that each takes."""

    step_s: float
    """One step of an env group, mean: a decision with its chunk of actions."""
    workers: int
    """Env workers, a thread each."""
    sigma: float = 0.0
    """Standard deviation of the logarithm of a step's time, which is lognormal; 0 is a constant. At 1, one step in 50
    takes more than 4.7 times the mean."""
    groups: int = 1
    envs: int = 4
    """Env groups of a worker, which steps one at a time, and environments of a group."""
    decisions: int = 4
    infer_s: float = 0.0
    update_s: float = 0.0
    """One call of the policy, for any number of requests, and one update."""

    @property
    def bound_s(self) -> float:
        """Seconds per batch if no part ever waited: a worker's steps or the update, whichever is longer."""
        return max(self.groups * self.decisions * self.step_s, self.update_s)

    def latencies_s(self, seed: object) -> Iterator[float]:
        """Yield times of steps, s, that depend on ``seed`` alone."""
        rng = random.Random(str(seed))
        while True:
            yield self.step_s * rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)


TAIL = Setup(0.15, workers=32, sigma=1.0, decisions=6, update_s=0.09)
INFERENCE = Setup(0.04, workers=4, groups=3, decisions=8, infer_s=0.03, update_s=0.48)
ROBOT = Setup(0.2, workers=4, sigma=0.1, envs=1, update_s=0.6)
SCENARIOS: dict[str, tuple[Setup, dict[str, Mode], int, int]] = {
    "tail": (TAIL, {"sync": SYNC, "ticket": ASYNC, "async": ARRIVAL, "async_2": ARRIVAL_2}, 10, 3),
    "inference": (INFERENCE, {"sync": SYNC, "async": ASYNC}, 4, 2),
    "robot": (ROBOT, {"sync": SYNC, "async": ASYNC}, 6, 1),
}
"""Setup, the modes that are compared in it, iterations of a run and rounds, by name."""


def measure(report: Report, short: bool) -> None:
    """Measure all scenarios; ``short`` only shows that it works."""
    for name, (setup, modes, iterations, rounds) in SCENARIOS.items():
        if short:
            setup = replace(setup, workers=2, step_s=0.002, infer_s=setup.infer_s / 10, update_s=0.01)
            iterations, rounds = 2, 1
        measures = {mode: partial(measured, setup, options, count(), iterations) for mode, options in modes.items()}
        runs = in_turns(measures, rounds, warm_up=0)
        speeds = {mode: [run.env_steps / run.wall_s for run in of_mode] for mode, of_mode in runs.items()}
        bounds = [run.env_steps / iterations / setup.bound_s for run in runs["sync"]]
        for mode, options in modes.items():
            batch_s = [round(run.wall_s / iterations, 4) for run in runs[mode]]
            dropped = round(fmean(run.dropped for run in runs[mode]), 4)
            settings = {**options, **asdict(setup), "iterations": iterations, "batch_s": batch_s, "dropped": dropped}
            report.add(f"{name}_{mode}", median(speeds[mode]), "env steps/s", **settings)
            prefix = name if mode == "async" else f"{name}_{mode}"
            if mode != "sync":
                report.ratio(f"{prefix}_over_sync", paired(speeds[mode], speeds["sync"]))
            report.ratio(f"{prefix}_over_bound", paired(speeds[mode], bounds))
        report.add(f"{name}_bound", median(bounds), "env steps/s", bound_s=setup.bound_s)


class Run(NamedTuple):
    """What was measured of a run after its warm-up."""

    env_steps: int
    wall_s: float
    """Control steps that were learned from, and wall-clock seconds."""
    dropped: float
    """Share of the decisions that were masked because of their age."""


def measured(setup: Setup, mode: Mode, draws: Iterator[int], iterations: int) -> Run:
    """Train for some iterations after the warm-up. draws: seeds of the latencies."""
    config = compose_run({
        **LIGHT, **{f"runtime.{key}": value for key, value in mode.items()}, "runtime.decisions": setup.decisions,
        "runtime.num_env_workers": setup.workers, "runtime.groups_per_worker": setup.groups,
        "num_envs": setup.workers * setup.groups * setup.envs,
    })  # fmt: skip
    draw = next(draws)
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as runtime:
        assert isinstance(runtime, OneProcess)
        for number, (worker, group) in enumerate(runtime.groups):
            slow(runtime.workers[worker].rollouts[group].env, "step", setup.latencies_s((draw, number)))
        slow(runtime.actor.policy, "act", repeat(setup.infer_s))
        slow(runtime.learner.algorithm, "update", repeat(setup.update_s))
        env_steps, wall_s, metrics = trained(runtime, WARMUP, iterations)
    note(f"{dict(mode)}: {env_steps / wall_s:,.0f} env steps/s")
    dropped = sum(found["async/dropped"] for found in metrics)
    return Run(env_steps, wall_s, dropped / (iterations * config.num_envs * setup.decisions))


def slow(part: Any, method: str, latencies_s: Iterator[float]) -> None:
    """Let each call of a part's method take at least the next of the latencies, s."""
    call = getattr(part, method)

    def slowed(*args: Any) -> Any:
        end_s = time.perf_counter() + next(latencies_s)
        result = call(*args)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result

    setattr(part, method, slowed)
