"""Small runs for tests of the runtime: point masses, a Gaussian policy, PPO; a batch takes milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.algorithm import Algorithm
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.envs.episodes.sampler import first_episodes
from embodied.policies.config import GaussianConfig
from embodied.policies.gaussian import GaussianPolicy
from embodied.runtime.loop import Iteration, Runtime
from embodied.runtime.recipe import Recipe, SamplerFactory
from embodied.runtime.registry import RUNTIMES, build_runtime
from tests.runtime.point_env import PointEnv, point_sampler

NUM_ENVS = 12
DECISIONS = 4


def make_policy(spec: EnvSpec) -> GaussianPolicy:
    config = GaussianConfig(horizon=3, execute=2, actor_hidden=(16,), critic_hidden=(16,))
    return GaussianPolicy(spec, config)


def make_algorithm(policy: Policy) -> Algorithm:
    return PPO(policy, PPOConfig(epochs=2, num_minibatches=2), seed=3, device=torch.device("cpu"))


def build(
    make_env: Callable[[int, int], VecEnv] = lambda num_envs, _: PointEnv(num_envs),
    make_algorithm: Callable[[Policy], Algorithm] = make_algorithm,
    make_policy: Callable[[EnvSpec], Policy] = make_policy,
    seed: int = 1,
    num_envs: int = NUM_ENVS,
    make_sampler: SamplerFactory = point_sampler,
    make_eval_env: Callable[[int, int], VecEnv] = lambda num_envs, _: PointEnv(num_envs),
    confirm_at: float | None = None,
    **options: Any,
) -> Runtime:
    """A runtime on one core; options are those of the runtime."""
    defaults = {"decisions": DECISIONS, "device": "cpu", "eval_episodes": 5, "watchdog_s": 0.0, "groups_per_worker": 2}
    threads = {"sim_threads": 1, "actor_threads": 1, "learner_threads": 1}
    recipe = Recipe(
        RUNTIMES[options.get("name", "sync")].config(**(defaults | threads | options)),
        num_envs=num_envs,
        seed=seed,
        make_env=make_env,
        make_policy=make_policy,
        make_algorithm=make_algorithm,
        make_sampler=make_sampler,
        make_eval_env=make_eval_env,
        eval_plans=first_episodes,
        confirm_at=confirm_at,
    )
    return build_runtime(recipe)


def iterate(runtime: Runtime, num: int) -> list[Iteration]:
    """Exactly ``num`` iterations."""
    stop = threading.Event()
    done = []
    for iteration in runtime.iterations(stop_event=stop):
        done.append(iteration)
        if len(done) == num:
            stop.set()
    return done


def runtime_threads() -> list[str]:
    """Names of the runtime's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("embodied ")]
