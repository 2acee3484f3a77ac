"""Training by what a simulator knows of its scenes: a task in, a run directory out, whose policy imitation can start
from (init=).

Pictures ──► Grounding.update ──► average weights ──► what they find in scenes that nobody trains on
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from algos.grounding import Grounding
from embodied.core.errors import UserError
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.types import Obs
from embodied.report.progress import Progress
from embodied.run import factories
from embodied.run.config import RunConfig
from embodied.runtime import threads
from embodied.runtime.checkpoint import Checkpoint
from embodied.training.scenes import LOOKS, Pictures, Scenes
from embodied.training.supervised import SupervisedRun
from envs import SamplerSetup, UniformConfig, UniformSampler

CAPACITY = 16384  # observations to draw from
VALIDATION_SCENES = 64  # LOOKS pictures of each
NEAR_M = 0.12  # from the tool to the named object: soon the gripper closes


def ground(config: RunConfig, run_dir: Path, found: Checkpoint | None, start_s: float, resumed: bool) -> dict[str, Any]:
    """Train on scenes of ``config.task`` and tell what is found in others; see ``SupervisedRun.carry_out``."""
    if config.policy.get("freeze"):
        raise UserError(
            f"algo=grounding trains vision and language: policy.freeze must be [], got {config.policy['freeze']}"
        )
    threads.use(threads.available_cores())
    training = GroundingRun(config, run_dir, new=found is None)
    try:
        return training.carry_out(found, start_s, resumed)
    finally:
        training.env.close()


class GroundingRun(SupervisedRun):
    """The scenes of one run and the algorithm that learns from them. UserError if they do not fit.

    A run that goes on has other scenes than it would have had (``Pictures``).
    """

    loss_name = "train/grounding_loss"
    algorithm: Grounding

    def __init__(self, config: RunConfig, run_dir: Path, new: bool) -> None:
        cores = threads.available_cores()
        self.env = factories.make_env(config, config.num_envs, cores, run_dir)
        torch.manual_seed(config.seed)
        super().__init__(config, run_dir, self.env.spec, new)
        judged = factories.make_env(config, VALIDATION_SCENES, cores, run_dir)
        seed = first_env_seed(Purpose.SCENES, int(config.runtime["eval_seed"]))
        sampler = UniformSampler(judged.spec, UniformConfig(), SamplerSetup(VALIDATION_SCENES, seed))
        scenes = Scenes(judged, sampler, self.policy.execute, seed)
        looks = [scenes.look() for _ in range(LOOKS)]
        self.validation: Obs = {key: torch.cat([look[key] for look in looks]) for key in looks[0]}
        judged.close()

    def announcement(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.algorithm.policy.parameters())
        return (
            f"grounding {self.config.policy['name']} ({parameters:,} parameters) in pictures of "
            f"{self.config.task['name']}: {self.config.num_envs} envs, seed {self.config.seed} → {self.run_dir}"
        )

    @cached_property
    def pictures(self) -> Pictures:
        """First asked for by the first update: a run that goes on knows only then how many it has made."""
        algorithm = self.algorithm
        return Pictures(
            self.env, partial(factories.make_sampler, self.config), self.policy.execute,
            seed=self.config.seed, updates=algorithm.updates, capacity=CAPACITY,
            reuse=algorithm.config.reuse,
        )  # fmt: skip

    def update(self) -> float:
        algorithm, options = self.algorithm, self.algorithm.config
        if algorithm.updates == 0:
            unknown = ("state", "named") if self.config.init is None else ("named",)
            algorithm.fit_normalizer(self.pictures.buffer.rows(*unknown))
        return algorithm.update(self.pictures.draw(options.batch_size, algorithm.generator))

    def validate(self) -> tuple[float, dict[str, float]]:
        found = {f"eval/found/{camera}": rate for camera, rate in self.algorithm.find(self.validation).items()}
        error = {f"eval/error_cm/{where}": cm for where, cm in _error_cm(self._located()).items()}
        return self.algorithm.validate(self.validation), found | error

    def evaluate(self, progress: Progress, trained: str) -> dict[str, Any] | None:
        """What is found in scenes that nobody trained on, by split and camera, and how precisely, also by goal."""
        if not self.config.eval_episodes:
            return None
        progress.message(f"trained for {trained}")
        located, spec = self._located(), self.env.spec
        by_split, by_goal = _by(spec.splits, located), _by(spec.goals, located)
        return {
            "task": self.config.task["name"],
            "pictures": VALIDATION_SCENES * LOOKS,
            "found": {split: self.algorithm.find(obs) for split, obs in by_split.items()},
            "error_cm": {split: _error_cm(obs) for split, obs in by_split.items()},
            "goals": {goal: _error_cm(obs) for goal, obs in by_goal.items()},
        }

    def _located(self) -> Obs:
        """The pictures to judge by, and ``located``: ``named`` as the policy tells it."""
        return self.validation | {"located": self.algorithm.locate(self.validation)}


def _error_cm(obs: Obs) -> dict[str, float]:
    """Median distance, cm, between where the named object is from the tool and where the policy says that it is; where
    it is near the tool, and where it is not."""
    true_N3, told_N3 = obs["named"][:, 3:6], obs["located"][:, 3:6]
    error_N, near_N = (told_N3 - true_N3).norm(dim=-1), true_N3.norm(dim=-1) < NEAR_M
    chosen = {"near": near_N, "far": ~near_N}
    return {name: 100 * float(error_N[rows].median()) for name, rows in chosen.items() if rows.any()}


def _by(labels: Sequence[str], obs: Obs) -> dict[str, Obs]:
    """Observations apart by the labels of their instructions."""
    told = [labels[i] for i in obs["instruction"].tolist()]
    chosen = {label: [row for row, name in enumerate(told) if name == label] for label in sorted(set(told))}
    return {label: {key: value[rows] for key, value in obs.items()} for label, rows in chosen.items()}
