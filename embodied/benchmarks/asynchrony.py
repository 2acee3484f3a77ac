"""Asynchronous next to synchronous training where parts wait: slow simulators, slow inference, robots.

    tail_over_sync         simulators with heavy-tailed latency: max_staleness=1 order=arrival / max_staleness=0
    tail_over_bound        the same / bound; tail_async_2_over_bound: with max_staleness=2
    inference_over_bound   slow inference, as of a large policy on an accelerator
    robot_over_bound       robots, whose steps take the time that they take

Each part does its real work and sleeps for the rest of a given time, so the cores stay free, as if the part had a
machine of its own. Everything else is a run like any other. Synchronous means max_staleness=0 in ``runtime=local``: all
workers step in parallel, then the learner updates. ``ticket`` rows are max_staleness=1 with order=ticket, the default,
in which a batch waits for its slowest fragment.

The bound is the throughput that would be reached if no part ever waited: one batch per ``Setup.bound_s``. Throughput
counts only decisions that were not masked because of their age. Modes take turns, and a ratio is the median over
rounds. A round draws new latencies, the same for all modes. ``bench train`` compares parts that share the cores.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from embodied.algos.ppo import PPO
from embodied.benchmarks.measure import Report, note, paired
from embodied.core.algorithm import Algorithm, Metrics
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeSampler
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment, Obs, PolicySample, Timestep
from embodied.policies.gaussian import GaussianPolicy
from embodied.runtime import Recipe, build_runtime
from embodied.session import config as run_config
from embodied.session import factories

Mode = Mapping[str, Any]

SYNC: Mode = {"max_staleness": 0}
ASYNC: Mode = {"max_staleness": 1}
ARRIVAL: Mode = {"max_staleness": 1, "order": "arrival"}
ARRIVAL_2: Mode = {"max_staleness": 2, "order": "arrival"}
WARMUP = 2  # first iterations of a run, which do not count
LIGHT = {
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
    """Env groups of a worker, which steps one at a time."""
    envs: int = 4
    """Environments of a group."""
    decisions: int = 4
    """T of a fragment."""
    infer_s: float = 0.0
    """One call of the policy, for any number of requests."""
    update_s: float = 0.0
    """One update."""

    @property
    def bound_s(self) -> float:
        """Seconds per batch if no part ever waited: a worker's steps or the update, whichever is longer."""
        return max(self.groups * self.decisions * self.step_s, self.update_s)

    def latencies_s(self, seed: object) -> Iterator[float]:
        """Yield times of steps, s, that depend on ``seed`` alone."""
        rng = random.Random(str(seed))
        while True:
            yield self.step_s * rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)

    def overrides(self, mode: Mode) -> dict[str, Any]:
        """Return the overrides of a run in a mode: keys of ``runtime``."""
        return {
            "task": "reach", "policy": "gaussian", "runtime": "local", "runtime.num_env_workers": self.workers,
            "runtime.groups_per_worker": self.groups, "num_envs": self.workers * self.groups * self.envs,
            "runtime.decisions": self.decisions, **LIGHT, **{f"runtime.{key}": value for key, value in mode.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """A setup, the modes that are compared in it, and how long they are measured."""

    setup: Setup
    modes: Mapping[str, Mode]
    iterations: int
    rounds: int = 1


TAIL = Setup(0.15, workers=32, sigma=1.0, decisions=6, update_s=0.09)
INFERENCE = Setup(0.04, workers=4, groups=3, decisions=8, infer_s=0.03, update_s=0.48)
TWO_GROUPS = Setup(0.04, workers=4, groups=2, infer_s=0.03, update_s=0.24)
ROBOT = Setup(0.2, workers=4, sigma=0.1, envs=1, update_s=0.6)
SCENARIOS = {
    "tail": Scenario(TAIL, {"sync": SYNC, "ticket": ASYNC, "async": ARRIVAL, "async_2": ARRIVAL_2}, 10, rounds=3),
    "tail_long_update": Scenario(replace(TAIL, update_s=0.6), {"sync": SYNC, "async": ARRIVAL}, 10),
    "inference": Scenario(INFERENCE, {"sync": SYNC, "async": ASYNC}, 4, rounds=2),
    "inference_two_groups": Scenario(TWO_GROUPS, {"sync": SYNC, "async": ASYNC}, 6),
    "robot": Scenario(ROBOT, {"sync": SYNC, "async": ASYNC}, 6),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured of a run after its warm-up."""

    env_steps: int
    """Control steps that were learned from."""
    wall_s: float
    """Wall-clock seconds."""
    staleness: float
    """Mean age of the decisions, versions."""
    dropped: float
    """Share of the decisions that were masked because of their age."""


def measure(short: bool) -> Report:
    """Measure all scenarios; ``short`` only shows that it works."""
    report = Report("async")
    for name, scenario in SCENARIOS.items():
        measure_scenario(report, name, _shortened(scenario) if short else scenario)
    return report


def measure_scenario(report: Report, name: str, scenario: Scenario) -> None:
    """Add the rows and ratios of a scenario."""
    setup, iterations = scenario.setup, scenario.iterations
    runs: dict[str, list[Run]] = {mode: [] for mode in scenario.modes}
    for number in range(scenario.rounds):
        for mode, options in scenario.modes.items():
            run = measured(setup, options, number, iterations)
            runs[mode].append(run)
            note(f"{name} {mode}: {run.env_steps / run.wall_s:,.0f} env steps/s")
    speeds = {mode: [run.env_steps / run.wall_s for run in of_mode] for mode, of_mode in runs.items()}
    bounds = [run.env_steps / iterations / setup.bound_s for run in runs["sync"]]
    for mode, options in scenario.modes.items():
        report.add(
            f"{name}_{mode}", median(speeds[mode]), "env steps/s", of_rounds=_digits(speeds[mode]), **options,
            batch_s=_digits(run.wall_s / iterations for run in runs[mode]), iterations=iterations,
            staleness=round(fmean(run.staleness for run in runs[mode]), 3),
            dropped=round(fmean(run.dropped for run in runs[mode]), 4), **asdict(setup),
        )  # fmt: skip
        prefix = name if mode == "async" else f"{name}_{mode}"
        if mode != "sync":
            report.ratio(f"{prefix}_over_sync", paired(speeds[mode], speeds["sync"]))
        report.ratio(f"{prefix}_over_bound", paired(speeds[mode], bounds))
    report.add(f"{name}_bound", median(bounds), "env steps/s", bound_s=setup.bound_s)


def measured(setup: Setup, mode: Mode, draw: int, iterations: int) -> Run:
    """Train for some iterations after the warm-up. draw: seed of the latencies."""
    config = run_config.compose_run(setup.overrides(mode))
    number = count()

    def make_env(num_envs: int, num_threads: int) -> VecEnv:
        env = factories.make_acting_env(config, num_envs, num_threads)
        return SlowEnv(env, setup.latencies_s((draw, next(number))))

    def make_policy(spec: EnvSpec) -> Policy:
        policy = SlowPolicy(spec, config.policy.options)
        policy.infer_s = setup.infer_s
        return policy

    def make_algorithm(policy: Policy) -> Algorithm:
        algorithm = SlowPPO(policy, config.algo.options, seed=config.seed, device=torch.device("cpu"))
        algorithm.update_s = setup.update_s
        return algorithm

    recipe = Recipe(
        config.runtime, num_envs=config.num_envs, seed=config.seed, make_env=make_env,
        make_sampler=partial(factories.make_sampler, config), make_policy=make_policy, make_algorithm=make_algorithm,
    )  # fmt: skip
    sums: defaultdict[str, float] = defaultdict(float)
    with build_runtime(recipe) as runtime:
        for iteration in runtime.iterations():
            if iteration.index > WARMUP:
                for name in ("async/staleness_mean", "async/dropped"):
                    sums[name] += iteration.metrics[name]
            if iteration.index == WARMUP:
                began_s, first = time.perf_counter(), iteration.env_steps
            if iteration.index == WARMUP + iterations:
                wall_s, last = time.perf_counter() - began_s, iteration.env_steps
                break
    decisions = iterations * config.num_envs * setup.decisions
    return Run(last - first, wall_s, sums["async/staleness_mean"] / iterations, sums["async/dropped"] / decisions)


class SlowEnv(VecEnv):
    """A ``VecEnv`` whose steps take at least as long as the draws."""

    def __init__(self, env: VecEnv, latencies_s: Iterator[float]) -> None:
        self.env, self.latencies_s = env, latencies_s
        self.spec, self.num_envs, self.device = env.spec, env.num_envs, env.device

    def reset(self, sampler: EpisodeSampler) -> Obs:
        return self.env.reset(sampler)

    def step(self, action: Tensor) -> Timestep:
        end_s = time.perf_counter() + next(self.latencies_s)
        timestep = self.env.step(action)
        _sleep_until(end_s)
        return timestep

    def close(self) -> None:
        self.env.close()


class SlowPolicy(GaussianPolicy):
    """A Gaussian policy whose calls of ``act`` take at least ``infer_s``."""

    infer_s = 0.0

    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        end_s = time.perf_counter() + self.infer_s
        sample = super().act(obs, noise)
        _sleep_until(end_s)
        return sample


class SlowPPO(PPO):
    """PPO whose updates take at least ``update_s``."""

    update_s = 0.0

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        end_s = time.perf_counter() + self.update_s
        metrics = super().update(fragments, version)
        _sleep_until(end_s)
        return metrics


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.perf_counter()))


def _shortened(scenario: Scenario) -> Scenario:
    setup = scenario.setup
    quick = replace(setup, workers=2, step_s=0.002, infer_s=setup.infer_s / 10, update_s=0.01)
    return replace(scenario, setup=quick, iterations=2, rounds=1)


def _digits(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
