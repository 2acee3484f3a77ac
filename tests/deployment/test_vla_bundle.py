"""Bundles of policies that are too large for ONNX: the layout of transformers, served to a robot without torch.

The policy is ``vla`` with its own options, vision and language frozen in bfloat16, with adaptations (LoRA) and random
weights, but of a few thousand parameters.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn
from transformers import PI0ForConditionalGeneration

from embodied import deploy, export, serve
from embodied.core.errors import UserError
from embodied.core.user_files import sha256
from embodied.deployment.bundle.format import read_bundle, write_description
from embodied.deployment.bundle.runner import PolicyRunner, check_parity, parity
from embodied.deployment.bundle.write import chosen_layout
from embodied.deployment.serving.client import RemotePlanner
from embodied.session.config import RunConfig
from embodied.session.deployed import exporting
from embodied.session.factories import make_spec
from embodied.session.torch_runner import TorchRunner
from tests.commands.helpers import SMALL, run, run_train
from tests.deployment.exports import flow_bundle, small_config, write_small
from tests.deployment.servers import serving
from tests.policies.vla_builders import MODEL

DESCRIPTION = ("bundle.json", "parity.npz", "simulation.json", "README.md")


@cache
def large() -> tuple[Path, nn.Module, RunConfig]:
    """Return the bundle of the policy, read-only, the policy, and its configuration."""
    path = Path(mkdtemp(prefix="bundle-"))
    model = MODEL | {"max_state_dim": 40, "max_action_dim": 5}
    config = small_config(
        "tabletop", "vla",
        **{"policy.image_size": 16, "policy.model": model, "policy.horizon": 4, "policy.execute": 4,
           "policy.denoise_steps": 2, "policy.lora_rank": 2, "task.max_episode_steps": 8},
    )  # fmt: skip
    return path, write_small(path, config, "transformers")[1], config


def test_the_bundle_plans_what_the_policy_plans() -> None:
    path, policy, config = large()
    runner, spec = TorchRunner(path), make_spec(config)
    assert parity(runner, path) <= 1e-5
    assert runner.bundle.parity_max <= 1e-5
    assert (runner.bundle.layout, runner.bundle.horizon) == ("transformers", 4)
    recorded = exporting.record(config, policy, 2)
    noise = torch.randn(len(recorded["state"]), *policy.plan_noise_shape)
    scale, offset = (torch.tensor([getattr(t, name) for t in spec.action.terms]) for name in ("scale", "offset"))
    expected = policy.plan(recorded, noise).clamp(-1, 1) * scale + offset
    state_scale = torch.tensor([t.scale for t in spec.state for _ in range(t.size)])
    inputs = {key: value.numpy() for key, value in recorded.items()}
    inputs |= {"state": (recorded["state"] / state_scale).numpy(), "noise": noise.numpy()}
    np.testing.assert_allclose(runner.plan(inputs), expected.numpy(), atol=1e-5 * scale.max().item())
    assert expected.std(0).max() > 1e-3  # the inputs matter


def test_transformers_loads_it_and_the_readme_says_how() -> None:
    path, policy, _ = large()
    model = PI0ForConditionalGeneration.from_pretrained(path)
    assert sum(weight.numel() for weight in model.parameters()) < sum(w.numel() for w in policy.parameters())
    readme = (path / "README.md").read_text()
    assert "server=ws://127.0.0.1:8000" in readme
    assert "onnxruntime" not in readme


def test_a_robot_without_the_weights_is_driven_by_a_server(tmp_path: Path) -> None:
    path, _, _ = large()
    robots = tmp_path / "bundle"
    robots.mkdir()
    for name in DESCRIPTION:
        shutil.copy(path / name, robots)
    words = [f"bundle={robots}", "robot=sim", "lockstep=true", "home=false"]
    alone = run(deploy.main, [f"bundle={path}", *words[1:]])
    assert alone.code == 2
    assert "needs torch and transformers" in alone.stderr
    assert "server=ws://" in alone.stderr
    runner = serve.runner_of(serve.ServeOptions(bundle=str(path)))
    with serving(runner) as (server, port):
        outcome = run(deploy.main, [*words, f"server=ws://127.0.0.1:{port}"])
        assert outcome.code == 0, outcome.stderr
        assert server.requests == 2
        assert outcome.result["ended"] == {"time limit": 1}
        with pytest.raises(UserError, match="serves another policy"):
            RemotePlanner(f"ws://127.0.0.1:{port}", bundle=read_bundle(flow_bundle()))


def test_damage_is_refused(tmp_path: Path) -> None:
    path, _, _ = large()
    copy = Path(shutil.copytree(path, tmp_path / "bundle"))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x01\x02\x03")
    with pytest.raises(UserError, match=r"model.safetensors is not the file that was exported"):
        TorchRunner(copy)
    (copy / "policy.json").unlink()
    with pytest.raises(UserError, match=r"lacks policy.json|model.safetensors is not"):
        TorchRunner(copy)


def rehash(path: Path, name: str, content: bytes) -> None:
    """Write a file and its hash."""
    (path / name).write_bytes(content)
    bundle = read_bundle(large()[0])
    write_description(path, replace(bundle, files=bundle.files | {name: sha256(path / name)}))


@pytest.mark.parametrize("name", ["special_tokens_map.json", ".architecture", "adapter_config.json", "evil.py"])
def test_a_file_that_was_not_hashed_is_refused(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(large()[0], tmp_path / "bundle"))
    (copy / name).write_text("{}")
    with pytest.raises(UserError, match=f"has '{name}', which was not exported"):
        TorchRunner(copy)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", b"{}", "files: got 'adapter_config.json', which no bundle of this layout has"),
        ("evil.py", b"", "files: got 'evil.py'"),
        ("pytorch_model.bin", b"", "files: got 'pytorch_model.bin'"),
        ("policy.json", b"[]", "policy.json is no section policy of a configuration"),
        ("policy.json", b"[" * 9999, "cannot read .*policy.json"),
        ("policy.json", b'{"name": "none"}', "unknown policy 'none'"),
        ("policy.json", b'{"name": "flow", "horizon": 4, "pretrained": 1}', "unknown key"),
        ("statistics.safetensors", b"", "statistics.safetensors cannot be loaded"),
        ("statistics.safetensors", save({"other": torch.zeros(2)}), "statistics.safetensors does not fit"),
        ("tokenizer.json", b"{}", "cannot be loaded"),
        ("config.json", b"[]", "cannot be loaded"),
        ("model.safetensors", b"", "cannot be loaded"),
    ],
)
def test_a_tampered_file_is_refused_also_with_its_hash(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    copy = Path(shutil.copytree(large()[0], tmp_path / "bundle"))
    rehash(copy, name, content)
    with pytest.raises(UserError, match=message) as caught:
        TorchRunner(copy)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_changes_plans_and_is_refused(tmp_path: Path) -> None:
    path = large()[0]
    copy = Path(shutil.copytree(path, tmp_path / "bundle"))
    content = json.loads((copy / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["red"], words["blue"] = words["blue"], words["red"]
    rehash(copy, "tokenizer.json", json.dumps(content).encode())
    with pytest.raises(UserError, match="the outputs of torch and of the runner differ by"):
        check_parity(TorchRunner(copy), copy)
    outcome = run(serve.main, [f"bundle={copy}"])
    assert (outcome.code, "differ by" in outcome.stderr) == (2, True), outcome.stderr


def test_layouts(tmp_path: Path) -> None:
    _, policy, _ = large()
    assert chosen_layout(policy) == "onnx"
    assert chosen_layout(policy, "transformers") == "transformers"
    with pytest.raises(UserError, match="is an ONNX model"):
        TorchRunner(flow_bundle())
    with pytest.raises(UserError, match=r"device=cuda: .* is an ONNX model, which runs on the cpu"):
        serve.runner_of(serve.ServeOptions(bundle=str(flow_bundle()), device="cuda"))
    with pytest.raises(UserError, match="another machine"):
        PolicyRunner(large()[0])
    assert run_train(*SMALL, "total_steps=64", f"out={tmp_path / 'run'}").code == 0
    words = [f"run={tmp_path / 'run'}", f"out={tmp_path / 'bundle'}", "episodes=1", "layout=transformers"]
    outcome = run(export.main, words)
    assert outcome.code == 2
    assert "policy gaussian wraps no model of transformers" in outcome.stderr
    assert not (tmp_path / "bundle").exists()
