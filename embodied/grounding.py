"""Training by masks: a simulator in, a run directory out, whose policy imitation can start from (init=).

Scenes ──► Buffer ──► Grounding.update ──► average weights ──► what they find in scenes that nobody trains on
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from algos.grounding import Grounding
from embodied import experiment
from embodied.command import Stopped
from embodied.core.errors import UserError
from embodied.core.types import Obs
from embodied.experiment import CONFIG_FILE, RunConfig
from embodied.initial_policy import make_initial_policy
from embodied.lifecycle import keep_architecture, keep_pretrained, make_run_dir, save_checkpoint, stop_on_signals
from embodied.report.metrics import MetricsWriter, write_atomically, write_json
from embodied.report.progress import Progress, Status, duration
from embodied.runtime import threads
from embodied.runtime.build import resolve_device
from embodied.runtime.checkpoint import Checkpoint
from embodied.scenes import Buffer, Scenes

CAPACITY = 8192  # observations to draw from
VALIDATION_SCENES = 256
SEED_STRIDE = 5_000_011  # scenes are not initial states of training, evaluation or demonstrations


def ground(config: RunConfig, run_dir: Path, found: Checkpoint | None, start_s: float) -> dict[str, Any]:
    """Train on scenes of ``config.task``; returns the result of ``train``, in whose ``eval`` is what was found.

    found: checkpoint to go on from. start_s: when the command began, on the clock of time.monotonic. UserError for
    bad input (nothing is written), Stopped after a signal (the state is saved).
    """
    if config.policy.get("freeze"):
        raise UserError(
            f"algo=grounding trains vision and language: policy.freeze must be [], got {config.policy['freeze']}"
        )
    threads.use(threads.available_cores())
    training = GroundingRun(config, run_dir, new=found is None)
    if found is not None:
        training.algorithm.load_state_dict(found.state["algorithm"])
        start_s -= float(found.state["train"]["wall_s"])
    with ExitStack() as stack:
        stack.callback(training.close)
        make_run_dir(run_dir, exist_ok=found is not None)
        write_atomically(run_dir / CONFIG_FILE, experiment.to_yaml(config))
        keep_architecture(training.policy, run_dir)
        writer = MetricsWriter(run_dir, None if found is None else training.algorithm.updates)
        stack.callback(writer.close)
        progress = Progress(training.algorithm.config.updates, config.max_minutes)
        stack.callback(progress.close)
        progress.message(training.announcement())
        stop = stack.enter_context(stop_on_signals())
        training.learn(writer, progress, start_s, stop)
        return training.finish(progress, start_s, stop.is_set())


class GroundingRun:
    """The scenes of one run and the algorithm that learns from them. UserError if they do not fit.

    A run that goes on fills its buffer with scenes that follow from the number of updates so far.
    """

    def __init__(self, config: RunConfig, run_dir: Path, new: bool) -> None:
        self.config, self.run_dir = config, run_dir
        cores = threads.available_cores()
        self.env = experiment.make_env(config, config.num_envs, cores, training=True)
        torch.manual_seed(config.seed)
        self.policy = (make_initial_policy if new else experiment.make_policy)(config, self.env.spec)
        assert isinstance(self.policy, nn.Module)
        self.policy.to(resolve_device(config.runtime_config().device))
        algorithm = experiment.make_algorithm(config, self.policy)
        assert isinstance(algorithm, Grounding)
        self.algorithm = algorithm
        self.buffer = Buffer(CAPACITY)
        judged = experiment.make_env(config, VALIDATION_SCENES, cores)
        self.validation = Scenes(judged, self.policy.execute, int(config.runtime["eval_seed"])).look()
        self.loss = float("nan")
        judged.close()

    def announcement(self) -> str:
        """One line: what will be trained, on what, and where it goes."""
        return (
            f"grounding {self.config.policy['name']} ({sum(p.numel() for p in self.algorithm.policy.parameters()):,} "
            f"parameters) in pictures of {self.config.task['name']}: {self.config.num_envs} envs, "
            f"seed {self.config.seed} → {self.run_dir}"
        )

    def learn(self, writer: MetricsWriter, progress: Progress, start_s: float, stop: threading.Event) -> None:
        """Update until the limit or a signal; the state is saved then."""
        algorithm, options = self.algorithm, self.algorithm.config
        limit_s = None if self.config.max_minutes is None else 60 * self.config.max_minutes
        first, began, losses = algorithm.updates, time.monotonic(), []
        scenes = Scenes(self.env, self.policy.execute, SEED_STRIDE * (self.config.seed + 1) + first)
        while algorithm.updates < options.updates and not stop.is_set():
            while (algorithm.updates + 1 - first) * options.batch_size > options.reuse * self.buffer.added:
                self.buffer.add(scenes.look())
            if algorithm.updates == 0 and self.config.init is None:
                algorithm.fit_normalizer(self.buffer.states())
            losses.append(algorithm.update(self.buffer.sample(options.batch_size, algorithm.generator)))
            if algorithm.updates % options.validate_every and algorithm.updates < options.updates:
                continue
            wall_s, rate = time.monotonic() - start_s, (algorithm.updates - first) / (time.monotonic() - began)
            row = {"iteration": algorithm.updates, "wall_s": round(wall_s, 3), "perf/updates_per_s": rate}
            row["train/grounding_loss"] = sum(losses) / len(losses)
            self.loss, rates = algorithm.validate(self.validation)
            row["train/validation_loss"] = self.loss
            writer.write(row | {f"eval/found/{camera}": share for camera, share in rates.items()})
            progress.update(Status(algorithm.updates, algorithm.updates, wall_s, rate, loss=self.loss))
            losses.clear()
            if limit_s is not None and wall_s >= limit_s:
                break
        wall_s = time.monotonic() - start_s
        state = {"policy": algorithm.weights(), "algorithm": algorithm.state_dict(), "train": {"wall_s": wall_s}}
        save_checkpoint(self.run_dir, algorithm.updates, state)

    def finish(self, progress: Progress, start_s: float, interrupted: bool) -> dict[str, Any]:
        """What is found in scenes that nobody trained on, by split and camera; Stopped, without it, after a signal."""
        result: dict[str, Any] = {
            "run": str(self.run_dir),
            "env_steps": 0,
            "wall_s": round(time.monotonic() - start_s, 3),
            "iterations": self.algorithm.updates,
            "validation_loss": self.loss,
            "eval": None,
        }
        if interrupted:
            progress.message(f"stopped and saved; go on with: python -m embodied.train resume={self.run_dir}")
            raise Stopped(result)
        self.algorithm.policy.cpu().load_state_dict(self.algorithm.weights())
        keep_pretrained(self.policy, self.run_dir)
        progress.message(f"trained for {duration(result['wall_s'])}")
        result["eval"] = {
            "task": self.config.task["name"],
            "scenes": VALIDATION_SCENES,
            "found": {split: self.algorithm.validate(obs)[1] for split, obs in self._by_split().items()},
        }
        write_json(self.run_dir / "eval" / f"final_{self.algorithm.updates}.json", result["eval"])
        return result

    def close(self) -> None:
        self.env.close()

    def _by_split(self) -> dict[str, Obs]:
        """The scenes to judge by, apart."""
        splits = self.env.spec.instruction_splits
        told = [splits[i] for i in self.validation["instruction"].tolist()]
        chosen = {split: [row for row, name in enumerate(told) if name == split] for split in dict.fromkeys(told)}
        return {split: {key: value[rows] for key, value in self.validation.items()} for split, rows in chosen.items()}
