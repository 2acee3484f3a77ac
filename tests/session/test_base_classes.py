"""Parts that have the methods of ours but not their base class are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embodied.core.errors import UserError
from embodied.core.registry import Entry
from embodied.core.spec import EnvSpec
from embodied.envs import FAMILIES
from embodied.envs.checks.conformance import check_env
from embodied.policies import POLICIES, GaussianConfig
from embodied.session.config import compose_run
from embodied.session.factories import make_env, make_policy, make_spec


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
