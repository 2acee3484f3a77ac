"""Training throughput and time to a level, of our PPO and of other libraries' with the same settings on the same env.

All but ``recipe`` have the same settings (``PPOSettings``) and step the same pool. Times exclude building. Ratios of
times are of trainers that reached the level every time. docs/benchmarks.md has the ratios and their results.
"""

import io
import tempfile
from collections.abc import Sequence
from contextlib import closing, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied.benchmarks.measure import Report, in_turns, note, paired
from embodied.benchmarks.peers.meter import Finished, Meter, MeteredEnv, PPOSettings
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


@config_dataclass
class CompareOptions:
    """Options of ``bench train`` with peers."""

    task: str
    peers: Annotated[tuple[Annotated[str, one_of(PEERS)], ...], Field(min_length=1)]
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

    def __post_init__(self) -> None:
        if self.level is None and ("recipe" in self.ours or self.seeds > 1):
            raise UserError("ours=recipe and seeds= are of the time to a level: give level=<success or return>")


def compare(options: CompareOptions, short: bool) -> Report:
    """Measure; ``short`` shows that it works. UserError for a missing library, or one that cannot learn the task."""
    if short:
        small = replace(options.ppo, num_envs=8, decisions=8, epochs=1)
        options = replace(options, ppo=small, rounds=1, iterations=1, warmup=1, total_steps=256)
    for package in PEERS.values():
        if find_spec(package) is None:
            raise missing_package(package)
    spec = factories.make_spec(compose_run({"task": options.task, "policy": "gaussian"}), cameras=())
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
        time_to_level(report, options, spec, names, options.level)
    return report


def throughput(report: Report, options: CompareOptions, spec: EnvSpec, names: Sequence[str]) -> None:
    """Add the speeds of all trainers and their ratios."""

    def speeds(name: str) -> tuple[float, float]:
        meter = Meter(spec, iterations=options.warmup + options.iterations)
        train(name, options, meter)
        found = meter.speeds(options.warmup)
        note(f"{name:8s} {found[0]:10,.0f} env steps/s")
        return found

    results = in_turns({name: partial(speeds, name) for name in names}, options.rounds, warm_up=0)
    of_wall = {name: [wall for wall, _ in found] for name, found in results.items()}
    of_cpu = {name: [cpu for _, cpu in found] for name, found in results.items()}
    settings = {"task": options.task, **asdict(options.ppo)} | {"cores": threads.available_cores()}
    settings |= {"torch_threads": options.threads or threads.torch_cores()}
    settings |= {"warmup": options.warmup, "iterations": options.iterations}
    for name in names:
        of_rounds = [round(speed) for speed in of_wall[name]]
        report.add(f"train_{name}", median(of_wall[name]), "env steps/s", **settings, of_rounds=of_rounds)
        report.add(f"train_{name}_cpu", median(of_cpu[name]), "env steps/CPU s", **settings)
    for mine in [name for name in names if name not in PEERS]:
        for peer in options.peers:
            report.ratio(f"{mine}_over_{peer}", paired(of_wall[mine], of_wall[peer]))
            report.add(f"{mine}_over_{peer}_cpu", paired(of_cpu[mine], of_cpu[peer]), "ratio of env steps/CPU s")
    if {"local", "sync"} <= of_wall.keys():
        report.ratio("local_over_sync", paired(of_wall["local"], of_wall["sync"]))


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
        settings = {"task": options.task} if name == "recipe" else {"task": options.task, **asdict(options.ppo)}
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
        train_peer(name, options, meter)
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


def train_peer(name: str, options: CompareOptions, meter: Meter) -> None:
    """Train with a peer and drop what the library prints."""
    from embodied.benchmarks.peers.libraries import LIBRARIES

    settings = options.ppo
    threads.use(options.threads or threads.torch_cores())
    config = compose_run(recipe(options, meter.spec) | shared_settings(meter.spec, settings))
    env = factories.make_env(config, settings.num_envs, threads.available_cores())
    seed = first_env_seed(Purpose.TRAINING, settings.seed)
    stepper = Stepper(MeteredEnv(env, meter, settings.decisions), seed=seed, splits=None, stagger=True, stages=True)
    with closing(stepper), redirect_stdout(io.StringIO()), suppress(Finished):
        LIBRARIES[name](stepper, settings)


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
