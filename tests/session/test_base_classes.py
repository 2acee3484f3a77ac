"""Parts that have the methods of ours but not their base class are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from embodied.algos import ALGORITHMS
from embodied.algos.config import PPOConfig
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.registry import Entry
from embodied.core.spec import EnvSpec
from embodied.envs import FAMILIES
from embodied.envs.checks.conformance import check_env
from embodied.policies import POLICIES
from embodied.policies.config import GaussianConfig
from embodied.session.config import compose_run
from embodied.session.factories import make_env, make_policy, make_spec
from embodied.trainers.reinforcement import build


class ForeignPolicy(nn.Module):
    """A policy but for its base class."""

    horizon = execute = 1

    def __init__(self, spec: EnvSpec, config: GaussianConfig) -> None:
        super().__init__()

    def plan(self, obs: dict[str, torch.Tensor], noise: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(obs["state"]), 1, 4)


def test_a_policy_without_the_base_class_is_refused_by_its_name_and_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES._entries, "gaussian", Entry("gaussian", ForeignPolicy, GaussianConfig))
    config = compose_run({"task": "reach", "policy": "gaussian"})
    with pytest.raises(UserError) as refused:
        make_policy(config, make_spec(config))
    assert str(refused.value).startswith("policy=gaussian: class ")
    assert str(refused.value).endswith("ForeignPolicy must inherit Policy (from embodied.core.policy import Policy)")


class ForeignEnv:
    """An environment but for its base class."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.spec, self.num_envs, self.device = spec, num_envs, torch.device("cpu")

    def close(self) -> None:
        pass


def test_an_environment_without_the_base_class_is_refused_in_runs_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_run({"task": "reach", "policy": "gaussian"})
    spec = make_spec(config)
    family = FAMILIES["mujoco"].build
    monkeypatch.setattr(family, "make", lambda self, id, task, *, num_envs, **options: ForeignEnv(spec, num_envs))
    wanted = "ForeignEnv must inherit VecEnv (from embodied.core.env import VecEnv)"
    with pytest.raises(UserError) as refused:
        make_env(config, 2, 1)
    assert str(refused.value).startswith("task=reach: class ")
    assert str(refused.value).endswith(wanted)
    with pytest.raises(UserError) as refused:
        check_env(lambda num_envs: ForeignEnv(spec, num_envs))  # type: ignore[arg-type, return-value]
    assert str(refused.value).endswith(wanted)


class ForeignAlgorithm:
    """An algorithm but for its base class."""

    trainer, explores = "reinforcement", True

    def __init__(self, policy: Policy, config: PPOConfig, *, seed: int, device: torch.device) -> None:
        self.policy = self.deployed = policy


def test_an_algorithm_without_the_base_class_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ALGORITHMS._entries, "ppo", Entry("ppo", ForeignAlgorithm, PPOConfig))
    config = compose_run({"task": "reach", "policy": "gaussian", "runtime": "sync", "num_envs": 2, "device": "cpu"})
    with pytest.raises(UserError) as refused:
        build(config, tmp_path)
    assert str(refused.value).startswith("algo=ppo: class ")
    assert str(refused.value).endswith("must inherit Algorithm (from embodied.core.algorithm import Algorithm)")
