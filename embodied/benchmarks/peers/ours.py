"""Our own PPO, in either runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from embodied.benchmarks.peers.meter import Meter, PPOSettings
from embodied.core.spec import Box, EnvSpec
from embodied.session import config as run_config
from embodied.trainers.reinforcement import build


def recipe(task: str, spec: EnvSpec, settings: PPOSettings) -> dict[str, Any]:
    """Return the configuration of a run with the task's own recipe. Only the seed is that of ``settings``."""
    policy = "gaussian" if isinstance(spec.action, Box) else "categorical"
    ends = {"runtime.eval_every": 0, "eval_episodes": 0}
    return {"task": task, "policy": policy, **ends, "seed": settings.seed, "device": "cpu"}


def overrides(task: str, spec: EnvSpec, settings: PPOSettings) -> dict[str, Any]:
    """Return the configuration of a run with ``settings``."""
    std = {"policy.init_std": settings.init_std} if isinstance(spec.action, Box) else {}
    same = {
        "policy.horizon": 1,
        "policy.execute": 1,
        "policy.actor_hidden": list(settings.hidden),
        "policy.critic_hidden": list(settings.hidden),
        "algo.epochs": settings.epochs,
        "algo.num_minibatches": settings.num_minibatches,
        "algo.learning_rate": settings.learning_rate,
        "algo.critic_learning_rate": None,  # the actor's; the gradients of both are then clipped together
        "algo.schedule": "fixed",
        "algo.gamma": settings.gamma,
        "algo.gae_lambda": settings.gae_lambda,
        "algo.clip_range": settings.clip_range,
        "algo.value_coef": settings.value_coef,
        "algo.entropy_coef": settings.entropy_coef,
        "algo.max_grad_norm": settings.max_grad_norm,
        "num_envs": settings.num_envs,
        "runtime.decisions": settings.decisions,
    }
    return recipe(task, spec, settings) | std | same


def train(task: str, meter: Meter, settings: PPOSettings, runtime: str, num_threads: int) -> None:
    """Train in ``runtime``, or by the task's ``recipe``, until the meter ends it.

    num_threads: of torch; 0 is the runtime's own choice.
    """
    parts: dict[str, Any] = {f"runtime.{part}_threads": num_threads for part in ("actor", "learner")}
    if runtime != "recipe":
        parts |= overrides(task, meter.spec, settings) | {"runtime": runtime}
    config = run_config.compose_run(recipe(task, meter.spec, settings) | parts)
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as trainer:
        meter.boundary(0)
        for iteration in trainer.iterations():
            meter.record(iteration.episodes)
            if not meter.boundary(iteration.env_steps):
                break
