"""A training session: one process's share of a run, the same for every trainer.

configuration ──► Session ──► run directory, checkpoint to continue from
trainer.iterations ──► Report ──► metrics.jsonl, TensorBoard, eval/*.json, progress ──► checkpoint when due
                                    until a limit, a confirmed evaluation or a signal
last checkpoint ──► final evaluation ──► result
"""

import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime
from glob import glob
from pathlib import Path
from typing import Any

from embodied.core.clock import running_s
from embodied.core.errors import UserError, one_line
from embodied.core.user_files import keep_copy
from embodied.core.words import word
from embodied.report.metrics import EVALUATED_STEPS, MetricsWriter, write_atomically, write_json
from embodied.report.progress import Progress, duration, success_text
from embodied.runtime import checkpoint
from embodied.runtime.checkpoint import Checkpoint
from embodied.runtime.evaluator import trained_rates
from embodied.runtime.loop import LearnerLost
from embodied.session.command import Stopped, stop_on_signals
from embodied.session.config import PRETRAINED, RunConfig, to_yaml
from embodied.session.factories import make_spec, settled
from embodied.session.files import CONFIG_FILE, Journal, check_new_dir, lock_run
from embodied.session.interface import check_interface, keep_interface
from embodied.session.kept_episodes import write_evaluation
from embodied.session.trainer import Report, Trainer

KEPT = ("episodes", "success_at_end", "success_at_end_ci95")  # of the evaluations that ended a training
RATES = ("success_once", "success_at_end", "return_mean")  # of an evaluation, kept in metrics.jsonl if it has them


