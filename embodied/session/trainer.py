"""Interface between a training session and its trainer: iterations, state, evaluation."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.runtime.config import EvalNoise
from embodied.session.command import ending_in_time
from embodied.session.config import RunConfig
from embodied.session.factories import evaluate_policy, evaluation_plans, make_spec


@dataclass(frozen=True, slots=True)
class Report:
    """One iteration: a row of metrics.jsonl and what else is kept of it."""

    metrics: Mapping[str, float]
    """Entries of the row other than ``iteration`` and ``wall_s``."""
    evaluation: Mapping[str, Any] | None = None
    """Result of an evaluation that finished since the last report, with ``env_steps`` of the evaluated weights."""
    note: str | None = None
    histograms: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """How often each whole number occurred, by name, for TensorBoard."""


class Trainer(AbstractContextManager["Trainer"], ABC):
    """One kind of training, built for one run. A context manager that closes itself.

    ``__init__`` raises UserError for bad input, before anything is written. new: no checkpoint will be loaded.
    """

    needs_data: ClassVar[bool] = False
    """Whether it learns from demonstrations (data=); otherwise it refuses them."""
    evaluates: ClassVar[bool] = False
    """Whether it evaluates the policy during training, which stop_at_success needs."""
    limit: ClassVar[str] = "total_steps"
    """Key of the option that has the value of ``total_steps``."""
    has_success: bool = True

    @abstractmethod
    def __init__(self, config: RunConfig, run_dir: Path, new: bool) -> None:
        self.config, self.run_dir = config, run_dir

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise UserError for a configuration that this kind of training does not support. Builds nothing."""
        name = config.algo.name
        if cls.needs_data and config.data is None:
            raise UserError(f"algo={name} learns from demonstrations: data=<directory of embodied.collect> is missing")
        if not cls.needs_data and config.data is not None:
            raise UserError(f"data={config.data} is for algo=sft; {name} learns from its own experience")
        refused = {"trace=true": config.runtime.trace, "stop_at_success": config.stop_at_success is not None}
        for option, given in refused.items():
            if given and not cls.evaluates:
                raise UserError(f"{option} is for reinforcement learning, not for algo={name}")

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The policy to keep. Read it before training or after ``finish``."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Iterations made, including those of earlier sessions."""

    @property
    def steps(self) -> int:
        """Progress towards ``total_steps``, which names checkpoints: control steps, or updates without a simulator."""
        return self.iteration

    @property
    def total_steps(self) -> int:
        return self.config.total_steps

    @abstractmethod
    def announcement(self) -> str:
        """Describe task, policy, sizes and run directory in one line."""

    @abstractmethod
    def iterations(self, stop: threading.Event, deadline_s: float) -> Iterator[Report]:
        """Train to ``total_steps``, ``stop`` or ``deadline_s`` (``running_s``); states can be saved between reports."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, nested dicts of tensors and plain values; key ``policy`` has the weights to keep."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; before ``iterations``."""

    def keep_evaluated(self) -> None:
        """Keep the weights of the last evaluation that was reported; called after ``iterations``, if it evaluates."""
        raise NotImplementedError

    def finish(self) -> None:
        """Release the threads and memory of training; ``policy`` then has the weights to keep."""
        self.close()

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return this trainer's entries of the command's result, at least ``env_steps``."""

    def parameters(self) -> str:
        return f"{sum(parameter.numel() for parameter in self.policy.parameters()):,} parameters"

    def evaluation_size(self) -> str:
        return f"{self.config.eval_episodes} episodes"

    def evaluate(self, watch: Callable[[float], None]) -> dict[str, Any]:
        """Evaluate ``policy`` with the noise of ``runtime.eval_noise``; call it after ``finish``.

        ``other_noise`` of the result has the rates with the other kind of noise, ``records`` a record of each episode.
        watch: gets the share that is done.
        """
        noise = self.config.runtime.eval_noise
        other: EvalNoise = "seeded" if noise == "zero" else "zero"
        config, seed = self.config, self.config.seed
        plans = evaluation_plans(make_spec(config), config.eval_episodes, seed)
        result, with_other = evaluate_policy(config, self.policy, plans, seed, [noise, other], watch=watch, keep=True)
        dropped = ("task", "seed", "splits")
        return result | {"other_noise": {key: value for key, value in with_other.items() if key not in dropped}}

    @abstractmethod
    def close(self) -> None:
        """Close what ``__init__`` opened."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with ending_in_time() if kind is KeyboardInterrupt else nullcontext():
            self.close()
