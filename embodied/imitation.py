"""Training by imitation: demonstrations in, a run directory out, without a simulator until the final evaluation.

Demonstrations ── split by episode ──► train chunks ──► SFT.update ──► average weights ──► validation loss
                                  └──► validation chunks ──────────────────┘

The last average is kept, or with ``patience`` the one with the lowest validation loss: success goes on growing for long
after that loss has its minimum (docs/flow_rl.md).
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algos.sft import SFT
from embodied import experiment
from embodied.command import Stopped
from embodied.core.errors import UserError
from embodied.core.protocols import Policy, Precomputing
from embodied.core.types import EnvSpec, Obs
from embodied.data import Demonstrations, read
from embodied.data.lerobot import check_fits
from embodied.eval import evaluate_policy
from embodied.experiment import CONFIG_FILE, RunConfig
from embodied.initial_policy import make_initial_policy
from embodied.lifecycle import keep_architecture, keep_pretrained, make_run_dir, save_checkpoint, stop_on_signals
from embodied.report.metrics import MetricsWriter, write_atomically, write_json
from embodied.report.progress import Progress, Status, duration
from embodied.runtime import threads
from embodied.runtime.build import resolve_device
from embodied.runtime.checkpoint import Checkpoint

VALIDATION_CHUNKS = 256  # at most; spread evenly over the validation episodes


def imitate(config: RunConfig, run_dir: Path, found: Checkpoint | None, start_s: float) -> dict[str, Any]:
    """Train on ``config.data`` and evaluate; returns the contract's result of ``train``.

    found: checkpoint to go on from. start_s: when the command began, on the clock of time.monotonic. UserError for
    bad input (nothing is written), Stopped after a signal (the state is saved).
    """
    assert config.data is not None
    env = experiment.make_env(config, num_envs=1, num_threads=1)
    env.close()
    data = read(Path(config.data), config.data_keys, [camera.name for camera in env.spec.cameras])
    check_fits(data, env.spec, Path(config.data))
    if env.spec.cameras:  # the policy reads instructions too
        data = data.told_from(env.spec.instructions)
    threads.use(threads.available_cores())
    training = Imitation(config, run_dir, data, env.spec, new=found is None)
    if found is not None:
        training.load_state_dict(found.state)
        start_s -= float(found.state["train"]["wall_s"])
    make_run_dir(run_dir, exist_ok=found is not None)
    write_atomically(run_dir / CONFIG_FILE, experiment.to_yaml(config))
    keep_architecture(training.policy, run_dir)
    with ExitStack() as stack:
        writer = MetricsWriter(run_dir, None if found is None else training.algorithm.updates)
        stack.callback(writer.close)
        progress = Progress(training.algorithm.config.updates, config.max_minutes)
        stack.callback(progress.close)
        progress.message(training.announcement())
        stop = stack.enter_context(stop_on_signals())
        training.learn(writer, progress, start_s, stop)
        return training.finish(progress, start_s, stop.is_set())


class Imitation:
    """The data of one run, split, and the algorithm that learns from it. UserError if they do not fit."""

    def __init__(self, config: RunConfig, run_dir: Path, data: Demonstrations, spec: EnvSpec, new: bool = True) -> None:
        self.config, self.run_dir, self.data = config, run_dir, data
        torch.manual_seed(config.seed)
        policy = (make_initial_policy if new else experiment.make_policy)(config, spec)
        assert isinstance(policy, nn.Module)
        policy.to(resolve_device(config.runtime_config().device))
        algorithm = experiment.make_algorithm(config, policy)
        assert isinstance(algorithm, SFT)
        self.policy: Policy = policy
        self.algorithm = algorithm
        self.train_episodes, self.validation_episodes = data.split(algorithm.config.validation_share)
        self.starts = data.chunk_starts(policy.horizon, self.train_episodes)
        starts = data.chunk_starts(policy.horizon, self.validation_episodes)
        self.validation_starts = starts[:: -(-len(starts) // VALIDATION_CHUNKS) or 1]
        if not len(self.starts) or not len(self.validation_starts):
            raise UserError(f"data={config.data}: its episodes are shorter than a chunk of {policy.horizon} actions")
        if new and config.init is None:
            algorithm.fit_normalizer(data.state_FS[torch.isin(data.episode_F, torch.tensor(self.train_episodes))])
        self.precomputed: Obs | None = None
        if isinstance(policy, Precomputing) and policy.precompute_in_actor:
            self.precomputed = policy.precompute(data.obs(torch.arange(len(data.episode_F))))
        self.kept = algorithm.weights()
        self.kept_loss, self.kept_update = float("inf"), 0

    def announcement(self) -> str:
        """One line: what will be trained, on what, and where it goes."""
        parameters = sum(parameter.numel() for parameter in self.algorithm.policy.parameters())
        return (
            f"imitating {self.config.task['name']}: policy {self.config.policy['name']} ({parameters:,} parameters), "
            f"{len(self.train_episodes)} episodes to train on ({len(self.starts):,} chunks), "
            f"{len(self.validation_episodes)} to validate on, seed {self.config.seed} → {self.run_dir}"
        )

    def learn(self, writer: MetricsWriter, progress: Progress, start_s: float, stop: threading.Event) -> None:
        """Update until the limit, ``patience`` or a signal; the state is saved then."""
        algorithm, options = self.algorithm, self.algorithm.config
        limit_s = None if self.config.max_minutes is None else 60 * self.config.max_minutes
        losses: list[float] = []
        began, first = time.monotonic(), algorithm.updates
        while algorithm.updates < options.updates and not stop.is_set():
            losses.append(algorithm.update(*self.chunks(algorithm.pick(self.starts))))
            if algorithm.updates % options.validate_every and algorithm.updates < options.updates:
                continue
            wall_s, rate = time.monotonic() - start_s, (algorithm.updates - first) / (time.monotonic() - began)
            loss = self.validate()
            row = {"iteration": algorithm.updates, "wall_s": round(wall_s, 3), "perf/updates_per_s": rate}
            writer.write(row | {"train/imitation_loss": sum(losses) / len(losses), "train/validation_loss": loss})
            progress.update(Status(algorithm.updates, algorithm.updates, wall_s, rate, loss=loss))
            losses.clear()
            waited = (algorithm.updates - self.kept_update) // options.validate_every
            if options.patience is not None and waited >= options.patience:
                progress.message(f"the validation loss has not improved in {waited} validations")
                break
            if limit_s is not None and wall_s >= limit_s:
                break
        self.save(time.monotonic() - start_s)

    def chunks(self, starts_B: Tensor) -> tuple[Obs, Tensor]:
        """What was observed in frames ``starts``, or what is precomputed of it, and the actions from there on."""
        action_BHA = self.data.actions(starts_B, self.policy.horizon)
        if self.precomputed is None:
            return self.data.obs(starts_B), action_BHA
        return {key: value[starts_B] for key, value in self.precomputed.items()}, action_BHA

    def validate(self) -> float:
        """Validation loss of the average weights; those to keep are remembered."""
        loss = self.algorithm.validate(*self.chunks(self.validation_starts))
        if loss < self.kept_loss or self.algorithm.config.patience is None:
            self.kept, self.kept_loss, self.kept_update = self.algorithm.weights(), loss, self.algorithm.updates
        return loss

    def finish(self, progress: Progress, start_s: float, interrupted: bool) -> dict[str, Any]:
        """The final evaluation and the result; Stopped, without an evaluation, after a signal."""
        result: dict[str, Any] = {
            "run": str(self.run_dir),
            "env_steps": 0,
            "wall_s": round(time.monotonic() - start_s, 3),
            "iterations": self.algorithm.updates,
            "validation_loss": self.kept_loss,
            "eval": None,
        }
        if interrupted:
            progress.message(f"stopped and saved; go on with: python -m embodied.train resume={self.run_dir}")
            raise Stopped(result)
        self.algorithm.policy.cpu().load_state_dict(self.kept)
        keep_pretrained(self.policy, self.run_dir)
        if self.config.eval_episodes:
            episodes = self.config.eval_episodes
            progress.message(f"trained for {duration(result['wall_s'])}; evaluating {episodes} episodes")
            result["eval"] = evaluate_policy(self.config, self.policy, episodes, self.config.seed)
            write_json(self.run_dir / "eval" / f"final_{self.algorithm.updates}.json", result["eval"])
        return result

    def save(self, wall_s: float) -> None:
        """A checkpoint; its ``policy`` is the average that is kept: the present one, or with ``patience`` the best."""
        if self.algorithm.config.patience is None:
            self.kept, self.kept_update = self.algorithm.weights(), self.algorithm.updates
        kept = {"loss": self.kept_loss, "update": self.kept_update}
        state = {"policy": self.kept, "algorithm": self.algorithm.state_dict(), "kept": kept}
        save_checkpoint(self.run_dir, self.algorithm.updates, state | {"train": {"wall_s": wall_s}})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``save`` wrote."""
        self.algorithm.load_state_dict(state["algorithm"])
        self.kept, self.kept_loss = dict(state["policy"]), float(state["kept"]["loss"])
        self.kept_update = int(state["kept"]["update"])
