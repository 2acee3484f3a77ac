"""A training that breaks: it ends with an error, and its last checkpoint is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algos.supervised import SFT
from embodied.runtime import checkpoint
from tests.commands.helpers import run_collect, run_train

WORDS = [
    "task=reach", "device=cpu", "policy.actor_hidden=[16]", "policy.critic_hidden=[16]", "policy.head_hidden=[16]",
    "algo=sft", "algo.updates=40", "algo.validate_every=10", "eval_episodes=0", "checkpoint_minutes=0",
]  # fmt: skip


def test_a_gradient_that_is_not_finite_poisons_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of update 20 is infinite although its loss is finite; a checkpoint is due after that update."""
    update = SFT.update

    def breaking(self: SFT, *args: Any) -> float:
        weight = dict(self.policy.named_parameters())["denoiser.output.weight"]
        hook = weight.register_hook(lambda gradient: gradient / 0) if self.updates == 19 else None
        try:
            return update(self, *args)
        finally:
            if hook is not None:
                hook.remove()

    data, run_dir = tmp_path / "demos", tmp_path / "run"
    assert run_collect("task=reach", "episodes=3", f"out={data}", "num_threads=1").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(SFT, "update", breaking)
        failed = run_train(*WORDS, f"data={data}", f"out={run_dir}")
    assert failed.code == 1
    assert "FloatingPointError: update 20 is not finite: norm of the gradient" in failed.stderr
    assert f"failed; to go on from the last checkpoint: resume={run_dir}" in failed.stderr
    found = checkpoint.load_latest(run_dir)
    assert found is not None
    assert found.env_steps == 10
    for weights in (found.state["policy"], found.state["algorithm"]["policy"], found.state["algorithm"]["average"]):
        assert all(torch.isfinite(value).all() for value in weights.values())
    assert run_train(f"resume={run_dir}").code == 0
