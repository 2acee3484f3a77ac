"""The eval and tasks commands."""

from __future__ import annotations

import json
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from embodied.report import progress
from embodied.report.video import caption
from embodied.session.results import filming
from tests.commands.helpers import Outcome, run_eval, run_tasks


def test_evaluates_what_training_evaluated(trained: tuple[Path, Outcome]) -> None:
    """The same weights, states and episodes give the numbers that train ended with."""
    run_dir, outcome = trained
    evaluated = run_eval(f"run={run_dir}", "episodes=4", "seed=0")
    assert evaluated.code == 0, evaluated.stderr
    expected = dict(outcome.result["eval"])
    other = expected.pop("other_noise")
    seeded = run_eval(f"run={run_dir}", "episodes=4", "seed=0", "noise=seeded")
    assert {key: seeded.result[key] for key in other} == other
    assert (expected["noise"], other["noise"]) == ("zero", "seeded")
    assert other["return_mean"] != expected["return_mean"]
    assert {key: evaluated.result[key] for key in expected} == expected
    assert "figures of the final evaluation; seed=1 draws other episodes" in evaluated.stderr
    assert "final evaluation" not in seeded.stderr
    files = list((run_dir / "eval").glob("step_*_seed0_episodes4.json"))
    assert json.loads(files[0].read_text()) == evaluated.result


def test_an_unknown_kind_of_noise_is_named(trained: tuple[Path, Outcome]) -> None:
    refused = run_eval(f"run={trained[0]}", "noise=random")
    assert refused.code == 2
    assert "noise: got 'random', allowed: 'zero' or 'seeded'" in refused.stderr


def test_states_depend_on_the_seed_alone(trained: tuple[Path, Outcome]) -> None:
    run_dir = trained[0]
    first, again, other = (
        run_eval(f"run={run_dir}", "episodes=6", f"seed={seed}", f"num_threads={threads}").result
        for seed, threads in ((5, 1), (5, 2), (6, 1))
    )
    assert first == again
    assert first["return_mean"] != other["return_mean"]


def test_interval_holds_the_rate(trained: tuple[Path, Outcome]) -> None:
    result = run_eval(f"run={trained[0]}", "episodes=5").result
    low, high = result["success_at_end_ci95"]
    assert 0 <= low <= result["success_at_end"] <= high <= 1
    assert high - low > 0.3


def test_an_older_checkpoint_can_be_named(trained: tuple[Path, Outcome]) -> None:
    run_dir, outcome = trained
    name = f"step_{outcome.result['env_steps']}"
    assert (
        run_eval(f"run={run_dir}", f"checkpoint={name}", "episodes=2").result["env_steps"]
        == outcome.result["env_steps"]
    )
    unknown = run_eval(f"run={run_dir}", "checkpoint=step_7", "episodes=2")
    assert unknown.code == 2
    assert name in unknown.stderr


def test_video_shows_the_evaluated_policy(trained: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filming, "ENVS", 1)
    monkeypatch.setattr(filming, "SIZE", (64, 48))
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    evaluated = run_eval(f"run={trained[0]}", "episodes=2", "video=true")
    assert evaluated.code == 0, evaluated.stderr
    shown = [line for line in evaluated.stderr.splitlines() if "of 1 episode filmed" in line]
    assert len(shown) == 41
    assert shown[-1].startswith("100% ")
    path = Path(evaluated.result["video"])
    assert path.parent == trained[0] / "videos"
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    assert about["fps"] == 20
    width, height = about["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    assert len(frames) == 41  # the initial state and 40 control steps
    (words,) = caption(np.zeros((1, 48, 64, 3), np.uint8), ["move the gripper to the green sphere"])
    assert (width, height) == (64, len(words))
    for frame in frames:  # compressed, with colours at half the resolution
        assert np.corrcoef(frame[:-48].mean(-1).flat, words[:-48].mean(-1).flat)[0, 1] > 0.8


def test_tasks_are_listed() -> None:
    outcome = run_tasks()
    assert outcome.code == 0, outcome.stderr
    tasks = {task["task"]: task for task in outcome.result["tasks"]}
    assert {"reach", "push", "lift", "pick_place", "stack"} <= set(tasks)
    assert tasks["reach"]["control_hz"] == 20
    for task in tasks.values():
        assert task["instruction"] or "/" in task["task"]  # tasks of other simulators may have none
        assert task["actions"]
        assert task["observes"]
        assert task["time_limit_s"] > 0
        assert task["instruction"] in outcome.stderr
