"""Runs whose parts take at least a given time: slow simulators, robots, remote policies, accelerators.

    step of an env group: lognormal      call of the actor server: infer_s      update: update_s

Each part does its real work and sleeps for the rest, so the cores stay free, as if the part had a machine of its own.
Everything else is a run like any other: registries, factories, runtime, workers, actor server, ledger and PPO.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied.algos import ALGORITHMS
from embodied.algos.ppo import PPO
from embodied.core.episodes import EpisodeSampler
from embodied.core.options import from_mapping
from embodied.core.protocols import Algorithm, Metrics, Policy, VecEnv
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment, Obs, PolicySample, Timestep
from embodied.policies.gaussian import GaussianPolicy
from embodied.runtime import build_runtime
from embodied.runtime.base import LoopRuntime
from embodied.session import config as run_config
from embodied.session import factories
from embodied.session.config import RunConfig, options_of

ONE_THREAD = {"runtime.sim_threads": 1, "runtime.actor_threads": 1, "runtime.learner_threads": 1}
LIGHT = {
    "policy.horizon": 1, "policy.execute": 1, "policy.actor_hidden": [32, 32], "policy.critic_hidden": [32, 32],
    "algo.epochs": 2, "algo.num_minibatches": 1,
}  # fmt: skip
"""Overrides of a run that computes little, so that the latencies are what it takes."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of the time of a step: lognormal with this mean."""

    mean_s: float
    """Mean, s."""
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0 is a constant. At 1, one step in 50 takes more than 4.7 times the mean."""

    def stream(self, seed: object) -> Iterator[float]:
        """Yield draws, s, that depend on ``seed`` alone."""
        rng = random.Random(str(seed))
        while True:
            yield self.mean_s * rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)


@dataclass(frozen=True, slots=True)
class Setup:
    """Parts of a run, and the least time that each takes."""

    step: Latency
    """One step of an env group: a decision with its chunk of actions."""
    workers: int
    """Env workers, a thread each."""
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
        return max(self.groups * self.decisions * self.step.mean_s, self.update_s)

    def overrides(self, mode: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides of a run in a mode: keys of ``runtime``."""
        return {
            "task": "reach", "policy": "gaussian", "runtime": "local", "runtime.num_env_workers": self.workers,
            "runtime.groups_per_worker": self.groups, "num_envs": self.workers * self.groups * self.envs,
            "runtime.decisions": self.decisions, "runtime.eval_every": 0, "eval_episodes": 0, "device": "cpu",
            **ONE_THREAD, **{f"runtime.{key}": value for key, value in mode.items()},
        }  # fmt: skip


class SlowEnv:
    """A ``VecEnv`` whose steps take at least as long as the draws. drawn_s, taken_s: sums over ``steps`` steps."""

    def __init__(self, env: VecEnv, draws: Iterator[float]) -> None:
        self.env, self.draws = env, draws
        self.spec, self.num_envs, self.device = env.spec, env.num_envs, env.device
        self.steps, self.drawn_s, self.taken_s = 0, 0.0, 0.0

    def reset(self, sampler: EpisodeSampler) -> Obs:
        return self.env.reset(sampler)

    def step(self, action: Tensor) -> Timestep:
        began_s, draw_s = time.perf_counter(), next(self.draws)
        timestep = self.env.step(action)
        _sleep_until(began_s + draw_s)
        self.steps, self.drawn_s = self.steps + 1, self.drawn_s + draw_s
        self.taken_s += time.perf_counter() - began_s
        return timestep

    def close(self) -> None:
        self.env.close()


class SlowPolicy(GaussianPolicy):
    """A Gaussian policy whose calls of ``act`` take at least ``infer_s``. calls: their number."""

    infer_s = 0.0
    calls = 0

    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        began_s = time.perf_counter()
        sample = super().act(obs, noise)
        self.calls += 1
        _sleep_until(began_s + self.infer_s)
        return sample


