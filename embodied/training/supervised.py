"""A run that learns from given targets, whatever they are: its loop, its directory and its end.

targets ──► algorithm.update ──► average weights ──► validation loss ──► what is kept
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from algos.supervised import Supervised
from embodied.core.errors import UserError
from embodied.core.protocols import Policy
from embodied.core.spec import EnvSpec
from embodied.report.metrics import MetricsWriter, write_atomically, write_json
from embodied.report.progress import Progress, Status, duration
from embodied.run import config as run_config
from embodied.run import factories
from embodied.run.command import Stopped
from embodied.run.config import CONFIG_FILE, RunConfig
from embodied.run.lifecycle import keep_architecture, keep_pretrained, make_run_dir, save_checkpoint, stop_on_signals
from embodied.run.warm_start import make_initial_policy
from embodied.runtime.build import resolve_device
from embodied.runtime.checkpoint import Checkpoint


class SupervisedRun:
    """The policy of a run and the algorithm that trains it; a subclass brings the targets.

    The last average of the weights is kept, or with ``patience`` (in validations without improvement, which end
    training) the one with the lowest validation loss.
    """

    loss_name: ClassVar[str]  # in metrics.jsonl
    algorithm: Supervised

    def __init__(self, config: RunConfig, run_dir: Path, spec: EnvSpec, new: bool) -> None:
        self.config, self.run_dir = config, run_dir
        if config.stop_at_success is not None:
            raise UserError(f"stop_at_success is for reinforcement learning, not for algo={config.algo['name']}")
        policy = (make_initial_policy if new else factories.make_policy)(config, spec)
        assert isinstance(policy, nn.Module)
        policy.to(resolve_device(config.runtime_config().device))
        algorithm = factories.make_algorithm(config, policy)
        assert isinstance(algorithm, Supervised)
        self.policy: Policy = policy
        self.algorithm = algorithm
        self.patience: int | None = None
        self.kept = algorithm.weights()
        self.kept_loss, self.kept_update = float("inf"), 0

    # -- what a subclass brings ----------------------------------------------------------------------------------------

    def announcement(self) -> str:
        """One line: what will be trained, on what, and where it goes."""
        raise NotImplementedError

    def update(self) -> float:
        """One update; its loss."""
        raise NotImplementedError

    def validate(self) -> tuple[float, dict[str, float]]:
        """Validation loss of the average weights, and other metrics of them."""
        raise NotImplementedError

    def evaluate(self, progress: Progress, trained: str) -> dict[str, Any] | None:
        """The final evaluation of ``policy``; None for none. trained: how long that took, in words."""
        raise NotImplementedError

    # -- what follows from it ------------------------------------------------------------------------------------------

    def carry_out(self, found: Checkpoint | None, start_s: float, resumed: bool) -> dict[str, Any]:
        """All of it; the contract's result of ``train``.

        found: checkpoint to go on from. start_s: when the command began, on the clock of time.monotonic. resumed: the
        run directory is there, even without a checkpoint; otherwise one that is there is refused. UserError for bad
        input (nothing is written), Stopped after a signal (the state is saved).
        """
        if found is not None:
            self.load_state_dict(found.state)
            start_s -= float(found.state["train"]["wall_s"])
        make_run_dir(self.run_dir, exist_ok=resumed)
        write_atomically(self.run_dir / CONFIG_FILE, run_config.to_yaml(self.config))
        keep_architecture(self.policy, self.run_dir)
        with ExitStack() as stack:
            writer = MetricsWriter(self.run_dir, self.algorithm.updates if resumed else None)
            stack.callback(writer.close)
            progress = Progress(self.algorithm.config.updates, self.config.max_minutes)
            stack.callback(progress.close)
            progress.message(self.announcement())
            stop = stack.enter_context(stop_on_signals())
            self.learn(writer, progress, start_s, stop)
            return self.finish(progress, start_s, stop.is_set())

    def learn(self, writer: MetricsWriter, progress: Progress, start_s: float, stop: threading.Event) -> None:
        """Update until a limit, ``patience`` or a signal; the state is saved then, and every ``checkpoint_minutes``
        after a validation."""
        algorithm, options = self.algorithm, self.algorithm.config
        limit_s = None if self.config.max_minutes is None else 60 * self.config.max_minutes
        losses: list[float] = []
        began, first = time.monotonic(), algorithm.updates
        saved_at = began
        while algorithm.updates < options.updates and not stop.is_set():
            losses.append(self.update())
            late = limit_s is not None and time.monotonic() - start_s >= limit_s
            if algorithm.updates % options.validate_every and algorithm.updates < options.updates and not late:
                continue
            wall_s, rate = time.monotonic() - start_s, (algorithm.updates - first) / (time.monotonic() - began)
            loss, metrics = self.validate()
            if loss < self.kept_loss or self.patience is None:
                self.kept, self.kept_loss, self.kept_update = algorithm.weights(), loss, algorithm.updates
            row = {"iteration": algorithm.updates, "wall_s": round(wall_s, 3), "perf/updates_per_s": rate}
            row |= {self.loss_name: sum(losses) / len(losses), "train/validation_loss": loss}
            writer.write(row | metrics)
            progress.update(Status(algorithm.updates, algorithm.updates, wall_s, rate, loss=loss))
            losses.clear()
            waited = (algorithm.updates - self.kept_update) // options.validate_every
            if self.patience is not None and waited >= self.patience:
                progress.message(f"the validation loss has not improved in {waited} validations")
                break
            if late:
                break
            if time.monotonic() - saved_at >= 60 * self.config.checkpoint_minutes:
                self.save(time.monotonic() - start_s)
                saved_at = time.monotonic()
        self.save(time.monotonic() - start_s)

    def finish(self, progress: Progress, start_s: float, interrupted: bool) -> dict[str, Any]:
        """The final evaluation and the result; Stopped, without an evaluation, after a signal."""
        result: dict[str, Any] = {
            "run": str(self.run_dir),
            "env_steps": 0,
            "wall_s": round(time.monotonic() - start_s, 3),
            "iterations": self.algorithm.updates,
            "validation_loss": self.kept_loss if math.isfinite(self.kept_loss) else None,
            "eval": None,
        }
        if interrupted:
            progress.message(f"stopped and saved; go on with: python -m embodied.train resume={self.run_dir}")
            raise Stopped(result)
        self.algorithm.policy.cpu().load_state_dict(self.kept)
        keep_pretrained(self.policy, self.run_dir)
        result["eval"] = self.evaluate(progress, duration(result["wall_s"]))
        if result["eval"] is not None:
            write_json(self.run_dir / "eval" / f"final_{self.algorithm.updates}.json", result["eval"])
        return result

    def save(self, wall_s: float) -> None:
        """A checkpoint; its ``policy`` is the average that is kept."""
        if self.patience is None:
            self.kept, self.kept_update = self.algorithm.weights(), self.algorithm.updates
        kept = {"loss": self.kept_loss, "update": self.kept_update}
        state = {"policy": self.kept, "algorithm": self.algorithm.state_dict(), "kept": kept}
        save_checkpoint(self.run_dir, self.algorithm.updates, state | {"train": {"wall_s": wall_s}})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``save`` wrote."""
        self.algorithm.load_state_dict(state["algorithm"])
        self.kept, self.kept_loss = dict(state["policy"]), float(state["kept"]["loss"])
        self.kept_update = int(state["kept"]["update"])
