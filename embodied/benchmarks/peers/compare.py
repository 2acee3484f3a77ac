"""Training throughput and time to a level, of our PPO and of other libraries' with the same settings on the same env.

    local_over_<peer>, sync_over_<peer>      env steps per second of runtime=local and runtime=sync / those of the peer,
                                             median over rounds; in a round every trainer trains from the start, in turn
    <peer>_time_over_local                   with level=: seconds of the peer to the level / seconds of runtime=local
    <peer>_time_over_recipe                  with ours=recipe: the same / seconds of ``embodied.train task=<task>``

All but ``recipe`` have the same settings (``PPOSettings``): the rows hold them. Every trainer steps the same pool, with
all cores for simulation and network alike. A peer's iteration is one rollout and one update of its own training loop;
ours overlap in ``local``. Times exclude building. With ``level=`` every trainer then trains until its latest episodes
succeed as often, or for tasks without success return as much, as ``level`` says, or until ``total_steps``: ``seeds``
times, of which the median of the seconds counts. Ratios are of trainers that reached the level every time.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied.benchmarks.measure import Report, note, paired
from embodied.benchmarks.peers import ours
from embodied.benchmarks.peers.meter import Meter, MeteredEnv, PPOSettings, describe
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import NonNegativeInt, PositiveInt, config_dataclass
from embodied.core.spec import Box, EnvSpec, MultiDiscrete
from embodied.runtime import threads
from embodied.session import config as run_config
from embodied.session import factories

PEERS = {"sb3": "stable_baselines3", "rsl_rl": "rsl_rl", "torchrl": "torchrl"}
"""Names of peers and the packages that they need."""
INSTALL = "pip install -c constraints.txt -e '.[trainers]'"


@config_dataclass
class CompareOptions:
    """Options of ``bench train`` with peers."""

    task: str
    """Task, as ``embodied.train`` takes it."""
    peers: Annotated[tuple[str, ...], Field(min_length=1)]
    """Other libraries: sb3, rsl_rl, torchrl."""
    ours: tuple[Literal["local", "sync", "recipe"], ...] = ("local", "sync")
    """Runtimes of ours beside them; [] for the peers alone. ``recipe``: the task's own settings, for level= alone."""
    rounds: PositiveInt = 7
    """Rounds of the throughput."""
    iterations: PositiveInt = 6
    """Iterations of a training in a round that count."""
    warmup: PositiveInt = 2
    """Iterations before them."""
    level: float | None = None
    """Success, or return for a task without success, that trainers are timed to; null: only throughput."""
    total_steps: PositiveInt = 2_000_000
    """Env steps after which a training that has not reached the level ends."""
    seeds: PositiveInt = 1
    """Trainings of each to the level, with the seeds ppo.seed, ppo.seed + 1, ..."""
    threads: NonNegativeInt = 0
    """Threads of torch in every trainer; 0: all cores, and in ``local`` its own choice. On cores that other programs
    also use, only 1 compares: torch slows down sharply where its threads share cores."""
    ppo: PPOSettings = Field(default_factory=PPOSettings)
    """Settings of PPO, the same for all."""

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise unknown_name("peer", peer, PEERS)
        for key in ("peers", "ours"):
            names = getattr(self, key)
            if len(set(names)) < len(names):
                raise UserError(f"{key}: got {','.join(names)}, allowed: each name once")
        if self.level is None and ("recipe" in self.ours or self.seeds > 1):
            raise UserError("ours=recipe and seeds= are of the time to a level: give level=<success or return>")


SHORT: dict[str, Any] = {"rounds": 1, "iterations": 1, "warmup": 1, "total_steps": 256}


def compare(options: CompareOptions, short: bool) -> Report:
    """Measure; ``short`` only shows that it works.

    UserError for a library that is not installed, or that cannot learn the task.
    """
    if short:
        small = replace(options.ppo, num_envs=8, decisions=8, epochs=1)
        options = replace(options, ppo=small, **SHORT)
    for peer in options.peers:
        if find_spec(PEERS[peer]) is None:
            raise UserError(f"peers={peer}: {PEERS[peer]} is not installed: {INSTALL}")
    spec = factories.make_spec(run_config.compose_run({"task": options.task, "policy": "gaussian"}), cameras=())
    if isinstance(spec.action, MultiDiscrete):
        raise UserError(f"task {options.task} makes several choices at once, which the peers are not set up for")
    if spec.action_mask:
        raise UserError(f"task {options.task} forbids some choices by masks, which the peers do not read")
    if "rsl_rl" in options.peers and not isinstance(spec.action, Box):
        raise UserError(f"peers=rsl_rl: rsl_rl has no discrete actions, as task {options.task} needs them")
    names = (*options.ours, *options.peers)
    report = Report("train")
    throughput(report, options, spec, [name for name in names if name != "recipe"])
    if options.level is not None:
        time_to_level(report, options, spec, names)
    return report