class SlowPPO(PPO):
    """PPO whose updates take at least ``update_s``."""

    update_s = 0.0

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        began_s = time.perf_counter()
        metrics = super().update(fragments, version)
        _sleep_until(began_s + self.update_s)
        return metrics


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured of a run after its warm-up."""

    iterations: int
    """Batches."""
    env_steps: int
    """Control steps that were learned from."""
    wall_s: float
    """Wall-clock seconds."""
    staleness: float
    """Mean age of the decisions, versions."""
    dropped: float
    """Share of the decisions that were masked because of their age."""
    overhead_s: float
    """Seconds by which a step took longer than its draw, mean."""
    call_s: float
    """Seconds of a call of the policy, mean, with all that the actor server does for it."""
    update_s: float
    """Seconds of an update, mean."""

    @property
    def speed(self) -> float:
        """Control steps per second."""
        return self.env_steps / self.wall_s


class Counters(NamedTuple):
    """Sums over a run so far."""

    now_s: float
    env_steps: int
    steps: int
    late_s: float
    calls: int

    @classmethod
    def of(cls, runtime: LoopRuntime) -> Counters:
        """Read them."""
        slow = [cursor.env for worker in runtime.workers for cursor in worker.cursors]
        envs = [env for env in slow if isinstance(env, SlowEnv)]
        assert isinstance(runtime.actor.policy, SlowPolicy)
        late_s = sum(env.taken_s - env.drawn_s for env in envs)
        steps = sum(env.steps for env in envs)
        return cls(time.perf_counter(), runtime.env_steps, steps, late_s, runtime.actor.policy.calls)


def build(setup: Setup, config: RunConfig, draw: int) -> LoopRuntime:
    """Build the runtime of a run with slow parts. draw: seed of the latencies; equal ones give equal draws."""
    number = count()

    def make_env(num_envs: int, num_threads: int) -> VecEnv:
        env = factories.make_acting_env(config, num_envs, num_threads)
        return SlowEnv(env, setup.step.stream((draw, next(number))))

    def make_policy(spec: EnvSpec) -> Policy:
        policy = SlowPolicy(spec, factories.policy_options(config))
        policy.infer_s = setup.infer_s
        return policy

    def make_algorithm(policy: Policy) -> Algorithm:
        options = from_mapping(ALGORITHMS["ppo"].config, options_of(config.algo), "algo")
        algorithm = SlowPPO(policy, options, seed=config.seed, device=torch.device("cpu"))
        algorithm.update_s = setup.update_s
        return algorithm

    runtime = build_runtime(
        config.runtime_config(), num_envs=config.num_envs, seed=config.seed, make_env=make_env,
        make_sampler=partial(factories.make_sampler, config), make_policy=make_policy, make_algorithm=make_algorithm,
    )  # fmt: skip
    assert isinstance(runtime, LoopRuntime)
    return runtime


def measured(setup: Setup, mode: Mapping[str, Any], draw: int, iterations: int, warmup: int = 2) -> Run:
    """Train for some iterations with ``LIGHT`` and return what those after the warm-up took."""
    config = run_config.compose_run({**setup.overrides(mode), **LIGHT})
    names = ("async/staleness_mean", "async/dropped", "perf/infer_s", "perf/learn_s")
    sums: defaultdict[str, float] = defaultdict(float)
    with build(setup, config, draw) as runtime:
        for iteration in runtime.iterations():
            if iteration.index > warmup:
                for name in names:
                    sums[name] += iteration.metrics[name]
            if iteration.index == warmup:
                before = Counters.of(runtime)
            if iteration.index == warmup + iterations:
                break
        after = Counters.of(runtime)
    return Run(
        iterations=iterations,
        env_steps=after.env_steps - before.env_steps,
        wall_s=after.now_s - before.now_s,
        staleness=sums["async/staleness_mean"] / iterations,
        dropped=sums["async/dropped"] / (iterations * config.num_envs * setup.decisions),
        overhead_s=(after.late_s - before.late_s) / (after.steps - before.steps),
        call_s=sums["perf/infer_s"] / (after.calls - before.calls),
        update_s=sums["perf/learn_s"] / iterations,
    )


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.perf_counter()))
