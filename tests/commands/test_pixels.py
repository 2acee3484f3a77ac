"""The commands with a policy that sees and reads: demonstrations with pictures, imitation, RL, evaluation by split."""

from __future__ import annotations

import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PI0ForConditionalGeneration

from embodied.report.metrics import read_metrics
from embodied.runtime import checkpoint
from embodied.session import session
from embodied.session.config import read_run
from embodied.trainers.audit import Audit
from tests.commands.helpers import assert_ends_alike, imitation_ends_after, run_collect, run_eval, run_train

SIZE = "16"
MODEL = "policy.model"
VLA = [
    "task=tabletop", "policy=vla_tiny", "device=cpu", f"policy.image_size={SIZE}", "policy.critic_hidden=[16]",
    f"{MODEL}.dit_config.num_hidden_layers=2", f"{MODEL}.vlm_config.text_config.num_hidden_layers=2",
    f"{MODEL}.vlm_config.vision_config.num_hidden_layers=1", "eval_episodes=4",
]  # fmt: skip
GROUNDING = [*VLA, "algo=grounding", "num_envs=8", "algo.updates=4", "algo.validate_every=2", "algo.batch_size=8"]
SFT = [*VLA, "algo=sft", "num_envs=8", "algo.updates=4", "algo.validate_every=2", "algo.batch_size=8"]
RL = [
    *VLA, "num_envs=8", "total_steps=256", "runtime.decisions=2", "runtime.groups_per_worker=1", "runtime.eval_every=0",
    "algo.epochs=1", "algo.num_minibatches=2", "policy.freeze=[vision,language]",
]  # fmt: skip


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One demonstration of every goal, seen by both cameras."""
    path = tmp_path_factory.mktemp("demos") / "tabletop"
    words = ["task=tabletop", "episodes=18", "cameras=[front,wrist]", f"image_size={SIZE}", "num_threads=1"]
    outcome = run_collect(*words, f"out={path}")
    assert outcome.code == 0, outcome.stderr
    return path


@pytest.fixture(scope="module")
def grounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished grounding. Read-only."""
    path = tmp_path_factory.mktemp("runs") / "grounded"
    outcome = run_train(*GROUNDING, f"out={path}")
    assert outcome.code == 0, outcome.stderr
    assert {"train", "held_out"} == set(outcome.result["eval"]["found"])
    assert "red cube -> right tray" in outcome.result["eval"]["goals"]
    for error_cm in outcome.result["eval"]["error_cm"].values():
        assert all(0 < cm < 200 for cm in (error_cm["near"], error_cm["far"]))
    assert read_metrics(path / "metrics.jsonl")[-1]["train/validation_loss"] == outcome.result["validation_loss"]
    return path


