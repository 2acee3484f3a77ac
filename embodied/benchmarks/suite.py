"""Other people's tasks with ``task=`` alone, a process for every run, and stable-baselines3's PPO with its defaults.

    ours   python -m embodied.train task=<task> total_steps=<steps> seed=<seed>
    sb3    PPO("MlpPolicy", env) on our view of the same task, with one env; its wall-clock holds no evaluation

A row of a run has its return, or its success where the task has one: of the deterministic policy, in episodes that no
stopping rule saw. Its ``curve`` has the returns of training episodes, which explore. Rows are written as they come.
What ``out=`` has already is not run again; a run of other steps takes its place.

    <task>_over_sb3, _over_zoo, _over_cleanrl    median over seeds over the peer's median, or over the published figure,
                                                 with which full runs alone are compared; the inverse where both are
                                                 negative
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from embodied.benchmarks.measure import Report, built, note, run_module
from embodied.core.options import PositiveInt, Seed, config_dataclass, one_of
from embodied.report.metrics import EVALUATED_STEPS, METRICS_FILE, read_metrics
from embodied.session.defaults import compose_new

POINTS = 40  # of a curve that is kept


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the suite, and published returns of PPO.

    zoo: rl-baselines3-zoo after ``zoo_steps``, its benchmark.md at 22e3ff2. cleanrl: CleanRL after 500,000 steps, its
    docs/rl-algorithms/ppo.md at fe8d8a0.
    """

    task: str
    steps: int
    zoo: float | None = None
    zoo_steps: int | None = None
    cleanrl: float | None = None


TASKS = {
    "CartPole": Task("gym/CartPole-v1", 50_000, 500.0, 100_000, 490.04),
    "Acrobot": Task("gym/Acrobot-v1", 200_000, -73.506, 1_000_000, -86.36),
    "Pendulum": Task("gym/Pendulum-v1", 100_000, -172.225, 100_000),
    "MountainCarContinuous": Task("gym/MountainCarContinuous-v0", 50_000, 88.343, 20_000),
    "LunarLander": Task("envpool/LunarLander-v3", 1_000_000, 242.119, 1_000_000),  # zoo: v2
    "BipedalWalker": Task("envpool/BipedalWalker-v3", 2_000_000, 287.939, 5_000_000),
    "HalfCheetah": Task("envpool/HalfCheetah-v5", 1_000_000, 5819.099, 1_000_000),  # zoo: v3, as all below
    "Hopper": Task("envpool/Hopper-v5", 500_000, 2410.435, 1_000_000),
    "Walker2d": Task("envpool/Walker2d-v5", 1_000_000, 3478.798, 1_000_000),
    "Ant": Task("envpool/Ant-v5", 1_000_000, 1327.158, 1_000_000),
    "ButtonPress": Task("envpool/MetaWorld/ButtonPressTopdown-v3", 400_000),
    "DrawerOpen": Task("envpool/MetaWorld/DrawerOpen-v3", 400_000),
}
"""The fast part, which runs by default."""
SLOW_TASKS = {
    "Highway": Task("gym/highway-fast-v0", 30_000),
    "CheetahRun": Task("envpool/CheetahRun-v1", 1_000_000),  # of dm_control
    "PushCube": Task("maniskill/PushCube-v1", 1_000_000),
    "Pong": Task("envpool/Pong-v5", 1_000_000, 20.989, 10_000_000),
}
ALL_TASKS = TASKS | SLOW_TASKS


@config_dataclass
class SuiteOptions:
    """Options after ``bench suite``."""

    tasks: tuple[Annotated[str, one_of(ALL_TASKS)], ...] = tuple(TASKS)
    seeds: tuple[Seed, ...] = (0, 1, 2)
    policy: str | None = None
    """Policy of ours in place of the one that follows from the task; its rows are named by it."""
    peer: Literal["none", "sb3"] = "none"
    max_steps: PositiveInt | None = None
    """Cap on the steps of every run, for a first look."""


