"""The grounded ``vla_tiny`` that comes with the package fits its task as it is now, and finds what is named."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from embodied.algos.config import GroundingConfig
from embodied.algos.supervised import Grounding
from embodied.envs import make_sampler
from embodied.envs.mujoco.labels import LabeledPool
from embodied.session.defaults import compose_new
from embodied.session.factories import make_env
from embodied.session.warm_start import make_initial_policy
from embodied.trainers.scenes import FRAMES_PER_SCENE, render_scenes

WORDS = {"task": "tabletop", "algo": "sft", "init": "embodied/assets/tabletop_grounded"}


def test_the_grounded_policy_of_the_package_finds_what_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # as in the folder of someone who has installed the package
    config = compose_new(WORDS)
    assert (config.policy.name, config.policy.options.freeze) == ("vla_tiny", ("vision", "language"))
    pool = make_env(config, 32, 1, tmp_path)
    scenes = render_scenes(LabeledPool(pool, make_sampler(pool, 1)), seed=1)
    frames = list(islice(scenes, FRAMES_PER_SCENE))
    obs = {key: torch.cat([frame[key] for frame in frames]) for key in frames[0]}
    algorithm = Grounding(make_initial_policy(config, pool.spec), GroundingConfig(), seed=0, device=torch.device("cpu"))
    pool.close()
    assert all(rate > 0.95 for rate in algorithm.localization_rates(obs).values())
    error_N3 = algorithm.predict_positions(obs)[:, 3:6] - obs["target_positions"][:, 3:6]
    near_N = obs["target_positions"][:, 3:6].norm(dim=-1) < 0.12
    assert error_N3[near_N].norm(dim=-1).median() < 0.004, "metres"
