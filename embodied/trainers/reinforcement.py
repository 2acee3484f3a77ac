"""Reinforcement learning: a runtime collects experience and updates the policy."""

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from embodied.core.algorithm import Algorithm
from embodied.core.errors import UserError, check_base
from embodied.core.policy import Policy
from embodied.runtime.loop import Runtime
from embodied.runtime.recipe import Recipe, device_of
from embodied.runtime.registry import build_runtime
from embodied.runtime.watch import TRACE_S
from embodied.session import factories
from embodied.session.config import RunConfig
from embodied.session.trainer import Report, Trainer
from embodied.session.warm_start import make_initial_policy

TRACE_FILE = "trace.json.gz"


class ReinforcementTrainer(Trainer):
    """Train on the policy's own experience. An iteration is one update; its state is the runtime's."""

    evaluates = True

    def __init__(self, config: RunConfig, run_dir: Path, new: bool) -> None:
        super().__init__(config, run_dir, new)
        spec = factories.make_spec(config)
        self.has_success = spec.has_success
        if new and config.cut_after_success and not spec.has_success:  # runs of earlier versions may have it
            raise UserError(f"cut_after_success: task {config.task.title} reports no success")
        self.unseen = [name for name in spec.images if name not in {camera.name for camera in spec.cameras}]
        self.runtime = build(config, run_dir, new)
        self._traced = False

    @classmethod
    def check(cls, config: RunConfig) -> None:
        super().check(config)
        spec = factories.make_spec(config)
        for option in ("stop_at_success", "repeat_failures"):
            if getattr(config, option) and not spec.has_success:
                raise UserError(f"{option}: task {config.task.title} reports no success")
        if config.repeat_failures and spec.repeats != "all":
            raise UserError(f"repeat_failures: task {config.task.title} cannot begin a certain episode again")
        if config.group_size > 1:
            check_groups(config)

    @property
    def policy(self) -> Policy:
        return self.runtime.policy

    @property
    def iteration(self) -> int:
        return self.runtime.iteration

    @property
    def steps(self) -> int:
        return self.runtime.env_steps

    def announcement(self) -> str:
        config, options, runtime = self.config, self.config.runtime, self.runtime
        return (
            f"training {config.task.title}: policy {config.policy.name} ({self.parameters()}), algo "
            f"{config.algo.name}, {config.num_envs:,} envs, runtime {options.name} "
            f"({runtime.layout_note}; {options.device}), seed {config.seed} → {self.run_dir}; "
            f"a resumed run continues {runtime.resume_note}"
            + (f"; not observed: {', '.join(self.unseen)}" if self.unseen else "")
        )

    def iterations(self, stop: threading.Event, deadline_s: float) -> Iterator[Report]:
        for iteration in self.runtime.iterations(self.total_steps, deadline_s, stop):
            row = {"env_steps": iteration.env_steps, **iteration.metrics}
            note = self._write_trace() if self.runtime.trace and self.runtime.trace.complete else None
            yield Report(row, iteration.evaluation, note, iteration.histograms)

    def state_dict(self) -> dict[str, Any]:
        return self.runtime.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.runtime.load_state_dict(state)

    def keep_evaluated(self) -> None:
        self.runtime.keep_evaluated()

    def result(self) -> dict[str, Any]:
        return {"env_steps": self.runtime.env_steps}

    def close(self) -> None:
        self.runtime.close()
        self._write_trace()

    def _write_trace(self) -> str | None:
        """Write the trace, once, if there is one; return a line that says where. A run that never began has none."""
        trace, path = self.runtime.trace, self.run_dir / TRACE_FILE
        if trace is None or self._traced or not self.run_dir.is_dir():
            return None
        trace.write(path)
        self._traced = True
        return f"trace of the first {TRACE_S:.0f} s: {path} (open it in https://ui.perfetto.dev)"


def check_groups(config: RunConfig) -> None:
    """Raise UserError unless groups of equal episodes fit into env groups, and fragments are whole episodes."""
    runtime = config.runtime
    groups_of_worker = runtime.groups_of_worker(device_of(runtime).type == "cuda", factories.envs_on_gpu(config))
    env_groups = runtime.num_env_workers * groups_of_worker
    if config.num_envs % (env_groups * config.group_size):
        raise UserError(
            f"algo.group_size={config.group_size} does not divide the envs of a group of the runtime: num_envs must be "
            f"a multiple of {env_groups * config.group_size} (group_size * num_env_workers * groups_per_worker), got "
            f"{config.num_envs}"
        )
    for option in ("cut_after_success", "repeat_failures"):
        if getattr(config, option):
            allowed = f"0: algo={config.algo.name} compares whole episodes of groups of envs"
            raise UserError(f"{option}: got {getattr(config, option)}, allowed: {allowed}")
    steps, execute = factories.make_spec(config).max_episode_steps, config.policy.options.execute
    if runtime.decisions * execute != steps:
        fits = "" if steps % execute else f": set runtime.decisions={steps // execute}"
        raise UserError(
            f"algo={config.algo.name} compares whole episodes, so runtime.decisions * policy.execute must be the "
            f"{steps} steps of task {config.task.title}, got {runtime.decisions} * {execute}{fits}"
        )


def build(config: RunConfig, run_dir: Path, new: bool = True) -> Runtime:
    """Build the runtime of a run, with its envs, policy and algorithm. new: no checkpoint will be loaded."""

    def make_algorithm(policy: Policy) -> Algorithm:
        algorithm: Algorithm = factories.make_algorithm(config, policy)
        check_base(algorithm, Algorithm, f"algo={config.algo.name}")
        steps = config.num_envs * config.runtime.decisions * config.policy.options.execute  # of one update, at most
        algorithm.total_updates = max(1, config.total_steps // steps)
        return algorithm

    make_saved = partial(factories.make_saved_policy, config, run_dir)
    recipe = Recipe(
        config.runtime,
        num_envs=config.num_envs,
        seed=config.seed,
        make_env=partial(
            factories.make_acting_env, config, run_dir=run_dir, cut_after_success=config.cut_after_success
        ),
        make_sampler=partial(factories.make_sampler, config),
        make_policy=partial(make_initial_policy, config) if new else make_saved,
        make_algorithm=make_algorithm,
        make_eval_env=partial(factories.make_eval_env, config, run_dir=run_dir),
        envs_on_gpu=factories.envs_on_gpu(config),
        eval_plans=partial(factories.evaluation_plans, during_training=True),
        confirm_at=config.stop_at_success,
    )
    return build_runtime(recipe)
