"""Shared by imitation and grounding: updates on given targets, validation, and the weights to keep.

targets ──► algorithm.update ──► average weights ──► validation loss ──► weights to keep
"""

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.algos.supervised import Supervised
from embodied.core.clock import running_s
from embodied.core.device import resolve_device
from embodied.core.policy import Policy
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.envs.mujoco.labels import LabeledPool
from embodied.runtime import threads
from embodied.session import factories
from embodied.session.config import RunConfig
from embodied.session.trainer import Report, Trainer
from embodied.session.warm_start import make_initial_policy
from embodied.trainers.scenes import SceneDataset, render_scenes


class SupervisedTrainer(Trainer):
    """Train on targets of a subclass. An iteration is one update; reports come at validations.

    The last average of the weights is kept, or with ``patience`` (validations without improvement, which end training)
    the one with the lowest validation loss.
    """

    limit = "algo.updates"
    loss_name: ClassVar[str]
    algorithm: Supervised

    def __init__(self, config: RunConfig, run_dir: Path, new: bool, spec: EnvSpec) -> None:
        super().__init__(config, run_dir, new)
        threads.use(threads.torch_cores())
        torch.manual_seed(config.seed)
        policy = make_initial_policy(config, spec) if new else factories.make_saved_policy(config, run_dir, spec)
        policy.to(resolve_device(config.runtime.device))
        self.algorithm = factories.make_algorithm(config, policy)
        self.patience: int | None = None
        self.kept_loss, self.kept_update = math.inf, 0
        self._best: Mapping[str, Tensor] | None = None  # with patience: weights of ``kept_loss``, once it is measured
        self.opened = ExitStack()

    @abstractmethod
    def update(self) -> float:
        """Make one update and return its loss."""

    @abstractmethod
    def validate(self) -> tuple[float, dict[str, float]]:
        """Return the validation loss of the average weights, and other metrics of them."""

    @property
    def policy(self) -> Policy:
        return self.algorithm.policy

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """The weights to keep, on the CPU."""
        return self.algorithm.weights() if self._best is None else self._best

    @property
    def iteration(self) -> int:
        return self.algorithm.updates

    @property
    def total_steps(self) -> int:
        return self.algorithm.config.updates

    def iterations(self, stop: threading.Event, deadline_s: float) -> Iterator[Report]:
        algorithm, every = self.algorithm, self.algorithm.config.validate_every
        losses: list[float] = []
        began, first = running_s(), algorithm.updates
        ended = False
        while algorithm.updates < self.total_steps and not ended and not stop.is_set():
            losses.append(self.update())
            ended = running_s() >= deadline_s
            if algorithm.updates % every and algorithm.updates < self.total_steps and not ended:
                continue
            rate = (algorithm.updates - first) / (running_s() - began)
            loss, metrics = self.validate()
            if loss < self.kept_loss or self.patience is None:
                self.kept_loss, self.kept_update = loss, algorithm.updates
                self._best = None if self.patience is None else algorithm.weights()
            row = {"perf/updates_per_s": rate, self.loss_name: sum(losses) / len(losses), "train/validation_loss": loss}
            losses.clear()
            waited, note = (algorithm.updates - self.kept_update) // every, None
            if self.patience is not None and waited >= self.patience:
                ended, note = True, f"the validation loss has not improved in {waited} validations"
            yield Report(row | metrics, note=note)

    def state_dict(self) -> dict[str, Any]:
        kept = {"loss": self.kept_loss, "update": self.kept_update}
        return {"policy": self.kept, "algorithm": self.algorithm.state_dict(), "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.algorithm.load_state_dict(state["algorithm"])
        self.kept_loss, self.kept_update = float(state["kept"]["loss"]), int(state["kept"]["update"])
        self._best = None if self.patience is None else dict(state["policy"])

    def finish(self) -> None:
        super().finish()
        self.policy.cpu().load_state_dict(self.kept)

    def result(self) -> dict[str, Any]:
        return {"env_steps": 0, "validation_loss": self.kept_loss if math.isfinite(self.kept_loss) else None}

    def close(self) -> None:
        self.opened.close()

    def open_scenes(
        self, *, masks: bool, capacity: int, reuse: float, keep: Callable[[Obs], Obs] = lambda obs: obs
    ) -> SceneDataset:
        """Open ``num_envs`` training envs as a data set of scenes, which depend on the seed and the updates made.

        keep: transforms the observations of all envs before they are stored. Call it at the first update, because a
        resumed run loads its number of updates before that. A resumed run sees other scenes than an uninterrupted one.
        """
        seed = first_env_seed(Purpose.SCENES, self.config.seed) + self.algorithm.updates
        pool = factories.make_env(self.config, self.config.num_envs, threads.available_cores(), self.run_dir)
        self.opened.callback(pool.close)
        sampler = factories.make_sampler(self.config, pool.spec, pool.num_envs, seed)
        scenes = render_scenes(LabeledPool(pool, sampler, masks=masks), seed)
        return SceneDataset(map(keep, scenes), capacity=capacity, reuse=reuse)
