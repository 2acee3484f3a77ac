"""Checkpoints whose files match their manifest but hold something else, and checkpoints that do not load at all."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.runtime import checkpoint
from tests.commands.helpers import SMALL, Outcome, checkpoint_of, run_eval, run_train
from tests.faults.damage import cut, flip, replace


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 iterations, each with a checkpoint: 64, 128, 192. Read-only."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    words = [*SMALL, "total_steps=192", "checkpoint_minutes=0", "eval_episodes=0", f"out={run_dir}"]
    outcome = run_train(*words)
    assert outcome.code == 0, outcome.stderr
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def torch_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def saved(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").glob("step_*")}


# -- a policy's file with other content --------------------------------------------------------------------------------
UNREADABLE = {
    "nothing": b"",
    "text": b"this is not a policy",
    "noise": random.Random(0).randbytes(2000),
    "half a zip file": torch_bytes({"a": torch.ones(100)})[:700],
    "a pickle of protocol 4": b"\x80\x04.",
}
UNFIT: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "a list": lambda weights: list(weights.values()),
    "a number": lambda weights: 3,
    "numbers as names": lambda weights: dict(enumerate(weights.values())),
    "numbers as weights": lambda weights: dict.fromkeys(weights, 0.0),
    "no weights": lambda weights: {},
    "one is missing": lambda weights: dict(list(weights.items())[1:]),
    "one too many": lambda weights: {**weights, "extra": torch.ones(1)},
    "other shapes": lambda weights: {key: value.new_zeros(3, 5, 7) for key, value in weights.items()},
}


def all_commands(run_dir: Path, new: Path) -> dict[str, Outcome]:
    return {
        "resume": run_train(f"resume={run_dir}", "total_steps=384"),
        "eval": run_eval(f"run={run_dir}", "episodes=2"),
        "init": run_train(*SMALL, f"init={run_dir}", f"out={new}"),
    }


def assert_refused(outcomes: dict[str, Outcome], message: str, new: Path) -> None:
    for command, outcome in outcomes.items():
        assert (outcome.code, outcome.stdout) == (2, ""), (command, outcome.stderr)
        (line,) = outcome.stderr.splitlines()
        assert line.startswith("error: "), command
        assert message in line, command
    assert not new.exists()


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=list(UNREADABLE))
def test_a_policy_file_that_cannot_be_read_is_corrupt(data: bytes, run_dir: Path, tmp_path: Path) -> None:
    for name in saved(run_dir):
        replace(run_dir / "checkpoints" / name, data)
    assert_refused(all_commands(run_dir, tmp_path / "new"), "all 3 checkpoints under", tmp_path / "new")


@pytest.mark.parametrize("change", UNFIT.values(), ids=list(UNFIT))
def test_a_policy_file_with_other_weights_is_refused_in_one_line(
    change: Callable[[dict[str, torch.Tensor]], Any], run_dir: Path, tmp_path: Path
) -> None:
    folder = checkpoint_of(run_dir, 192)
    weights = checkpoint.load(folder, only="policy").state
    replace(folder, torch_bytes(change(weights)))
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert_refused(all_commands(run_dir, tmp_path / "new"), str(run_dir), tmp_path / "new")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("value", [{}, [], {"optimizer": 3, "generator": None}])
def test_another_state_of_the_algorithm_is_refused_in_one_line(value: Any, run_dir: Path, tmp_path: Path) -> None:
    replace(checkpoint_of(run_dir, 192), torch_bytes(value), "algorithm.pt")
    outcomes = {"resume": run_train(f"resume={run_dir}", "total_steps=384")}
    assert_refused(outcomes, f"{checkpoint_of(run_dir, 192)} does not fit this run", tmp_path / "new")


# -- what is kept ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("damage", [cut, flip, shutil.rmtree])
def test_after_a_fallback_the_checkpoints_that_load_are_kept(damage: Callable[[Path], None], run_dir: Path) -> None:
    """Two of three are corrupt. The run continues from the oldest, and its next checkpoint is of fewer steps."""
    for env_steps in (128, 192):
        damage(checkpoint_of(run_dir, env_steps))
    words = [f"resume={run_dir}", "eval_episodes=0", "checkpoint_minutes=60"]
    for total_steps, expected in ((100, {64, 128}), (230, {64, 128, 256}), (300, {128, 256, 320})):
        outcome = run_train(*words, f"total_steps={total_steps}")
        assert outcome.code == 0, outcome.stderr
        assert saved(run_dir) == {f"step_{steps}" for steps in expected}
        for folder in (run_dir / "checkpoints").glob("step_*"):
            checkpoint.load(folder)
        assert (run_dir / "checkpoints" / "last").resolve() == checkpoint_of(run_dir, max(expected))


@pytest.mark.parametrize("what", ["policy.pt", "runtime.pt", "manifest.json"])
def test_older_checkpoints_without_a_file_are_not_counted(what: str, tmp_path: Path) -> None:
    for env_steps in (1, 2, 3):
        state = {"policy": {"weight": torch.ones(2)}, "runtime": {"step": env_steps}}
        checkpoint.save(tmp_path, env_steps, state)
    (tmp_path / "checkpoints" / "step_2" / what).unlink()
    checkpoint.save(tmp_path, 4, state, after=3)
    assert saved(tmp_path) == {"step_1", "step_3", "step_4"}
