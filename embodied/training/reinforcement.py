"""Training by reinforcement learning: a runtime iterates, its policy is evaluated and saved."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from embodied.core.protocols import VecEnv
from embodied.core.spec import TRAIN
from embodied.report.metrics import MetricsWriter, write_atomically, write_json
from embodied.report.progress import Progress, Status, duration
from embodied.run import config as run_config
from embodied.run import factories
from embodied.run.command import Stopped
from embodied.run.config import CONFIG_FILE, RunConfig
from embodied.run.evaluation import evaluate_policy
from embodied.run.lifecycle import keep_architecture, keep_pretrained, make_run_dir, save_checkpoint, stop_on_signals
from embodied.run.warm_start import make_initial_policy
from embodied.runtime import Iteration, Runtime, build_runtime, threads
from embodied.runtime.build import resolve_device
from embodied.runtime.checkpoint import Checkpoint


def reinforce(
    config: RunConfig, run_dir: Path, found: Checkpoint | None, start_s: float, resumed: bool
) -> dict[str, Any]:
    """Train by reinforcement learning and evaluate; arguments as of ``SupervisedRun.carry_out``."""
    with ExitStack() as stack:
        runtime = stack.enter_context(build(config, run_dir, new=found is None))
        if found is not None:
            runtime.load_state_dict(found.state)
            start_s -= float(found.state["train"]["wall_s"])
        make_run_dir(run_dir, exist_ok=resumed)
        write_atomically(run_dir / CONFIG_FILE, run_config.to_yaml(config))
        keep_architecture(runtime.policy, run_dir)
        writer = MetricsWriter(run_dir, runtime.iteration if resumed else None)
        stack.callback(writer.close)
        progress = Progress(config.total_steps, config.max_minutes)
        stack.callback(progress.close)
        progress.message(announcement(config, runtime, run_dir))
        if found is not None:
            progress.message(f"going on from {found.path}")
        training = Training(config, run_dir, runtime, writer, progress, start_s)
        try:
            training.learn()
        except Exception:
            if training.saved_steps >= 0:
                progress.message(f"failed; to go on from the last checkpoint: resume={run_dir}")
            raise
        return training.finish()


class Training:
    """One process's share of a run: from the state that the runtime has now to the end, or to a signal.

    start_s: on the clock of ``time.monotonic``, when the run would have started had it never paused.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        runtime: Runtime,
        writer: MetricsWriter,
        progress: Progress,
        start_s: float,
    ) -> None:
        self.config, self.run_dir, self.runtime = config, run_dir, runtime
        self.writer, self.progress, self.start_s = writer, progress, start_s
        self.interrupted = False
        self.trained_s = 0.0  # wall_s when training ended
        self.eval_success: float | None = None  # of the last evaluation, on the instructions that are trained on
        self.saved_at_s = time.monotonic()
        self.saved_steps = -1 if runtime.iteration == 0 else runtime.env_steps

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.start_s

    def learn(self) -> None:
        """Iterate to a limit, a good evaluation or a signal; the last state is saved unless a part failed."""
        limit = self.config.max_minutes
        with stop_on_signals() as stop:
            for iteration in self.runtime.iterations(
                max_env_steps=self.config.total_steps,
                deadline_s=None if limit is None else self.start_s + 60.0 * limit,
                stop_event=stop,
            ):
                self.record(iteration)
                if time.monotonic() - self.saved_at_s >= 60.0 * self.config.checkpoint_minutes:
                    self.save()
                goal = self.config.stop_at_success
                if goal is not None and self.eval_success is not None and self.eval_success >= goal:
                    self.progress.message(f"an evaluation reached {self.eval_success:.1%}: stop_at_success={goal}")
                    break
            self.interrupted = stop.is_set()
        self.trained_s = self.wall_s
        self.save()

    def record(self, iteration: Iteration) -> None:
        """Put an iteration, and an evaluation that finished with it, where people look."""
        row: dict[str, Any] = {
            "iteration": iteration.index,
            "env_steps": iteration.env_steps,
            "wall_s": round(self.wall_s, 3),
            **iteration.metrics,
        }
        if iteration.evaluation is not None:
            evaluation, splits = iteration.evaluation, iteration.evaluation.get("splits", {})
            self.eval_success = float(splits.get(TRAIN, evaluation)["success_at_end"])
            row |= {f"eval/{key}": evaluation[key] for key in ("success_once", "success_at_end", "return_mean")}
            row |= {f"eval/{split}/success_at_end": rates["success_at_end"] for split, rates in splits.items()}
            write_json(self.run_dir / "eval" / f"train_{evaluation['env_steps']}.json", evaluation)
        self.writer.write(row)
        rate = iteration.metrics.get("perf/env_steps_per_s", 0.0)
        success = iteration.metrics.get("rollout/success_at_end")
        self.progress.update(
            Status(iteration.index, iteration.env_steps, self.wall_s, rate, success, self.eval_success)
        )

    def save(self) -> None:
        """A checkpoint of now, unless there is one. UserError if the disk does not take it."""
        if self.runtime.env_steps == self.saved_steps:
            return
        state = self.runtime.state_dict() | {"train": {"wall_s": self.wall_s}}
        save_checkpoint(self.run_dir, self.runtime.env_steps, state)
        self.saved_steps, self.saved_at_s = self.runtime.env_steps, time.monotonic()

    def finish(self) -> dict[str, Any]:
        """The final evaluation and the result; Stopped, without an evaluation, after a signal."""
        result: dict[str, Any] = {
            "run": str(self.run_dir),
            "env_steps": self.runtime.env_steps,
            "wall_s": round(self.trained_s, 3),
            "iterations": self.runtime.iteration,
            "eval": None,
        }
        if self.interrupted:
            self.progress.message(f"stopped and saved; go on with: python -m embodied.train resume={self.run_dir}")
            raise Stopped(result)
        keep_pretrained(self.runtime.policy, self.run_dir)
        if self.config.eval_episodes:
            episodes = self.config.eval_episodes
            self.progress.message(f"trained for {duration(self.wall_s)}; evaluating {episodes} episodes")
            self.runtime.close()  # gives its threads and memory back
            result["eval"] = evaluate_policy(self.config, self.runtime.policy, episodes, self.config.seed)
            write_json(self.run_dir / "eval" / f"final_{self.runtime.env_steps}.json", result["eval"])
        return result


