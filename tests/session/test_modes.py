"""A policy with dropout: it acts without, and learns with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.algos.config import PPOConfig, SFTConfig
from embodied.algos.ppo import PPO
from embodied.algos.supervised import SFT
from embodied.core.registry import Entry
from embodied.core.spec import EnvSpec
from embodied.core.types import Evaluation, Obs, PolicySample
from embodied.policies import POLICIES
from embodied.policies.config import GaussianConfig
from embodied.policies.gaussian import GaussianPolicy
from embodied.session.config import read_run
from embodied.session.factories import load_checkpoint, load_policy
from tests.commands.helpers import SMALL, run_eval, run_train

SEEN: set[tuple[str, bool]] = set()


class Watched(GaussianPolicy):
    """Notes which of its methods run in torch's training mode."""

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        SEEN.add(("plan", self.training))
        return super().plan(obs, noise)

    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        SEEN.add(("act", self.training))
        return super().act(obs, noise)

    def value(self, obs: Obs) -> Tensor:
        SEEN.add(("value", self.training))
        return super().value(obs)

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        SEEN.add(("evaluate", self.training))
        return super().evaluate(obs, chain)


def test_a_policy_acts_in_evaluation_mode_and_learns_in_training_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(POLICIES._entries, "gaussian", Entry("gaussian", Watched, GaussianConfig))
    SEEN.clear()
    run_dir = tmp_path / "run"
    assert run_train(*SMALL, "total_steps=128", f"out={run_dir}").code == 0
    assert run_eval(f"run={run_dir}", "episodes=4").code == 0
    assert {("plan", False), ("act", False), ("value", False), ("evaluate", True)} == SEEN
    assert not load_policy(read_run(run_dir), load_checkpoint(run_dir, "last")).training


def test_what_is_not_trained_itself_is_in_evaluation_mode() -> None:
    spec, cpu = EnvSpec.of_sizes("none", state=3, action=2), torch.device("cpu")
    policy = GaussianPolicy(spec, GaussianConfig())
    ppo = PPO(policy, PPOConfig(ema_decay=0.9, reference_kl_coef=0.1), seed=0, device=cpu)
    assert ppo.reference is not None
    parts = (ppo.reference, ppo.deployed, SFT(policy, SFTConfig(), seed=0, device=cpu).average)
    assert not any(part.training for part in parts)
    assert policy.training
