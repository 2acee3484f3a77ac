"""What is compared and how it is measured, the same for every trainer.

    a trainer collects ``decisions`` steps of N envs, updates, and so on
    Meter.boundary(env_steps)   before the first rollout and after every update: time, steps, how episodes ended lately

A library's own training loop is not changed. Its environment notices that a rollout begins, because every rollout has
``decisions`` steps, and ends the training by ``Finished``.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeSampler, EpisodeStats
from embodied.core.options import FractionBelow1, NonNegative, Positive, PositiveInt, Seed, Widths, config_dataclass
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs, Timestep

WINDOW = 64  # latest episodes whose mean return or success counts


@config_dataclass
class PPOSettings:
    """Settings of PPO that all trainers share. Separate networks of actor and critic, Adam at a fixed rate, a standard
    deviation that does not depend on the state, observations standardised by running statistics."""

    num_envs: PositiveInt = 64
    decisions: PositiveInt = 64
    """Steps of every env in a batch."""
    hidden: Widths = (256, 256)
    """Widths of the hidden layers of actor and critic; their activation is ReLU."""
    epochs: PositiveInt = 5
    num_minibatches: PositiveInt = 4
    """Passes over each batch, and minibatches of a pass."""
    learning_rate: Positive = 3e-4
    gamma: FractionBelow1 = 0.99
    gae_lambda: FractionBelow1 = 0.95
    """Discount and GAE trace of a step."""
    clip_range: Positive = 0.2
    value_coef: Positive = 0.5
    entropy_coef: NonNegative = 0.0
    """Clip of the ratio; weights of the critic's squared error, which is not clipped, and of the entropy."""
    max_grad_norm: Positive = 0.5
    init_std: Annotated[float, Field(gt=0.05, lt=1)] = 0.5
    seed: Seed = 0
    """Seed of networks, envs and exploration."""


class Finished(Exception):
    """Ends the training of another library."""


@dataclass(frozen=True, slots=True)
class Mark:
    """State of a training at a boundary between two iterations."""

    env_steps: int
    wall_s: float
    cpu_s: float
    """Env steps, seconds, and CPU seconds of all threads of this process, since the first boundary."""
    quality: float | None
    """Share of the latest ``WINDOW`` whole episodes that succeeded at their end, or their mean return for a task
    without success; None before there are so many."""


class Meter:
    """Clock and statistics of a training, which ends after iterations, env_steps or at a quality of ``level``."""

    def __init__(
        self, spec: EnvSpec, iterations: float = math.inf, env_steps: float = math.inf, level: float = math.inf
    ) -> None:
        self.spec, self.iterations, self.env_steps, self.level = spec, iterations, env_steps, level
        self.marks: list[Mark] = []
        self._began_s = self._began_cpu_s = 0.0
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def record(self, episodes: EpisodeStats) -> None:
        """Count the episodes that ran from the ordinary start with the whole time limit."""
        whole = (episodes.plans.stage_n == 0) & (episodes.plans.time_limit_n >= self.spec.max_episode_steps)
        whole &= ~episodes.plans.filler_n
        if whole.any():
            rows = episodes.rows(torch.from_numpy(whole))
            self._latest.extend((rows.success_at_end_M if self.spec.has_success else rows.return_M).tolist())

    def boundary(self, env_steps: int) -> bool:
        """Note a boundary between two iterations; return whether the training goes on."""
        now_s, cpu_s = time.perf_counter(), time.process_time()
        if not self.marks:
            self._began_s, self._began_cpu_s = now_s, cpu_s
        quality = math.fsum(self._latest) / WINDOW if len(self._latest) == WINDOW else None
        self.marks.append(Mark(env_steps, now_s - self._began_s, cpu_s - self._began_cpu_s, quality))
        return not (self.reached or len(self.marks) > self.iterations or env_steps >= self.env_steps)

    @property
    def reached(self) -> bool:
        """Whether the level is reached at the last boundary."""
        quality = self.marks[-1].quality
        return quality is not None and quality >= self.level

    def speeds(self, warmup: int) -> tuple[float, float]:
        """Return the env steps per second and per CPU second after the first ``warmup`` iterations."""
        first, last = self.marks[warmup], self.marks[-1]
        env_steps = last.env_steps - first.env_steps
        return env_steps / (last.wall_s - first.wall_s), env_steps / (last.cpu_s - first.cpu_s)


class MeteredEnv(VecEnv):
    """Environments for the loop of another library, which end its training by Finished at a boundary."""

    def __init__(self, env: VecEnv, meter: Meter, decisions: int) -> None:
        self.env, self.meter, self.decisions = env, meter, decisions
        self.spec, self.num_envs, self.device = env.spec, env.num_envs, env.device
        self._steps = 0

    def reset(self, sampler: EpisodeSampler) -> Obs:
        return self.env.reset(sampler)

    def step(self, action: Tensor) -> Timestep:
        if self._steps % self.decisions == 0 and not self.meter.boundary(self._steps * self.num_envs):
            raise Finished
        step = self.env.step(action)
        self._steps += 1
        if len(step.episodes):
            self.meter.record(step.episodes)
        return step

    def close(self) -> None:
        self.env.close()