def build(config: RunConfig, run_dir: Path, new: bool = True) -> Runtime:
    """The runtime of a configuration, with its envs, policy and algorithm. new: unless a checkpoint will be loaded."""

    def make_env(num_envs: int, num_threads: int) -> VecEnv:
        return factories.make_env(config, num_envs, num_threads, run_dir)

    return build_runtime(
        config.runtime_config(),
        num_envs=config.num_envs,
        seed=config.seed,
        make_env=make_env,
        make_sampler=partial(factories.make_sampler, config),
        make_policy=partial(make_initial_policy if new else factories.make_policy, config),
        make_algorithm=partial(factories.make_algorithm, config),
        make_eval_env=make_env,
        eval_plans=factories.evaluation_plans,
    )


def announcement(config: RunConfig, runtime: Runtime, run_dir: Path) -> str:
    """One line: what will be trained, with what, and where it goes."""
    assert isinstance(runtime.policy, nn.Module)
    parameters = sum(parameter.numel() for parameter in runtime.policy.parameters())
    options = config.runtime_config()
    device = resolve_device(options.device)
    budget = threads.plan(options, device)
    return (
        f"training {config.task['name']}: policy {config.policy['name']} ({parameters:,} parameters), algo "
        f"{config.algo['name']}, {config.num_envs:,} envs, runtime {options.name} (threads: simulation {budget.sim}, "
        f"actor {budget.actor}, learner {budget.learner}; {device.type}), seed {config.seed} → {run_dir}"
    )