def measure(report: Report, short: bool, options: SuiteOptions) -> None:
    """Run what ``out=`` lacks. A run that fails, as where a simulator is missing, is noted and left out.

    UserError if ``out=`` is no result of the suite.
    """
    if short:
        options = SuiteOptions(tasks=("CartPole",), seeds=(0,), peer=options.peer, max_steps=4096)
    if report.out is not None:
        report.read(report.out)
        add_ratios(report)
    trainers = {options.policy or "ours": partial(ours, policy=options.policy)} | (
        {"sb3": sb3} if options.peer == "sb3" else {}
    )
    for seed in options.seeds:
        for name in options.tasks:
            task = ALL_TASKS[name]
            steps = min(task.steps, options.max_steps or task.steps)
            for trainer, train in trainers.items():
                key, words = f"{name}/{trainer}/{seed}", {"task": task.task, "total_steps": steps, "seed": seed}
                if any(row["name"] == key and words.items() <= row["settings"].items() for row in report.rows):
                    continue
                note(f"--- {key}, {steps:,} steps")
                found = built(key, partial(train, task.task, steps, seed))
                if found is None:
                    continue
                unit = "success" if "success_at_end" in found["eval"] else "return"
                value = found["eval"]["success_at_end" if unit == "success" else "return_mean"]
                report.rows = [row for row in report.rows if row["name"] != key]  # of other steps
                report.add(key, value, unit, **words, trainer=trainer, **found)
                add_ratios(report)
                report.write()


def add_ratios(report: Report) -> None:
    """Set the ratios of all tasks that have runs of ours: medians of runs of equal steps.

    Published figures are compared with full runs, stable-baselines3's with the longest runs that both have.
    """
    for name, task in ALL_TASKS.items():
        ours, sb3 = (returns(report, f"{name}/{trainer}/") for trainer in ("ours", "sb3"))
        longest = max(ours.keys() & sb3.keys(), default=0)
        full = ours.get(task.steps)
        pairs = {"sb3": (ours.get(longest), sb3.get(longest)), "zoo": (full, task.zoo), "cleanrl": (full, task.cleanrl)}
        for reference, (own, value) in pairs.items():
            report.ratios.pop(f"{name}_over_{reference}", None)  # of runs that others have replaced
            if own is not None and value is not None and own * value > 0:
                ratio = own / value if value > 0 else value / own
                report.ratios[f"{name}_over_{reference}"] = float(f"{ratio:.4g}")


def returns(report: Report, prefix: str) -> dict[int, float]:
    """Return the median over seeds by the steps of the runs."""
    found: dict[int, list[float]] = {}
    for row in report.rows:
        if row["name"].startswith(prefix):
            found.setdefault(row["settings"]["total_steps"], []).append(row["value"])
    return {steps: median(values) for steps, values in found.items()}


def thinned(curve: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return some ``POINTS`` points of a curve."""
    every = max(1, len(curve["env_steps"]) // POINTS)
    return {key: [round(value, 2) for value in values[::every]] for key, values in curve.items()}


def ours(task: str, total_steps: int, seed: int, policy: str | None = None) -> dict[str, Any]:
    """Train with the command; return its result, its curve and its evaluations during training."""
    words = [f"task={task}", f"total_steps={total_steps}", f"seed={seed}", *([f"policy={policy}"] if policy else [])]
    with tempfile.TemporaryDirectory() as folder:
        result = run_module("embodied.train", *words, f"out={folder}/run")
        rows = read_metrics(Path(folder) / "run" / METRICS_FILE)
    named = {"env_steps": "env_steps", "wall_s": "wall_s", "return": "rollout/return_mean"}
    curve = {key: [row[of] for row in rows if row.get("rollout/return_mean") is not None] for key, of in named.items()}
    evaluations = [
        {"env_steps": row[EVALUATED_STEPS], "wall_s": row["wall_s"]}
        | {key: row[key] for key in row if key.startswith("eval/") and key != EVALUATED_STEPS}
        for row in rows
        if "eval/return_mean" in row
    ]
    kept = {key: result[key] for key in ("env_steps", "wall_s", "eval")}
    return kept | {"evaluations": evaluations, "curve": thinned(curve)}


def sb3(task: str, total_steps: int, seed: int) -> dict[str, Any]:
    """Train stable-baselines3's PPO with its defaults; return the same without evaluations."""
    episodes = compose_new({"task": task}).eval_episodes
    found: dict[str, Any] = run_module(
        "embodied.benchmarks.peers.defaults", task, *map(str, (total_steps, seed, episodes))
    )
    return found | {"curve": thinned(found["curve"])}