def throughput(report: Report, options: CompareOptions, spec: EnvSpec, names: Sequence[str]) -> None:
    """Add the speeds of all trainers and their ratios."""
    speeds: dict[str, list[float]] = {name: [] for name in names}
    of_cpu: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            meter = Meter(spec, iterations=options.warmup + options.iterations)
            train(name, options, meter)
            speed, speed_of_cpu = meter.speeds(options.warmup)
            speeds[name].append(speed)
            of_cpu[name].append(speed_of_cpu)
            note(f"round {number + 1}/{options.rounds}: {name:8s} {speed:10,.0f} env steps/s")
    settings = {"task": options.task, **describe(options.ppo), "cores": threads.available_cores()}
    settings |= {"torch_threads": options.threads or threads.torch_cores()}
    settings |= {"warmup": options.warmup, "iterations": options.iterations}
    for name in names:
        of_rounds = [round(speed) for speed in speeds[name]]
        report.add(f"train_{name}", median(speeds[name]), "env steps/s", **settings, of_rounds=of_rounds)
        report.add(f"train_{name}_cpu", median(of_cpu[name]), "env steps/CPU s", **settings)
    for mine in [name for name in names if name not in PEERS]:
        for peer in options.peers:
            report.ratio(f"{mine}_over_{peer}", paired(speeds[mine], speeds[peer]))
            report.add(f"{mine}_over_{peer}_cpu", paired(of_cpu[mine], of_cpu[peer]), "ratio of env steps/CPU s")
    if {"local", "sync"} <= speeds.keys():
        report.ratio("local_over_sync", paired(speeds["local"], speeds["sync"]))


def time_to_level(report: Report, options: CompareOptions, spec: EnvSpec, names: Sequence[str]) -> None:
    """Add the seconds to the level of every trainer, the median over its trainings, and what each of them showed."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(options.ppo.seed, options.ppo.seed + options.seeds):
        for name in names:
            meter = Meter(spec, env_steps=options.total_steps, level=options.level)
            train(name, replace(options, ppo=replace(options.ppo, seed=seed)), meter)
            last = meter.marks[-1]
            note(f"{name}: {meter.quality:.4g} after {last.env_steps:,} env steps, {last.wall_s:.0f} s (seed {seed})")
            runs[name].append({"seed": seed, **_course(meter)})
    seconds = {name: median(run["seconds"] for run in of_name) for name, of_name in runs.items()}
    for name, of_name in runs.items():
        same = {} if name == "recipe" else describe(options.ppo)
        facts = {"level": options.level, "of": "success" if spec.has_success else "return", "runs": of_name}
        report.add(f"time_{name}", seconds[name], "s", task=options.task, **same, **facts)
    reached = {name for name, of_name in runs.items() if all(run["reached"] for run in of_name)}
    for mine in ("local", "recipe"):
        for peer in options.peers:
            if {mine, peer} <= reached:
                report.ratio(f"{peer}_time_over_{mine}", seconds[peer] / seconds[mine])


def _course(meter: Meter) -> dict[str, Any]:
    """Return where a training ended, and its curve of at most some 40 points."""
    last = meter.marks[-1]
    curve = [
        [mark.env_steps, round(mark.wall_s, 2), round(meter.quality_of(mark), 4)]
        for mark in [*meter.marks[: -1 : max(1, len(meter.marks) // 40)], last]
        if not math.isnan(meter.quality_of(mark))
    ]
    return {
        "reached": meter.reached,
        "quality": None if math.isnan(meter.quality) else round(meter.quality, 4),
        "seconds": round(last.wall_s, 2),
        "env_steps": last.env_steps,
        "load_1min": round(os.getloadavg()[0], 2),
        "curve_steps_seconds_quality": curve,
    }


def train(name: str, options: CompareOptions, meter: Meter) -> None:
    """Train with one of ours or of the peers until the meter ends it."""
    if name not in PEERS:
        ours.train(options.task, meter, options.ppo, name, options.threads)
        return
    cores = threads.available_cores()
    threads.use(options.threads or threads.torch_cores())
    config = run_config.compose_run(ours.overrides(options.task, meter.spec, options.ppo) | {"runtime": "sync"})
    learn: Callable[[MeteredEnv, PPOSettings], None]
    learn = importlib.import_module(f"embodied.benchmarks.peers.{name}").train
    with closing(factories.make_env(config, options.ppo.num_envs, cores)) as env, quiet():
        learn(MeteredEnv(env, meter, options.ppo), options.ppo)


@contextlib.contextmanager
def quiet() -> Any:
    """Drop what other libraries print."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
    sys.stdout.flush()
