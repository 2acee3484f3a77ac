"""Training throughput and time to a level, of our PPO and of other libraries' with the same settings on the same env.

All but ``recipe`` have the same settings (``PPOSettings``) and step the same pool. Times exclude building. Ratios of
times are of trainers that reached the level every time. docs/benchmarks.md has the ratios and their results.
"""

import io
import json
import tempfile
from collections.abc import Sequence
from contextlib import closing, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied.benchmarks.measure import Report, in_turns, note, paired, run_module
from embodied.benchmarks.peers.meter import Finished, Mark, Meter, PPOSettings, Rates, metered
from embodied.benchmarks.peers.own import interpreter
from embodied.core.errors import UserError
from embodied.core.options import NonNegativeInt, PositiveInt, config_dataclass, one_of
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import Box, EnvSpec, MultiDiscrete
from embodied.envs.views.stepper import Stepper, missing_package
from embodied.runtime import threads
from embodied.session import factories
from embodied.session.config import compose_run
from embodied.trainers.reinforcement import build

PEERS = {"sb3": "stable_baselines3", "rsl_rl": "rsl_rl", "torchrl": "torchrl"}
"""Names of peers and the packages that they need."""
UNILAB = ("unilab", "unilab_own")
"""Peers in an environment of their own (``own.py``): UniLab with the settings that all share, and with its own."""
OWN_SETTINGS = ("recipe", "unilab_own")
"""Trainers with settings of their own, which are only timed to a level."""


@config_dataclass
class CompareOptions:
    """Options of ``bench train`` with peers."""

    task: str
    peers: Annotated[tuple[Annotated[str, one_of((*PEERS, *UNILAB))], ...], Field(min_length=1)]
    ours: tuple[Literal["local", "sync", "recipe"], ...] = ("local", "sync")
    """Runtimes of ours beside them; [] for the peers alone. ``recipe``: the task's own settings, for level= alone."""
    rounds: PositiveInt = 7
    iterations: PositiveInt = 6
    warmup: PositiveInt = 2
    """Rounds of the throughput, iterations of a training in a round that count, and iterations before them."""
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
    unilab: PPOSettings = PPOSettings(
        num_envs=2048,
        decisions=24,
        hidden=(512, 256, 128),
        learning_rate=1e-3,
        value_coef=1.0,
        entropy_coef=0.01,
        max_grad_norm=1.0,
    )
    """Settings of ``unilab_own``: those of unilab/conf/appo/config.yaml of unilab 1.5.2; the rest is in unilab.py."""

    def __post_init__(self) -> None:
        if self.level is None and (set(OWN_SETTINGS) & {*self.ours, *self.peers} or self.seeds > 1):
            what = "ours=recipe, peers=unilab_own and seeds="
            raise UserError(f"{what} are of the time to a level: give level=<success or return>")


def compare(report: Report, short: bool, options: CompareOptions) -> None:
    """Measure; ``short`` shows that it works. UserError for a missing library, or one that cannot learn the task."""
    if short:
        ppo, own = (replace(one, num_envs=8, decisions=8, epochs=1) for one in (options.ppo, options.unilab))
        options = replace(options, ppo=ppo, unilab=own, rounds=1, iterations=1, warmup=1, total_steps=256)
    for package in PEERS.values() if set(options.peers) & PEERS.keys() else ():
        if find_spec(package) is None:
            raise missing_package(package)
    if set(options.peers) & set(UNILAB):
        interpreter("unilab-rl")
    spec = spec_of(options)
    if isinstance(spec.action, MultiDiscrete):
        raise UserError(f"task {options.task} makes several choices at once, which the peers are not set up for")
    if spec.action_mask:
        raise UserError(f"task {options.task} forbids some choices by masks, which the peers do not read")
    for name in set(options.peers) - {"sb3", "torchrl"} if not isinstance(spec.action, Box) else ():
        raise UserError(f"peers={name}: {name} has no discrete actions, as task {options.task} needs them")
    names = (*options.ours, *options.peers)
    throughput(report, options, spec, [name for name in names if name not in OWN_SETTINGS])
    if options.level is not None:
        time_to_level(report, options, spec, names, options.level)


