"""Grounding: train on labelled scenes of a task; imitation can start from the policy (init=).

SceneDataset ──► Grounding.update ──► average weights ──► localization in scenes that are not trained on
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.algos.supervised import Grounding
from embodied.core.errors import UserError
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.types import Obs
from embodied.envs import make_sampler
from embodied.envs.mujoco.labels import LabeledPool
from embodied.runtime import threads
from embodied.session import factories
from embodied.session.config import RunConfig
from embodied.trainers.scenes import FRAMES_PER_SCENE, SceneDataset, render_scenes
from embodied.trainers.supervised import SupervisedTrainer

CAPACITY = 16384  # observations to draw from
VALIDATION_SCENES = 64  # FRAMES_PER_SCENE observations of each
NEAR_M = 0.12  # near: the named object is closer to the tool than this, so the gripper soon closes


class GroundingTrainer(SupervisedTrainer):
    """Train on scenes of the run's task; a resumed run sees other ones. UserError if task and policy do not fit."""

    loss_name = "train/grounding_loss"
    algorithm: Grounding

    @classmethod
    def check(cls, config: RunConfig) -> None:
        super().check(config)
        spec, freeze = factories.make_spec(config), getattr(config.policy.options, "freeze", ())
        if freeze:
            raise UserError(f"algo=grounding trains vision and language: policy.freeze must be [], got {freeze}")
        lacking = [f"policy={config.policy.name} has no cameras"] if not spec.cameras else []
        lacking += [f"{spec.task} labels nothing that they see"] if not spec.descriptions else []
        if lacking:
            raise UserError(f"algo=grounding needs cameras and a task with masks: {', and '.join(lacking)}")

    def __init__(self, config: RunConfig, run_dir: Path, new: bool) -> None:
        self.spec = factories.make_spec(config)
        super().__init__(config, run_dir, new, self.spec)
        self.validation = self._validation_scenes()

    def announcement(self) -> str:
        return (
            f"grounding {self.config.policy.name} ({self.parameters()}) in pictures of "
            f"{self.config.task.title}: {self.config.num_envs} envs, seed {self.config.seed} → {self.run_dir}"
        )

    @cached_property
    def scenes(self) -> SceneDataset:
        """Training scenes, opened at the first update."""
        return self.open_scenes(masks=True, capacity=CAPACITY, reuse=self.algorithm.config.reuse)

    def update(self) -> float:
        algorithm, options = self.algorithm, self.algorithm.config
        if algorithm.updates == 0:
            unknown = ("state", "target_positions") if self.config.init is None else ("target_positions",)
            algorithm.fit_normalizer(self.scenes.rows(*unknown))
        return algorithm.update(self.scenes.draw(options.batch_size, algorithm.generator))

    def validate(self) -> tuple[float, dict[str, float]]:
        rates = self.algorithm.localization_rates(self.validation)
        found = {f"eval/found/{camera}": rate for camera, rate in rates.items()}
        error = {f"eval/error_cm/{where}": cm for where, cm in _error_cm(self._predicted()).items()}
        return self.algorithm.validate(self.validation), found | error

    def evaluation_size(self) -> str:
        return f"{VALIDATION_SCENES * FRAMES_PER_SCENE} pictures"

    def evaluate(self, watch: Callable[[float], None]) -> dict[str, Any]:
        """Evaluate in scenes that are not trained on: localization rate per split and camera, error also per goal."""
        obs = self._predicted()
        by_split = _by(self.spec.splits, obs)
        return {
            "task": self.config.task.title,
            "pictures": VALIDATION_SCENES * FRAMES_PER_SCENE,
            "found": {split: self.algorithm.localization_rates(rows) for split, rows in by_split.items()},
            "error_cm": {split: _error_cm(rows) for split, rows in by_split.items()},
            "goals": {goal: _error_cm(rows) for goal, rows in _by(self.spec.goals, obs).items()},
        }

    def _validation_scenes(self) -> Obs:
        """Render the validation scenes, of all splits. Runs with the same ``eval_seed`` have the same ones."""
        pool = factories.make_env(self.config, VALIDATION_SCENES, threads.available_cores(), self.run_dir)
        seed = first_env_seed(Purpose.VALIDATION_SCENES, self.config.runtime.eval_seed)
        scenes = render_scenes(LabeledPool(pool, make_sampler(pool, seed)), seed)
        frames = list(islice(scenes, FRAMES_PER_SCENE))
        pool.close()
        return {key: torch.cat([frame[key] for frame in frames]) for key in frames[0]}

    def _predicted(self) -> Obs:
        """Return the validation scenes with the policy's ``predicted_positions``."""
        return self.validation | {"predicted_positions": self.algorithm.predict_positions(self.validation)}


def _error_cm(obs: Obs) -> dict[str, float]:
    """Return the median error (cm) of the predicted position of the named object relative to the tool, near and far."""
    true_N3, predicted_N3 = obs["target_positions"][:, 3:6], obs["predicted_positions"][:, 3:6]
    error_N, near_N = (predicted_N3 - true_N3).norm(dim=-1), true_N3.norm(dim=-1) < NEAR_M
    chosen = {"near": near_N, "far": ~near_N}
    return {name: 100 * float(error_N[rows].median()) for name, rows in chosen.items() if rows.any()}


def _by(labels: Sequence[str], obs: Obs) -> dict[str, Obs]:
    names = np.array([labels[i] for i in obs["instruction"].tolist()])
    return {name: {key: value[names == name] for key, value in obs.items()} for name in sorted(set(names.tolist()))}
