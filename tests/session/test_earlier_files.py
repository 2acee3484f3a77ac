"""Runs and bundles of an earlier commit still load: ``tests/data/earlier``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from embodied import deploy
from embodied.deployment.bundle.runner import PolicyRunner, check_parity
from embodied.session.config import read_run
from embodied.session.torch_runner import TorchRunner
from tests.commands.helpers import run, run_eval, run_train

EARLIER = Path(__file__).parents[1] / "data" / "earlier"
GEMMA = "num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2,head_dim:8,intermediate_size:24"
VISION = "hidden_size:12,num_hidden_layers:1,num_attention_heads:2,intermediate_size:16,patch_size:8"
ARCHITECTURE = {
    "flow": ["task=reach", "policy=flow", "policy.actor_hidden=[16,16]", "policy.head_hidden=[16]"],
    "vla_tiny": [
        "task=tabletop", "policy=vla_tiny", "policy.image_size=16", "policy.horizon=4", "policy.execute=4",
        "policy.denoise_steps=2", "policy.freeze=[]",
        "policy.model={max_state_dim:40,max_action_dim:5,vlm_config:{projection_dim:16,"
        f"text_config:{{hidden_size:16,{GEMMA}}},vision_config:{{{VISION},vision_use_head:false}}}},"
        f"dit_config:{{hidden_size:20,{GEMMA}}}}}",
    ],
}  # fmt: skip
RUNS = tuple(ARCHITECTURE)
FEW = (
    "num_envs=4", "max_minutes=null", "device=cpu", "runtime=sync", "runtime.decisions=2", "eval_episodes=0",
    "policy.critic_hidden=[16]", "task.max_episode_steps=8", "algo.num_minibatches=1", "algo.epochs=1",
)  # fmt: skip


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A copy of the earlier files."""
    return Path(shutil.copytree(EARLIER, tmp_path / "earlier", symlinks=True))


@pytest.mark.parametrize("name", RUNS)
def test_an_evaluation_of_an_earlier_run_gives_the_same_result(earlier: Path, name: str) -> None:
    run_dir = earlier / "runs" / name
    outcome = run_eval(f"run={run_dir}", "episodes=4", "seed=3")
    assert outcome.code == 0, outcome.stderr
    expected = json.loads((run_dir / "eval" / "final_87.json").read_text())
    for key in ("task", "episodes", "success_at_end", "episode_length_mean", "noise"):
        assert outcome.result[key] == expected[key]
    assert outcome.result["return_mean"] == pytest.approx(expected["return_mean"], abs=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_an_earlier_run_is_resumed(earlier: Path, name: str) -> None:
    run_dir = earlier / "runs" / name
    outcome = run_train(f"resume={run_dir}", "total_steps=88", "max_minutes=null", "eval_episodes=0")
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["iterations"] == 4
    assert read_run(run_dir).total_steps == 88


@pytest.mark.parametrize("name", RUNS)
def test_training_starts_from_the_policy_of_an_earlier_run(tmp_path: Path, name: str) -> None:
    words = [*ARCHITECTURE[name], *FEW, f"init={EARLIER / 'runs' / name}", "total_steps=1", f"out={tmp_path / 'run'}"]
    outcome = run_train(*words)
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["iterations"] == 1


def test_earlier_bundles_plan_what_they_planned() -> None:
    onnx, model = EARLIER / "bundles" / "onnx", EARLIER / "bundles" / "transformers"
    assert check_parity(PolicyRunner(onnx), onnx) <= 1e-5
    assert check_parity(TorchRunner(model), model) <= 1e-5


def test_an_earlier_bundle_drives_the_simulated_arm(earlier: Path) -> None:
    words = [f"bundle={earlier / 'bundles/onnx'}", "robot=sim", "lockstep=true", "home=false"]
    outcome = run(deploy.main, words)
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["ended"] == {"time limit": 1}