@pytest.fixture(scope="module")
def imitated(demos: Path, grounded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished imitation of them. Read-only."""
    path = tmp_path_factory.mktemp("runs") / "sft"
    outcome = run_train(*SFT, f"data={demos}", f"init={grounded}", f"out={path}")
    assert outcome.code == 0, outcome.stderr
    assert {"train", "held_out"} == set(outcome.result["eval"]["splits"])
    return path


def head_of(run: Path) -> torch.Tensor:
    """What a run's policy tells with where things are."""
    found = checkpoint.load_latest(run)
    assert found is not None
    return found.state["policy"]["grounding.named.weight"]


def test_grounding_goes_on_after_its_end(grounded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(grounded, tmp_path / "run", symlinks=True)
    outcome = run_train(f"resume={copy}", "algo.updates=6")
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["iterations"] == 6


@pytest.mark.slow(reason="records demonstrations with pictures")
def test_imitation_with_frozen_eyes_that_was_stopped_goes_on_exactly(
    demos: Path, grounded: Path, tmp_path: Path
) -> None:
    words = [*SFT, "algo.keep_grounding=0", f"data={demos}", f"init={grounded}"]
    whole, path = tmp_path / "whole", tmp_path / "run"
    assert run_train(*words, f"out={whole}").code == 0
    with imitation_ends_after(2):
        assert run_train(*words, f"out={path}").code == 130
    resumed = run_train(f"resume={path}")
    assert resumed.code == 0, resumed.stderr
    assert_ends_alike(path, whole)
    asked, told = (head_of(run) for run in (grounded, path))
    assert torch.equal(asked, told), "nobody asked where things are"


@pytest.mark.slow(reason="records demonstrations with pictures")
def test_imitation_goes_on_to_be_asked_where_things_are(imitated: Path, grounded: Path, tmp_path: Path) -> None:
    assert not torch.equal(head_of(grounded), head_of(imitated))
    copy = shutil.copytree(imitated, tmp_path / "run", symlinks=True)
    resumed = run_train(f"resume={copy}", "algo.updates=6")
    assert resumed.code == 0, resumed.stderr
    assert not torch.equal(head_of(copy), head_of(imitated))


@pytest.mark.slow(reason="records demonstrations with pictures")
def test_grounding_goes_on_from_an_imitation(imitated: Path, tmp_path: Path) -> None:
    outcome = run_train(*GROUNDING, f"init={imitated}", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    source, found = (checkpoint.load_latest(run).state["policy"] for run in (imitated, tmp_path / "run"))  # type: ignore[union-attr]
    assert bool(found["named_normalizer.fixed"])
    assert torch.equal(found["state_normalizer.mean"], source["state_normalizer.mean"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=tabletop", "policy=flow", "algo=grounding"], "algo=grounding needs"),
        ([*GROUNDING, "policy.freeze=[vision]"], "policy.freeze must be []"),
        ([*GROUNDING, "stop_at_success=0.9"], "stop_at_success is for reinforcement learning, not for algo=grounding"),
        ([*GROUNDING, "task=pick_place"], "algo=grounding needs cameras and a task with masks"),
    ],
)
def test_grounding_says_what_it_needs(words: list[str], message: str, tmp_path: Path) -> None:
    outcome = run_train(*words, f"out={tmp_path / 'run'}")
    assert outcome.code == 2, outcome.stderr
    assert message in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_a_vla_that_began_from_a_run_is_audited_from_its_own_folder(grounded: Path, tmp_path: Path) -> None:
    """Its model is nowhere else, and the audit trains in another folder."""
    sizes = ["num_envs=4", "runtime.decisions=2", "total_steps=32", "algo.epochs=1", "algo.num_minibatches=1"]
    words = [f"policy.image_size={SIZE}", "policy.critic_hidden=[16]", "policy.dtype=float32", "eval_episodes=0"]
    groups = ["runtime.groups_per_worker=1", "runtime.eval_every=0", "device=cpu"]
    init = [f"init={grounded}", f"out={tmp_path / 'run'}"]
    trained = run_train("task=tabletop", "policy=vla", *words, *sizes, *groups, *init)
    assert trained.code == 0, trained.stderr
    (tmp_path / "work").mkdir()
    run_dir, found = tmp_path / "run", checkpoint.load_last(tmp_path / "run")
    audit = Audit(read_run(run_dir), run_dir, found, tmp_path / "work", seconds=300.0)
    with audit.training() as runtime:
        assert audit.iterate(runtime)["train/ratio_first"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow(reason="imitates and trains a small vision-language-action policy")
def test_imitation_then_reinforcement_learning_then_evaluation(imitated: Path, tmp_path: Path) -> None:
    trained = run_train(*RL, f"init={imitated}", f"out={tmp_path / 'rl'}")
    assert trained.code == 0, trained.stderr
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert rows[-1]["env_steps"] >= 256
    assert rows[0]["train/ratio_first"] == pytest.approx(1.0, abs=1e-4)
    moved = (tmp_path / "rl").rename(tmp_path / "elsewhere")  # a run carries its tokenizer and its architecture along
    judged = run_eval(f"run={moved}", "episodes=6", "num_threads=1")
    assert judged.code == 0, judged.stderr
    splits = judged.result["splits"]
    assert [splits[name]["episodes"] for name in ("train", "held_out")] == [3, 3]
    assert "held_out" in judged.stderr
    model = PI0ForConditionalGeneration.from_pretrained(moved / "pretrained")
    assert model.config.vlm_config.vision_config.image_size == int(SIZE)
    assert "cylinder" in AutoTokenizer.from_pretrained(moved / "pretrained").get_vocab()


def test_the_model_of_a_finished_run_that_goes_on_has_no_weights_until_it_ends(
    grounded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(grounded, tmp_path / "run", symlinks=True)
    (stop := threading.Event()).set()
    with monkeypatch.context() as patch:
        patch.setattr(session, "stop_on_signals", lambda: nullcontext(stop))
        assert run_train(f"resume={copy}", "algo.updates=6").code == 130
    kept = {path.name for path in (copy / "pretrained").iterdir()}
    assert kept == {path.name for path in (grounded / "pretrained").iterdir()} - {"model.safetensors"} | {
        ".architecture"
    }
    assert run_train(f"resume={copy}", "algo.updates=6").code == 0
    weights = load_file(copy / "pretrained" / "model.safetensors")["action_out_proj.weight"]
    trained = checkpoint.load_last(copy, only="policy").state
    assert torch.equal(weights, trained["model.action_out_proj.weight"])


def test_a_run_without_a_checkpoint_begins_again_from_the_weights_that_it_was_given(
    grounded: Path, tmp_path: Path
) -> None:
    path, given = tmp_path / "run", f"policy.pretrained={grounded / 'pretrained'}"
    assert run_train(*RL, given, "eval_episodes=0", f"out={path}").code == 0
    shutil.rmtree(path / "checkpoints")  # as in a run that was killed before its first one
    (path / "pretrained" / "model.safetensors").unlink()
    resumed = run_train(f"resume={path}")
    assert resumed.code == 0, resumed.stderr
    source, found = (checkpoint.load_last(run, only="policy").state for run in (grounded, path))
    frozen = [key for key in source if "vision_tower" in key]
    assert all(torch.equal(found[key], source[key]) for key in frozen)
    assert str(grounded / "pretrained") in (path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policy.cameras=[front,side]"], "unknown camera 'side'"),
        (["policy.cameras=[]"], "policy.cameras"),
        (["policy.max_tokens=5"], "policy.max_tokens allows 5"),
        (["policy.pretrained=/nowhere"], "policy.pretrained=/nowhere lacks"),
        (["policy.model.chunk_size=3"], "policy.horizon=2 does not fit the model, which was made for 3"),
        ([f"{MODEL}.dit_config.num_hidden_layers=1"], "num_hidden_layers is 1 in dit_config, 2 in text_config"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path
) -> None:
    outcome = run_train(*RL, *words, f"out={tmp_path / 'run'}")
    assert outcome.code == 2, outcome.stderr
    assert message in outcome.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policy=dsrl"], "policy=vla_tiny, a VLAPolicy on cameras; policy=dsrl takes a FlowPolicy on a state vector"),
        (["policy=flow"], "policy=vla_tiny, a VLAPolicy on cameras; policy=flow takes a FlowPolicy on a state vector"),
        (
            ["policy=vla_tiny", "policy.pretrained=x"],
            "policy.pretrained=x both name the weights to start",
        ),
    ],
)
def test_a_start_from_a_model_is_from_one_and_of_its_kind(
    words: list[str], message: str, grounded: Path, tmp_path: Path
) -> None:
    outcome = run_train("task=tabletop", *words, f"init={grounded}", f"out={tmp_path / 'run'}")
    assert outcome.code == 2
    assert message in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_eyes_in_another_order_are_refused(grounded: Path, tmp_path: Path) -> None:
    outcome = run_train(*RL, f"init={grounded}", "policy.cameras=[wrist,front]", f"out={tmp_path / 'run'}")
    assert outcome.code == 2
    assert "was trained with policy.cameras=('front', 'wrist'), this run has ('wrist', 'front')" in outcome.stderr


@pytest.mark.slow(reason="records demonstrations with pictures")
def test_a_camera_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    words = ["task=tabletop", "episodes=4", "cameras=[front]", f"image_size={SIZE}", "num_threads=1"]
    assert run_collect(*words, f"out={tmp_path / 'front'}").code == 0
    outcome = run_train(*SFT, f"data={tmp_path / 'front'}", f"out={tmp_path / 'run'}")
    assert outcome.code == 2
    assert "it lacks observation.images.wrist" in outcome.stderr
    assert not (tmp_path / "run").exists()
