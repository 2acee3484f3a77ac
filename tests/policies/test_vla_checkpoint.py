"""Checkpoints of the vision-language-action policy: what transformers writes goes in, and comes out again."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PI0ForConditionalGeneration
from transformers.image_processing_backends import PilBackend
from transformers.models.pi0.image_processing_pi0 import PI0ImageProcessor

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.errors import UserError
from embodied.policies.vla.policy import VLAPolicy
from tests.algos.fragments import rollout
from tests.policies.vla_builders import MODEL, SPEC, build, config, observe, plain_sample

NUM = 12


def test_a_checkpoint_of_transformers_goes_in_and_out(tmp_path: Path) -> None:
    """save_pretrained ─► policy.pretrained ─► two updates ─► save_pretrained ─► plain transformers: same actions."""
    build(seed=3).save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"pretrained": str(tmp_path / "base"), "lora_rank": 2, "denoise_steps": 7}
    policy, obs = VLAPolicy(SPEC, config(**options)), observe(NUM)
    start = torch.randn(NUM, 3, policy.width)
    base = build(seed=3, denoise_steps=7)
    torch.testing.assert_close(
        policy.integrate_ode(obs, start)[:, -1], plain_sample(base, obs, start), atol=1e-5, rtol=1e-5
    )
    ppo = PPO(policy, PPOConfig(epochs=2, num_minibatches=2), seed=0, device=torch.device("cpu"))
    for version in range(2):
        ppo.update([rollout(policy, seed=version, version=version, T=2, N=6, rows=observe(NUM, version))], version)
    policy.save_pretrained(tmp_path / "tuned")
    model = PI0ForConditionalGeneration.from_pretrained(tmp_path / "tuned")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    expected = policy.integrate_ode(obs, start)[:, -1]
    assert not torch.allclose(expected, plain_sample(base, obs, start), atol=1e-3)
    policy.save_architecture(tmp_path / "kept")
    written = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("kept", "tuned")]
    assert [numbers["num_inference_steps"] for numbers in written] == [7, 7], "those of the policy"
    policy.parts = policy.parts._replace(model=model, tokenizer=tokenizer)
    torch.testing.assert_close(plain_sample(policy, obs, start), expected, atol=1e-5, rtol=1e-5)


def test_an_architecture_is_enough_beside_the_weights_of_a_run(tmp_path: Path) -> None:
    policy, obs = build(seed=3), observe(NUM)
    policy.save_architecture(tmp_path / "kept")
    drawn = torch.get_rng_state()
    other = VLAPolicy(SPEC, config(pretrained=str(tmp_path / "kept" / ".architecture"), model={}))
    policy.save_pretrained(tmp_path / "whole")
    torch.set_rng_state(drawn)
    whole = VLAPolicy(SPEC, config(pretrained=str(tmp_path / "whole"), model={}))
    critics = zip(other.critic.parameters(), whole.critic.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in critics), "weights that are replaced draw no numbers"
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.plan(obs), policy.plan(obs))


def test_the_folder_of_a_stopped_run_is_no_checkpoint_to_start_from(tmp_path: Path) -> None:
    build().save_architecture(tmp_path / "run" / "pretrained")
    with pytest.raises(UserError, match=r"has no weights: those of its run .* checkpoints; init=.*run takes them"):
        build(pretrained=str(tmp_path / "run" / "pretrained"))


class Steps(PilBackend):
    """transformers' processing of images by π0's settings, with PIL: their class for π0 needs torchvision."""

    do_rescale, do_normalize = PI0ImageProcessor.do_rescale, PI0ImageProcessor.do_normalize
    image_mean, image_std = PI0ImageProcessor.image_mean, PI0ImageProcessor.image_std
    do_resize = False  # pictures have the model's size


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.2, 0.3, 0.25]},
        {"image_mean": 0.4, "image_std": 0.3},
        {"rescale_factor": 1 / 127.5},
        {"do_rescale": False, "image_mean": 127.0, "image_std": 128.0},
        {"do_normalize": False, "image_mean": None},
        {"do_normalize": False, "do_rescale": False},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_pixels_are_those_of_the_image_processor_of_transformers(
    changes: dict[str, Any], nested: bool, tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path / "base")
    settings = {"image_processor_type": "PI0ImageProcessor", **changes}
    if nested:  # transformers prefers it
        (tmp_path / "base" / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    else:
        (tmp_path / "base" / "processor_config.json").write_text(json.dumps({"processor_class": "PI0Processor"}))
        (tmp_path / "base" / "preprocessor_config.json").write_text(json.dumps(settings))
    image = observe(1)["images.front"][0].numpy()
    expected = torch.as_tensor(Steps(**changes)([image], return_tensors="np")["pixel_values"][0]).float()
    policy = build(pretrained=str(tmp_path / "base"))
    policy.save_pretrained(tmp_path / "kept")
    for built in (policy, build(pretrained=str(tmp_path / "kept"))):
        pixels = (torch.as_tensor(image).permute(2, 0, 1) - built.pixel_mean) / built.pixel_std
        torch.testing.assert_close(pixels, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model.safetensors", r"lacks weights \(model.safetensors\). It has: .*config.json"),
        ("preprocessor_config.json", r"lacks an image processor \(preprocessor_config.json\)"),
        ("tokenizer.json", r"lacks a tokenizer \(tokenizer.json\)"),
        ("config.json", r"lacks config.json"),
    ],
)
def test_an_incomplete_checkpoint_says_what_is_missing(gone: str, message: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / gone).unlink()
    with pytest.raises(UserError, match=message):
        build(pretrained=str(tmp_path / "base"))


def test_a_directory_of_many_files_is_named_by_its_first(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"picture-{number:02}.png").touch()
    with pytest.raises(UserError, match=r"It has: picture-00.png, .*picture-11.png, 18 more$"):
        build(pretrained=str(tmp_path))


def test_a_checkpoint_without_some_weights_is_refused(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    gone = next(name for name in weights if "vision_tower" in name and "q_proj.weight" in name)
    del weights[gone]
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of the model's weights, for instance .*vision_tower.*q_proj.weight"):
        build(pretrained=str(tmp_path / "base"))


def test_a_checkpoint_with_a_weight_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["action_out_proj.weight"] = torch.zeros(9, 20)
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"base: action_out_proj.weight is \[9, 20\], config.json needs \[3, 20\]$"):
        build(pretrained=str(tmp_path / "base"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"\0" * 20, "cannot be loaded"),
        ("preprocessor_config.json", b"{", "cannot be loaded"),
        (
            "preprocessor_config.json",
            b'{"image_mean": null}',
            "loaded: image_mean: got None, allowed: a number",
        ),
        ("preprocessor_config.json", b'{"image_std": [1, 2]}', "loaded: image_std: got .1, 2., allowed: a number, or"),
        ("preprocessor_config.json", b'{"rescale_factor": "x"}', "loaded: rescale_factor: got 'x', allowed: a number"),
        ("config.json", b"[]", "cannot be loaded"),
        ("config.json", b'{"model_type": "pi0", "chunk_size": "x"}', "cannot be loaded: .*chunk_size"),
        (
            "config.json",
            b'{"dit_config": {"model_type": "gemma2"}}',
            "dit_config.model_type: got gemma2, allowed: gemma",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(file: str, content: bytes, message: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / file).write_bytes(content)
    with pytest.raises(UserError, match=f"(?s)policy.pretrained=.*{message}"):
        build(pretrained=str(tmp_path / "base"))


def test_code_of_a_checkpoint_is_neither_run_nor_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = tmp_path / "base", tmp_path / "ran"
    build().save_pretrained(path)
    (path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: ...\n")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    with pytest.raises(UserError, match=r"cannot be loaded: .*custom code") as caught:
        build(pretrained=str(path))
    assert (asked, ran.exists(), "\n" in str(caught.value)) == ([], False, False)


def test_every_call_of_transformers_refuses_code(root: Path) -> None:
    for file in (path for room in ("embodied", "policies", "envs", "algos") for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{file}, line {node.lineno}"


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_shards_are_in_the_checkpoint(tmp_path: Path, name: str) -> None:
    build().save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"names .*: shards are \*.safetensors files in the same directory"):
        build(pretrained=str(tmp_path / "base"))


def test_other_sizes_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").write_bytes(b"")  # gigabytes, not read for this
    larger = MODEL | {"dit_config": MODEL["dit_config"] | {"hidden_size": 40}}
    with pytest.raises(UserError, match=r"policy.model.dit_config.hidden_size=40 does not fit .*, where it is 20"):
        build(pretrained=str(tmp_path / "base"), model=larger)
