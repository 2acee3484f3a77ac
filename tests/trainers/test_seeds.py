"""No training, validation, evaluation and demonstration have an episode in common, whatever the seed of the run is."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from embodied.core.seeds import Purpose, first_env_seed
from embodied.envs.base.delayed import DelayedEnv
from embodied.envs.episodes.sampler import UniformSampler
from embodied.runtime.sync import SyncRuntime
from embodied.session import factories
from embodied.session.config import compose_run
from embodied.trainers import grounding
from embodied.trainers.grounding import GroundingTrainer
from embodied.trainers.reinforcement import build

TINY = {"policy.critic_hidden": [4], "device": "cpu", "num_envs": 6, "runtime": "sync"}
VLA = {
    "task": "tabletop", "policy": "vla_tiny", "policy.image_size": 16,
    "policy.model.dit_config.num_hidden_layers": 1, "policy.model.vlm_config.text_config.num_hidden_layers": 1,
    "policy.model.vlm_config.vision_config.num_hidden_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 999, 1000, 1001, 2**31 - 1])
def test_reinforcement_learning(seed: int, tmp_path: Path) -> None:
    """The seed of evaluations during training is 1000."""
    config = compose_run({"task": "reach", "policy": "gaussian", "policy.actor_hidden": [4], **TINY, "seed": seed})
    assert config.runtime.eval_seed == 1000
    with build(config, tmp_path) as runtime:
        assert isinstance(runtime, SyncRuntime)
        samplers = [rollout.sampler for worker in runtime.workers for rollout in worker.rollouts]
        assert all(isinstance(sampler, UniformSampler) for sampler in samplers)
        plans = factories.evaluation_plans(runtime.spec, config.eval_episodes, seed)
        demonstrations = first_env_seed(Purpose.DEMONSTRATIONS, seed)
        used = {
            "training": {int(env_seed) for sampler in samplers for env_seed in sampler.seed_N},
            "evaluation during training": set(
                runtime.evaluator.plans(config.runtime.eval_episodes, config.runtime.eval_seed).seed_n.tolist()
            ),
            "final evaluation": set(plans.seed_n.tolist()),
            "demonstrations": set(range(demonstrations, demonstrations + 1000)),
        }
    assert [len(env_seeds) for env_seeds in used.values()] == [6, 200, 200, 1000]
    for (name, env_seeds), (other, others) in combinations(used.items(), 2):
        assert not env_seeds & others, (name, other)


def test_only_episodes_of_training_are_cut_after_success(tmp_path: Path) -> None:
    words = {"task": "reach", "policy.horizon": 5, "policy.max_delay": 1, "runtime.eval_episodes": 6}
    config = compose_run(words | TINY)
    assert config.cut_after_success == 8
    with build(config, tmp_path) as runtime:
        assert isinstance(runtime, SyncRuntime)
        for env in [rollout.env for worker in runtime.workers for rollout in worker.rollouts]:
            assert isinstance(env, DelayedEnv)
            assert env.env.cut_after_success == 8
        evaluated = runtime.evaluator.make_env()
        assert isinstance(evaluated, DelayedEnv)
        assert evaluated.env.cut_after_success == 0


def test_grounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grounding, "VALIDATION_SCENES", 4)
    config = compose_run({"algo": "grounding", **TINY, **VLA, "seed": 1000})
    with GroundingTrainer(config, tmp_path, new=True) as trainer:
        first = trainer.scenes.rows("state")["state"][: config.num_envs]
        distance_MN = torch.cdist(trainer.validation["state"][:4].double(), first.double())
        closed: list[bool] = []
        trainer.opened.callback(closed.append, True)
        trainer.finish()
        assert closed, "the envs of the scenes are still there while the policy is evaluated"
    assert len(first) == 6
    assert (distance_MN > 1e-3).all(), "a scene that is validated on is trained on"