def throughput(report: Report, options: CompareOptions, spec: EnvSpec, names: Sequence[str]) -> None:
    """Add the speeds of all trainers and their ratios."""

    def rates(name: str) -> Rates:
        meter = Meter(spec, iterations=options.warmup + options.iterations)
        with meter.counting():
            train(name, options, meter)
        found = meter.rates(options.warmup)
        note(f"{name:8s} {found}")
        return found

    results = in_turns({name: partial(rates, name) for name in names}, options.rounds, warm_up=0)
    settings = {"task": options.task, **asdict(options.ppo)} | {"cores": threads.available_cores()}
    settings |= {"torch_threads": options.threads or threads.torch_cores()}
    settings |= {"warmup": options.warmup, "iterations": options.iterations}
    for name, found in results.items():
        updates, ppo = median(one.updates for one in found), options.ppo
        samples = updates * (ppo.num_envs * ppo.decisions // ppo.num_minibatches)
        learned = {"updates_per_step": round(updates, 6), "samples_per_step": round(samples, 3)}
        of_rounds = [round(one.wall) for one in found]
        report.add(f"train_{name}", median(of_rounds), "env steps/s", **settings, **learned, of_rounds=of_rounds)
        report.add(f"train_{name}_cpu", median(one.cpu for one in found), "env steps/CPU s", **settings)
    for mine, peer in product([name for name in options.ours if name != "recipe"], set(options.peers) & set(names)):
        pairs = list(zip(results[mine], results[peer], strict=True))
        report.ratio(f"{mine}_over_{peer}", median(one.wall / other.wall for one, other in pairs))
        cpu = median(one.cpu / other.cpu for one, other in pairs)
        report.add(f"{mine}_over_{peer}_cpu", cpu, "ratio of env steps/CPU s")
        if all(other.updates for _, other in pairs):  # in a short round UniLab's learner may miss every rollout
            updates = median(one.wall * one.updates / (other.wall * other.updates) for one, other in pairs)
            report.add(f"{mine}_over_{peer}_updates", updates, "ratio of gradient updates/s")
    if {"local", "sync"} <= results.keys():
        speeds = ([one.wall for one in results[name]] for name in ("local", "sync"))
        report.ratio("local_over_sync", paired(*speeds))


def time_to_level(report: Report, options: CompareOptions, spec: EnvSpec, names: Sequence[str], level: float) -> None:
    """Add the seconds to the level of every trainer: the median over its trainings, and where each ended."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(options.ppo.seed, options.ppo.seed + options.seeds):
        for name in names:
            meter = Meter(spec, env_steps=options.total_steps, level=level)
            train(name, replace(options, ppo=replace(options.ppo, seed=seed)), meter)
            runs[name].append({"seed": seed, "reached": meter.reached, **asdict(meter.marks[-1])})
            note(f"{name}: {runs[name][-1]}")
    seconds = {name: median(run["wall_s"] for run in of_name) for name, of_name in runs.items()}
    for name, of_name in runs.items():
        settings = {"task": options.task} | ({} if name in OWN_SETTINGS else asdict(options.ppo))
        settings |= {"level": level, "of": "success" if spec.has_success else "return", "runs": of_name}
        report.add(f"time_{name}", seconds[name], "s", **settings)
    reached = {name for name, of_name in runs.items() if all(run["reached"] for run in of_name)}
    for mine in ("local", "recipe"):
        for peer in options.peers:
            if {mine, peer} <= reached:
                report.ratio(f"{peer}_time_over_{mine}", seconds[peer] / seconds[mine])


def train(name: str, options: CompareOptions, meter: Meter) -> None:
    """Train with one of ours or of the peers until the meter ends it."""
    if name in PEERS:
        from embodied.benchmarks.peers.libraries import LIBRARIES

        threads.use(options.threads or threads.torch_cores())
        with closing(peer_stepper(options, meter)) as stepper, redirect_stdout(io.StringIO()), suppress(Finished):
            LIBRARIES[name](stepper, options.ppo)
        return
    if name in UNILAB:
        own = name == "unilab_own"
        options = replace(options, ppo=replace(options.unilab, seed=options.ppo.seed)) if own else options
        limits = {key: getattr(meter, key) for key in ("iterations", "env_steps", "level")}
        request = json.dumps({"options": asdict(options), "limits": limits, "own": own})
        found = run_module("embodied.benchmarks.peers.unilab", request, python=interpreter("unilab-rl"))
        meter.marks = [Mark(**mark) for mark in found]
        return
    parts: dict[str, Any] = {f"runtime.{part}_threads": options.threads for part in ("actor", "learner")}
    if name != "recipe":
        parts |= shared_settings(meter.spec, options.ppo) | {"runtime": name}
    config = compose_run(recipe(options, meter.spec) | parts)
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as trainer:
        meter.boundary(0)
        for iteration in trainer.iterations():
            meter.record(iteration.episodes)
            if not meter.boundary(iteration.env_steps):
                break


def spec_of(options: CompareOptions) -> EnvSpec:
    return factories.make_spec(compose_run({"task": options.task, "policy": "gaussian"}), cameras=())


def peer_stepper(options: CompareOptions, meter: Meter) -> Stepper:
    """Return the environments of a peer, which end its training by Finished."""
    settings = options.ppo
    config = compose_run(recipe(options, meter.spec) | shared_settings(meter.spec, settings))
    env = factories.make_env(config, settings.num_envs, threads.available_cores())
    seed = first_env_seed(Purpose.TRAINING, settings.seed)
    return Stepper(metered(env, meter, settings.decisions), seed=seed, splits=None, stagger=True, stages=True)


def recipe(options: CompareOptions, spec: EnvSpec) -> dict[str, Any]:
    """Return the configuration of a run with the task's own recipe. Only the seed is that of ``options.ppo``."""
    policy = "gaussian" if isinstance(spec.action, Box) else "categorical"
    ends = {"runtime.eval_every": 0, "eval_episodes": 0}
    return {"task": options.task, "policy": policy, **ends, "seed": options.ppo.seed, "device": "cpu"}


def shared_settings(spec: EnvSpec, settings: PPOSettings) -> dict[str, Any]:
    """Return ``settings`` as overrides of the task's own recipe."""
    architecture = {"num_envs", "decisions", "hidden", "init_std", "seed"}
    hidden = {f"policy.{part}_hidden": list(settings.hidden) for part in ("actor", "critic")}
    return {
        "policy.horizon": 1, "policy.execute": 1, **hidden,
        **({"policy.init_std": settings.init_std} if isinstance(spec.action, Box) else {}),
        **{f"algo.{name}": value for name, value in asdict(settings).items() if name not in architecture},
        "algo.critic_learning_rate": None,  # the actor's; the gradients of both are then clipped together
        "algo.schedule": "fixed", "num_envs": settings.num_envs, "runtime.decisions": settings.decisions,
    }  # fmt: skip
