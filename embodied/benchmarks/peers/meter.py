"""What is compared and how it is measured, the same for every trainer.

    a trainer collects ``decisions`` steps of N envs, updates, and so on
    Meter.boundary(env_steps)   before the first rollout and after every update: time, steps, how episodes ended lately

A library's own training loop is not changed. Its environment notices that a rollout begins, because every rollout has
``decisions`` steps, and ends the training by ``Finished``.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeStats
from embodied.core.options import FractionBelow1, NonNegative, Positive, PositiveInt, Seed, Widths, config_dataclass
from embodied.core.spec import EnvSpec
from embodied.core.types import Timestep

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


def rsl_rl_settings(settings: PPOSettings) -> dict[str, Any]:
    """Return the settings as rsl_rl names them, and UniLab, which has rsl_rl's networks."""
    hidden = list(settings.hidden)
    network = {"class_name": "MLPModel", "hidden_dims": hidden, "activation": "relu", "obs_normalization": True}
    distribution = {"class_name": "GaussianDistribution", "init_std": settings.init_std}
    algorithm = {
        "num_learning_epochs": settings.epochs, "num_mini_batches": settings.num_minibatches,
        "learning_rate": settings.learning_rate, "schedule": "fixed", "gamma": settings.gamma,
        "lam": settings.gae_lambda, "clip_param": settings.clip_range, "value_loss_coef": settings.value_coef,
        "use_clipped_value_loss": False, "entropy_coef": settings.entropy_coef,
        "max_grad_norm": settings.max_grad_norm,
    }  # fmt: skip
    return {"actor": network | {"distribution_cfg": distribution}, "critic": network, "algorithm": algorithm}


class Finished(Exception):
    """Ends the training of another library."""


@dataclass(frozen=True, slots=True)
class Mark:
    """State of a training at a boundary between two iterations."""

    env_steps: int
    wall_s: float
    cpu_s: float
    """Env steps, seconds, and CPU seconds of all threads of this process, since the first boundary."""
    updates: int
    """Gradient updates so far."""
    quality: float | None
    """Share of the latest ``WINDOW`` whole episodes that succeeded at their end, or their mean return for a task
    without success; None before there are so many."""


class Rates(NamedTuple):
    """What a training does in its iterations after the warm-up."""

    wall: float
    cpu: float
    """Env steps per second and per CPU second."""
    updates: float
    """Gradient updates per env step."""


class Meter:
    """Clock and statistics of a training, which ends after iterations, env_steps or at a quality of ``level``.

    updates: counter [1]. cpu_s: clock of the CPU seconds. Both may be of several processes.
    """

    def __init__(
        self, spec: EnvSpec, iterations: float = math.inf, env_steps: float = math.inf, level: float = math.inf,
        updates: MutableSequence[int] | None = None, cpu_s: Callable[[], float] = time.process_time,
    ) -> None:  # fmt: skip
        self.spec, self.iterations, self.env_steps, self.level = spec, iterations, env_steps, level
        self.marks: list[Mark] = []
        self.updates, self._cpu_s = [0] if updates is None else updates, cpu_s
        self._began_s = self._began_cpu_s = 0.0
        self._latest: deque[float] = deque(maxlen=WINDOW)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the steps of all of torch's optimisers inside the block."""

        def after_step(*_: object) -> None:
            self.updates[0] += 1

        hook = register_optimizer_step_post_hook(after_step)
        try:
            yield
        finally:
            hook.remove()

    def record(self, episodes: EpisodeStats) -> None:
        """Count the episodes that ran from the ordinary start with the whole time limit."""
        whole = episodes.plans.own_n(self.spec.max_episode_steps) & ~episodes.plans.filler_n
        if whole.any():
            rows = episodes.rows(torch.from_numpy(whole))
            self._latest.extend((rows.success_at_end_M if self.spec.has_success else rows.return_M).tolist())

    def boundary(self, env_steps: int) -> bool:
        """Note a boundary between two iterations; return whether the training goes on."""
        now_s, cpu_s = time.perf_counter(), self._cpu_s()
        if not self.marks:
            self._began_s, self._began_cpu_s = now_s, cpu_s
        quality = math.fsum(self._latest) / WINDOW if len(self._latest) == WINDOW else None
        wall_s, cpu_s = now_s - self._began_s, cpu_s - self._began_cpu_s
        self.marks.append(Mark(env_steps, wall_s, cpu_s, self.updates[0], quality))
        return not (self.reached or len(self.marks) > self.iterations or env_steps >= self.env_steps)

    @property
    def reached(self) -> bool:
        """Whether the level is reached at the last boundary."""
        quality = self.marks[-1].quality
        return quality is not None and quality >= self.level

    def rates(self, warmup: int) -> Rates:
        """Return the rates after the first ``warmup`` iterations."""
        first, last = self.marks[warmup], self.marks[-1]
        steps, wall_s = last.env_steps - first.env_steps, last.wall_s - first.wall_s
        return Rates(steps / wall_s, steps / (last.cpu_s - first.cpu_s), (last.updates - first.updates) / steps)


def metered(env: VecEnv, meter: Meter, decisions: int) -> VecEnv:
    """Let environments record their episodes, and end the training of another library by Finished at a boundary."""
    step_all, numbers = env.step, count()

    def step(action: Tensor) -> Timestep:
        number = next(numbers)
        if number % decisions == 0 and not meter.boundary(number * env.num_envs):
            raise Finished
        result = step_all(action)
        if len(result.episodes):
            meter.record(result.episodes)
        return result

    env.step = step  # type: ignore[method-assign]
    return env
