"""A training session: one process's share of a run, the same for every trainer.

Session.new, Session.resume ──► configuration, run directory, checkpoint to continue from
trainer.iterations ──► Report ──► metrics.jsonl, TensorBoard, eval/*.json, progress ──► checkpoint when due
                                    until a limit, a good evaluation or a signal
last checkpoint ──► final evaluation ──► result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from embodied.core.clock import running_s
from embodied.core.errors import UserError, one_line
from embodied.core.spec import TRAIN
from embodied.report.metrics import METRICS_FILE, MetricsWriter, read_metrics, write_atomically, write_json
from embodied.report.progress import Progress, Status, duration
from embodied.runtime.checkpoint import Checkpoint, check_weights, load_latest, read_weights
from embodied.runtime.loop import LearnerLost
from embodied.session.command import Stopped
from embodied.session.config import PRETRAINED, RunConfig, compose_run, resume_run, to_yaml
from embodied.session.directory import (
    make_run_dir,
    new_run_dir,
    save_architecture,
    save_checkpoint,
)
from embodied.session.files import CONFIG_FILE, Journal, lock_run
from embodied.session.signals import stop_on_signals
from embodied.session.trainer import Limits, Report, Trainer

RATES = ("success_once", "success_at_end", "return_mean")  # of an evaluation, kept in metrics.jsonl if it has them


class Session:
    """The directory, clock, limits and checkpoints of a run in this process.

    start_s: when the command began, on the clock ``running_s``. The run's own clock, ``wall_s``, also counts
    the seconds of earlier sessions up to the checkpoint.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, start_s: float, *, lock: TextIO | None, found: Checkpoint | None
    ) -> None:
        """Start the clock; nothing is written yet.

        lock: of the directory of a resumed run, which may lack a checkpoint; None for a new run, whose directory must
        not exist. It is held until ``run`` ends. found: the checkpoint to continue from; None starts a new training.
        """
        self.config, self.run_dir, self.lock, self.found = config, run_dir, lock, found
        self.resumed = lock is not None
        self.start_s = start_s - (0.0 if found is None else float(found.state["train"]["wall_s"]))
        self.saved_steps = None if found is None else found.env_steps
        self.saved_at_s = running_s()
        self.eval_success: float | None = None  # of the last evaluation, on the instructions that are trained on
        self.eval_return: float | None = None  # of the last evaluation in this session

    @classmethod
    def new(cls, overrides: Mapping[str, Any], start_s: float) -> Session:
        """Begin a run from ``key=value`` overrides. UserError for bad input; nothing is written yet."""
        config = compose_run(overrides)
        return cls(config, new_run_dir(config), start_s, lock=None, found=None)

    @classmethod
    def resume(cls, run_dir: Path, overrides: Mapping[str, Any], start_s: float) -> Session:
        """Continue a run from its newest whole checkpoint, if it has one. UserError for a key that cannot change."""
        config = resume_run(run_dir, overrides)
        lock = lock_run(run_dir)
        return cls(config, run_dir, start_s, lock=lock, found=load_latest(run_dir))

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all sessions; a stopped process takes none (embodied.core.clock)."""
        return running_s() - self.start_s

    def run(self, trainer: Trainer) -> dict[str, Any]:
        """Train, save and evaluate; return the contract's result of ``train``.

        UserError for a state that does not fit (nothing is written). Stopped after a signal (the state is saved).
        """
        if self.found is not None:
            load_state(trainer, self.found)
        make_run_dir(self.run_dir, exist_ok=self.resumed)
        lock = self.lock or lock_run(self.run_dir)
        write_atomically(self.run_dir / CONFIG_FILE, to_yaml(self.config))
        save_architecture(trainer.policy, self.run_dir)
        with ExitStack() as stack:
            stack.callback(lock.close)
            journal = stack.enter_context(Journal(self.run_dir, trainer.total_steps))
            writer = MetricsWriter(self.run_dir, trainer.iteration if self.resumed else None)
            stack.callback(writer.close)
            self.eval_success = eval_success(read_metrics(self.run_dir / METRICS_FILE))  # of earlier sessions
            progress = Progress(trainer.total_steps, self.config.max_minutes)
            stack.callback(progress.close)
            progress.message(trainer.announcement())
            if self.found is not None:
                progress.message(f"going on from {self.found.path}")
            try:
                trained_s, interrupted = self._train(trainer, writer, progress)
            except Exception:  # raised again
                if self.saved_steps is not None:
                    progress.message(f"failed; to go on from the last checkpoint: resume={self.run_dir}")
                raise
            result = {"run": str(self.run_dir), "wall_s": round(trained_s, 3), "iterations": trainer.iteration}
            result |= {**trainer.result(), "eval": None}
            if interrupted:
                progress.message(f"stopped and saved; go on with: python -m embodied.train resume={self.run_dir}")
                raise Stopped(result)
            journal.enter("evaluating")
            return result | {"eval": self._evaluate(trainer, progress, trained_s)}

    def _train(self, trainer: Trainer, writer: MetricsWriter, progress: Progress) -> tuple[float, bool]:
        """Train to a limit, a good evaluation or a signal, and save. Return ``wall_s``, and whether by a signal."""
        minutes = self.config.max_minutes
        deadline_s = None if minutes is None else self.start_s + 60.0 * minutes
        lost: LearnerLost | None = None
        with stop_on_signals() as stop:
            while True:
                try:
                    if lost is not None:
                        self._recover(lost, trainer, writer, progress)
                    self._iterate(Limits(stop, deadline_s), trainer, writer, progress)
                    trained_s = self.wall_s
                    self._save(trainer)
                    return trained_s, stop.is_set()
                except LearnerLost as error:
                    if stop.is_set():
                        raise
                    lost = error

    def _iterate(self, limits: Limits, trainer: Trainer, writer: MetricsWriter, progress: Progress) -> None:
        """Iterate to a limit, a good evaluation or a signal; save when it is time."""
        goal = self.config.stop_at_success
        for report in trainer.iterations(limits):
            self._record(report, trainer, writer, progress)
            if running_s() - self.saved_at_s >= 60.0 * self.config.checkpoint_minutes:
                self._save(trainer)
            success = None if report.evaluation is None else self.eval_success  # that of an earlier session is no end
            if goal is not None and success is not None and success >= goal:
                progress.message(f"an evaluation reached {success:.1%}: stop_at_success={goal}")
                break

    def _recover(self, lost: LearnerLost, trainer: Trainer, writer: MetricsWriter, progress: Progress) -> None:
        """Continue in the same session from the last checkpoint, or from the beginning if there is none."""
        found = load_latest(self.run_dir)
        progress.message(f"{lost}; going on from {'the beginning' if found is None else found.path}")
        lost.recover(None if found is None else found.state)
        self.saved_steps = None if found is None else found.env_steps
        writer.rewind(trainer.iteration)
        self.eval_success = eval_success(read_metrics(self.run_dir / METRICS_FILE))

    def _record(self, report: Report, trainer: Trainer, writer: MetricsWriter, progress: Progress) -> None:
        """Write an iteration and an evaluation that finished with it; update the progress line."""
        wall_s = self.wall_s
        row = {"iteration": trainer.iteration, "wall_s": round(wall_s, 3), **report.metrics}
        if report.evaluation is not None:
            evaluation, splits = report.evaluation, report.evaluation.get("splits", {})
            row |= {f"eval/{key}": evaluation[key] for key in RATES if key in evaluation}
            if "success_at_end" in evaluation:
                row |= {f"eval/{split}/success_at_end": rates["success_at_end"] for split, rates in splits.items()}
            self.eval_success = eval_success([row])
            self.eval_return = evaluation.get("return_mean")
            write_json(self.run_dir / "eval" / f"train_{evaluation['env_steps']}.json", evaluation)
        writer.write(row, report.histograms)
        progress.update(
            Status(
                trainer.iteration,
                trainer.steps,
                wall_s,
                report.rate,
                report.success,
                self.eval_success,
                report.loss,
                report.metrics.get("rollout/return_mean"),
                self.eval_return,
                trainer.has_success,
            )
        )
        if report.note is not None:
            progress.message(report.note)

    def _save(self, trainer: Trainer) -> None:
        """Write a checkpoint of the present state, unless there is one. UserError if the disk cannot be written."""
        if trainer.steps == self.saved_steps:
            return
        state = trainer.state_dict() | {"train": {"wall_s": self.wall_s}}
        save_checkpoint(self.run_dir, trainer.steps, state, after=self.saved_steps)
        self.saved_steps, self.saved_at_s = trainer.steps, running_s()

    def _evaluate(self, trainer: Trainer, progress: Progress, trained_s: float) -> dict[str, Any] | None:
        """Evaluate the trained policy and keep the result; None for eval_episodes=0."""
        trainer.finish()
        trainer.policy.save_pretrained(self.run_dir / PRETRAINED)
        if not self.config.eval_episodes:
            return None
        progress.message(f"trained for {duration(trained_s)}; evaluating {trainer.evaluation_size()}")
        evaluation = trainer.evaluate(progress.evaluating(trainer.evaluation_size()))
        write_json(self.run_dir / "eval" / f"final_{trainer.steps}.json", evaluation)
        return evaluation


def eval_success(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the success of the last evaluation in rows of metrics.jsonl, on instructions that are trained on.

    None if there is none.
    """
    for row in reversed(rows):
        success = row.get(f"eval/{TRAIN}/success_at_end", row.get("eval/success_at_end"))
        if success is not None:
            return float(success)
    return None


def load_state(trainer: Trainer, found: Checkpoint) -> None:
    """Continue from a checkpoint. UserError, in one line, if its state is not one of this run."""
    where = f"{found.path} does not fit this run"
    check_weights(read_weights(found.state.get("policy"), where), trainer.policy.state_dict(), where)
    try:
        trainer.load_state_dict(found.state)
    except KeyError as error:
        raise UserError(f"{where}: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(f"{where}: {one_line(error)}") from error