class Session:
    """The directory, clock, limits and checkpoints of a run in this process, which begins when the session is built.

    start_s: when the run began, on the clock ``running_s``, if the earlier sessions up to the checkpoint ended now.
    found: the newest whole checkpoint, which a resumed run continues from, if it has one. lock: of its directory.
    """

    def __init__(self, config: RunConfig, run_dir: Path | None = None) -> None:
        """Start the clock; nothing is written yet. run_dir: of a run to resume, locked until ``run`` ends; None: new.

        UserError if the directory of a new run exists or cannot be written, or if another training holds ``run_dir``.
        """
        began_s = running_s()
        self.config = settled(config)
        self.run_dir = new_run_dir(self.config) if run_dir is None else run_dir
        self.lock = None if run_dir is None else lock_run(run_dir)
        self.found = None if run_dir is None else checkpoint.load_latest(run_dir)
        self.start_s = began_s - (0.0 if self.found is None else float(self.found.state["train"]["wall_s"]))
        self.saved_steps = None if self.found is None else self.found.env_steps
        self.saved_at_s = running_s()
        self.stop: dict[str, Any] | None = None
        """``stop`` of the result: what ended training, if that was ``stop_at_success``."""
        self.reached: list[str] = []  # limits that a resumed run had reached before, so that nothing is trained

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all sessions; a stopped process takes none (embodied.core.clock)."""
        return running_s() - self.start_s

    @property
    def resume(self) -> str:
        """The word, for a shell, that goes on with this run."""
        return word("resume", str(self.run_dir))

    def run(self, trainer: Trainer) -> dict[str, Any]:
        """Train, save and evaluate; return the contract's result of ``train``.

        UserError for a state that does not fit (nothing is written). Stopped after a signal (the state is saved).
        """
        spec = make_spec(self.config)
        check_interface(self.run_dir, spec)
        if self.found is not None:
            load_state(trainer, self.found)
            self.reached = self._reached(trainer)
        resumed = self.lock is not None
        try:
            self.run_dir.mkdir(parents=True, exist_ok=resumed)
        except OSError as error:
            raise UserError(f"cannot make the run directory {self.run_dir}: {error.strerror or error}") from error
        lock = self.lock or lock_run(self.run_dir)
        if not self.reached:
            write_atomically(self.run_dir / CONFIG_FILE, to_yaml(self.config))
            keep_copy(self.config.task.name, self.run_dir)
            keep_interface(self.run_dir, spec)
            trainer.policy.save_architecture(self.run_dir / PRETRAINED)
        with ExitStack() as stack:
            stack.callback(lock.close)
            journal = stack.enter_context(Journal(self.run_dir, trainer.total_steps))
            writer = MetricsWriter(self.run_dir, trainer.iteration if resumed else None)
            stack.callback(writer.close)
            progress = Progress(trainer.total_steps, self.config.max_minutes, trainer.has_success)
            stack.callback(progress.close)
            progress.message(trainer.announcement())
            if self.found is not None:
                progress.message(f"going on from {self.found.path}")
            if self.reached:
                progress.message(f"nothing to train: {' and '.join(self.reached)} is reached; raise it to go on")
            try:
                with stop_on_signals() as stop:
                    trained_s = self.wall_s if self.reached else self._train(stop, trainer, writer, progress)
            except Exception:  # raised again
                if self.saved_steps is not None:
                    progress.message(f"failed; to go on from the last checkpoint: {self.resume}")
                raise
            result: dict[str, Any] = {"run": str(self.run_dir), "wall_s": round(trained_s, 3)}
            result |= {"iterations": trainer.iteration, **trainer.result(), "stop": self.stop, "eval": None}
            if stop.is_set():
                progress.message(f"stopped and saved; go on with: python -m embodied.train {self.resume}")
                raise Stopped(result)
            journal.enter("evaluating")
            trainer.finish()
            trainer.policy.save_pretrained(self.run_dir / PRETRAINED)
            if self.config.eval_episodes:
                size = trainer.evaluation_size()
                progress.message(f"{'' if self.reached else f'trained for {duration(trained_s)}; '}evaluating {size}")
                found = trainer.evaluate(progress.evaluating(size))
                path = self.run_dir / "eval" / f"final_{trainer.steps}.json"
                result["eval"] = write_evaluation(path, found, self.run_dir / "checkpoints" / f"step_{trainer.steps}")
            return result

    def _reached(self, trainer: Trainer) -> list[str]:
        """Return the limits that training has reached."""
        minutes = self.config.max_minutes
        limits = [f"{trainer.limit}={trainer.total_steps}"] if trainer.steps >= trainer.total_steps else []
        return limits + ([f"max_minutes={minutes:g}"] if minutes is not None and self.wall_s >= 60 * minutes else [])

    def _train(self, stop: threading.Event, trainer: Trainer, writer: MetricsWriter, progress: Progress) -> float:
        """Train and save; return ``wall_s`` of the end. A lost learner continues from the last checkpoint, if any."""
        lost: LearnerLost | None = None
        while True:
            try:
                if lost is not None:
                    found = checkpoint.load_latest(self.run_dir)
                    progress.message(f"{lost}; going on from {'the beginning' if found is None else found.path}")
                    lost.recover(None if found is None else found.state)
                    self.saved_steps = None if found is None else found.env_steps
                    writer.rewind(trainer.iteration)
                self._iterate(stop, trainer, writer, progress)
                trained_s = self.wall_s
                self._save(trainer)
                return trained_s
            except LearnerLost as error:
                if stop.is_set():
                    raise
                lost = error

    def _iterate(self, stop: threading.Event, trainer: Trainer, writer: MetricsWriter, progress: Progress) -> None:
        """Iterate to a limit, a confirmed evaluation or a signal; save when it is time."""
        minutes = self.config.max_minutes
        deadline_s = math.inf if minutes is None else self.start_s + 60.0 * minutes
        for report in trainer.iterations(stop, deadline_s):
            row = {"iteration": trainer.iteration, "wall_s": round(self.wall_s, 3), **report.metrics}
            row |= self._keep_evaluation(report)
            writer.write(row, report.histograms)
            progress.update(writer.newest)
            if report.note is not None:
                progress.message(report.note)
            if report.evaluation is not None and self._confirmed(report.evaluation, progress):
                trainer.keep_evaluated()
                break
            if running_s() - self.saved_at_s >= 60.0 * self.config.checkpoint_minutes:
                self._save(trainer)

    def _confirmed(self, evaluation: Mapping[str, Any], progress: Progress) -> bool:
        """Return whether an evaluation ends training: it and its confirmation have reached ``stop_at_success``."""
        goal, fresh = self.config.stop_at_success, evaluation.get("confirmation")
        if goal is None or fresh is None:
            return False
        pair = {"evaluation": trained_rates(evaluation), "confirmation": trained_rates(fresh)}
        reached, confirmed = (success_text(rates) for rates in pair.values())
        holds = bool(pair["confirmation"]["success_at_end"] >= goal)
        verdict = "confirmed, training ends" if holds else "not confirmed, training goes on"
        progress.message(f"success {reached} reaches stop_at_success={goal}; fresh ones: {confirmed}, {verdict}")
        if holds:
            self.stop = {name: {key: rates[key] for key in KEPT} for name, rates in pair.items()}
        return holds

    def _keep_evaluation(self, report: Report) -> dict[str, float]:
        """Write an evaluation that finished with an iteration, if any; return its entries of metrics.jsonl."""
        evaluation = report.evaluation
        if evaluation is None:
            return {}
        write_json(self.run_dir / "eval" / f"train_{evaluation['env_steps']}.json", evaluation)
        row = {EVALUATED_STEPS: evaluation["env_steps"]}
        row |= {f"eval/{key}": evaluation[key] for key in RATES if key in evaluation}
        if "success_at_end" in evaluation:
            for split, rates in evaluation.get("splits", {}).items():
                row[f"eval/{split}/success_at_end"] = rates["success_at_end"]
        if "confirmation" in evaluation:
            row["eval/confirmation/success_at_end"] = trained_rates(evaluation["confirmation"])["success_at_end"]
        return row

    def _save(self, trainer: Trainer) -> None:
        """Write a checkpoint of the present state, unless there is one. UserError if the disk cannot be written."""
        if trainer.steps == self.saved_steps:
            return
        state = trainer.state_dict() | {"train": {"wall_s": self.wall_s}}
        try:
            checkpoint.save(self.run_dir, trainer.steps, state, after=self.saved_steps)
        except OSError as error:
            before = "There is none before it" if self.saved_steps is None else "The checkpoint before it is whole"
            failed = f"cannot write a checkpoint in {self.run_dir}: {error.strerror or error}"
            raise UserError(f"{failed}. {before}; make room, then go on with {self.resume}") from error
        self.saved_steps, self.saved_at_s = trainer.steps, running_s()


def new_run_dir(config: RunConfig) -> Path:
    """Choose the directory of a new run, without making it. UserError if ``out=`` exists or cannot be written."""
    if config.out is not None:
        path = Path(config.out)
        saved, resume = glob("checkpoints/*", root_dir=path), f", or go on with that run: {word('resume', str(path))}"
        check_new_dir(path, resume if saved else "; it has no checkpoint to go on from")
        return path
    task = config.task.title.replace(":", ".")  # a colon separates paths in many variables of the shell
    return Path("runs") / task / f"{config.title}-{datetime.now():%Y%m%d-%H%M%S-%f}"  # others may start in this second


def load_state(trainer: Trainer, found: Checkpoint) -> None:
    """Continue from a checkpoint. UserError, in one line, if its state is not one of this run."""
    where = f"{found.path} does not fit this run"
    weights = checkpoint.read_weights(found.state.get("policy"), where)
    checkpoint.check_weights(weights, trainer.policy.state_dict(), where)
    try:
        trainer.load_state_dict(found.state)
    except KeyError as error:
        raise UserError(f"{where}: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(f"{where}: {one_line(error)}") from error
