"""The train command: its result, its directory, going on with a run."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embodied.core.errors import UserError
from embodied.envs.tasks.config import default_words
from embodied.report.metrics import read_metrics
from embodied.runtime import checkpoint, evaluator
from embodied.runtime.evaluator import evaluate
from embodied.session.config import compose_run, read_run, resolve, resume_run
from embodied.session.session import new_run_dir
from tests.commands.helpers import SMALL, Outcome, checkpoint_of, run_train

METRICS = {
    "iteration", "env_steps", "wall_s", "perf/env_steps_per_s", "perf/sim_s", "perf/infer_s", "perf/learn_s",
    "perf/wait_s", "rollout/return_mean", "rollout/success_once", "rollout/success_at_end", "train/policy_loss",
    "train/value_loss", "train/approx_kl", "train/clip_fraction", "train/entropy", "async/staleness_mean",
    "async/staleness_max", "async/dropped", "async/ess",
}  # fmt: skip
EVAL = {
    "task", "episodes", "success_once", "success_at_end", "success_at_end_ci95", "return_mean", "episode_length_mean",
    "seed",
}  # fmt: skip


def test_result_is_the_contracts(trained: tuple[Path, Outcome]) -> None:
    run_dir, outcome = trained
    assert len(outcome.stdout.splitlines()) == 1
    result = outcome.result
    assert result["run"] == str(run_dir)
    assert result["env_steps"] >= 640
    assert result["iterations"] == 10
    assert result["wall_s"] > 0
    assert set(result["eval"]) >= EVAL
    assert (result["eval"]["task"], result["eval"]["episodes"], result["eval"]["seed"]) == ("reach", 4, 0)


def test_first_line_says_what_is_trained(trained: tuple[Path, Outcome]) -> None:
    run_dir, outcome = trained
    first = outcome.stderr.splitlines()[0]
    for word in ("training reach", "gaussian", "parameters", "ppo", "8 envs", "runtime sync", str(run_dir)):
        assert word in first


def test_run_directory(trained: tuple[Path, Outcome]) -> None:
    run_dir, outcome = trained
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "eval"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert (run_dir / "checkpoints" / "last").exists()
    assert checkpoint_of(run_dir, outcome.result["env_steps"]).is_dir()
    final = json.loads((run_dir / "eval" / f"final_{outcome.result['env_steps']}.json").read_text())
    assert final == outcome.result["eval"]
    assert not [path for path in run_dir.rglob("*") if path.name.endswith(".tmp")]


def test_metrics_have_the_contracts_keys_and_run_forward(trained: tuple[Path, Outcome]) -> None:
    rows = read_metrics(trained[0] / "metrics.jsonl")
    assert set(rows[-1]) >= METRICS
    assert [row["iteration"] for row in rows] == list(range(1, 11))
    for key in ("env_steps", "wall_s"):
        values = [row[key] for row in rows]
        assert values == sorted(values)
    assert any("eval/success_at_end" in row for row in rows)


def test_evaluations_during_training_are_kept(trained: tuple[Path, Outcome]) -> None:
    run_dir, _ = trained
    files = sorted((run_dir / "eval").glob("train_*.json"))
    assert files
    evaluation = json.loads(files[0].read_text())
    assert set(evaluation) >= EVAL
    assert evaluation["episodes"] == 3


def test_config_is_complete_and_reproduces_itself(trained: tuple[Path, Outcome]) -> None:
    config = OmegaConf.to_container(OmegaConf.load(trained[0] / "config.yaml"))
    assert config["algo"]["epochs"] == 1
    assert config["algo"]["gamma"] > 0
    assert config["runtime"]["device"] == "cpu"
    assert config["task"]["name"] == "reach"
    assert resolve(config) == read_run(trained[0])


def test_resume_continues_the_counters(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir = shutil.copytree(trained[0], tmp_path / "run", symlinks=True)
    before = trained[1].result
    outcome = run_train(f"resume={run_dir}", "total_steps=960", "eval_episodes=0")
    assert outcome.code == 0, outcome.stderr
    result = outcome.result
    assert result["env_steps"] >= 960
    assert result["iterations"] == 15
    assert result["wall_s"] > before["wall_s"]
    assert result["eval"] is None
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 16))
    assert [row["wall_s"] for row in rows] == sorted(row["wall_s"] for row in rows)
    assert read_run(run_dir).total_steps == 960


def test_resumed_run_equals_one_that_never_stopped(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir = shutil.copytree(trained[0], tmp_path / "run", symlinks=True)
    resumed = run_train(f"resume={run_dir}", "total_steps=960")
    straight = run_train(*SMALL, "total_steps=960", f"out={tmp_path / 'straight'}")
    assert resumed.result["env_steps"] == straight.result["env_steps"]
    assert resumed.result["eval"] == straight.result["eval"]
    weights = [checkpoint.load_latest(path, only="policy").state for path in (run_dir, tmp_path / "straight")]
    flat = [dict(_flatten(tree)) for tree in weights]
    assert flat[0].keys() == flat[1].keys()
    assert all(torch.equal(flat[0][key], flat[1][key]) for key in flat[0])


def _flatten(tree, prefix=""):
    for key, value in tree.items():
        yield from _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


def test_resume_of_a_finished_run_only_evaluates(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir = shutil.copytree(trained[0], tmp_path / "run", symlinks=True)
    outcome = run_train(f"resume={run_dir}", "task=reach")  # the same task may be repeated, as make train does
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["env_steps"] == trained[1].result["env_steps"]
    assert outcome.result["eval"] == trained[1].result["eval"]


@pytest.mark.parametrize("word", ["num_envs=16", "seed=3", "task=lift", "policy=flow", "runtime=local", "out=x"])
def test_resume_keeps_what_a_checkpoint_depends_on(trained: tuple[Path, Outcome], word: str) -> None:
    key = word.partition("=")[0]
    outcome = run_train(f"resume={trained[0]}", word)
    assert outcome.code == 2
    assert outcome.stderr.startswith(f"error: {key} cannot change when a run is resumed")


def test_resume_may_change_options_of_the_algorithm(trained: tuple[Path, Outcome]) -> None:
    config = resume_run(trained[0], {"algo.learning_rate": 1e-5, "total_steps": 5000})
    assert (config.algo.options.learning_rate, config.total_steps) == (1e-5, 5000)
    with pytest.raises(UserError, match=r"Did you mean 'algo\.learning_rate'"):
        resume_run(trained[0], {"algo.learnin_rate": 1e-5})


def test_minutes_end_a_run(tmp_path: Path) -> None:
    words = [*SMALL, "total_steps=100_000_000", "max_minutes=0.02", "eval_episodes=0", f"out={tmp_path / 'run'}"]
    outcome = run_train(*words)
    assert outcome.code == 0, outcome.stderr
    assert 1.0 < outcome.result["wall_s"] < 20.0


TOLD = [
    *SMALL, "task=tabletop", "task.max_episode_steps=8", "runtime.eval_every=1", "runtime.eval_episodes=4",
    "eval_episodes=0",
]  # fmt: skip


def test_goals_and_splits_have_metrics_of_their_own(tmp_path: Path) -> None:
    outcome = run_train(*TOLD, "total_steps=128", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    trained = {goal for goal in default_words().goals if goal not in default_words().held_out}
    goals = {key for key in row if key.startswith("rollout/goals/")}
    assert len(goals) >= 4
    assert goals <= {f"rollout/goals/{color}_{shape}_{tray}_tray/success_at_end" for color, shape, tray in trained}
    splits = {f"eval/{split}/success_at_end" for split in ("train", "held_out")}
    assert row["eval/success_at_end"] == sum(row[key] for key in splits) / 2
    assert goals | splits <= set(EventAccumulator(str(tmp_path / "run")).Reload().Tags()["scalars"])


@pytest.mark.parametrize(("train", "held_out", "iterations"), [(1.0, 0.0, 1), (0.0, 1.0, 3)])
def test_only_what_is_trained_on_must_be_good(
    train: float, held_out: float, iterations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real evaluation, with other numbers in its result."""

    def judged(*args: Any) -> dict[str, Any]:
        result = evaluate(*args) | {"success_at_end": (train + held_out) / 2}
        for split, success in {"train": train, "held_out": held_out}.items():
            result["splits"][split]["success_at_end"] = success
        return result

    monkeypatch.setattr(evaluator, "evaluate", judged)
    outcome = run_train(*TOLD, "total_steps=192", "stop_at_success=0.9", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["iterations"] == iterations


def test_default_directory_is_named_after_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run_train(*SMALL, "total_steps=64", "eval_episodes=0").result["run"] for _ in range(2)]
    assert runs[0] != runs[1]
    for name in runs:
        assert Path(name).parent == Path("runs/reach")
        assert Path(name).name.startswith("gaussian-ppo-")
        assert (tmp_path / name / "config.yaml").is_file()


def test_runs_that_start_in_one_second_have_directories_of_their_own() -> None:
    config = compose_run({"task": "reach"})
    assert len({new_run_dir(config) for _ in range(8)}) == 8


def test_shorthands_reach_the_runtime() -> None:
    config = compose_run({"task": "reach", "max_staleness": 0, "device": "cpu"})
    assert (config.runtime.max_staleness, config.runtime.device) == (0, "cpu")


def test_local_runtime_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    outcome = run_train(*SMALL, "runtime=local", "max_staleness=1", "total_steps=640", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert set(threading.enumerate()) <= before


GRPO = ["task=reach", "policy=flow", "algo=grpo", "algo.group_size=4", "runtime=sync", "num_envs=8", "device=cpu",
        "policy.actor_hidden=[16]", "policy.critic_hidden=[16]", "policy.head_hidden=[16]", "algo.epochs=1",
        "algo.num_minibatches=2", "runtime.sim_threads=1", "runtime.eval_every=0", "eval_episodes=0"]  # fmt: skip


def test_grpo_trains_on_whole_episodes_of_groups(tmp_path: Path) -> None:
    outcome = run_train(*GRPO, "total_steps=640", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert (outcome.result["env_steps"], outcome.result["iterations"]) == (640, 2)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["train/ratio_first"] == pytest.approx(1.0, abs=1e-5) for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert read_run(tmp_path / "run").runtime.decisions == 10
    assert "decisions: 10\n" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "decisions"),
    [
        ({"task": "stack"}, 16),
        ({"task": "stack", "algo": "grpo"}, 24),
        ({"task": "stack", "algo": "grpo", "policy.execute": 3}, 32),
        ({"task": "pick_place", "algo": "grpo", "task.max_episode_steps": 40}, 10),
        ({"task": "stack", "runtime.decisions": 7}, 7),
    ],
)
def test_a_fragment_has_whole_episodes_where_they_are_compared_unless_told_otherwise(
    words: dict[str, Any], decisions: int
) -> None:
    assert compose_run(words).runtime.decisions == decisions


def test_groups_stay_as_they_are_when_a_run_goes_on(tmp_path: Path) -> None:
    assert run_train(*GRPO, "total_steps=320", f"out={tmp_path / 'run'}").code == 0
    outcome = run_train(f"resume={tmp_path / 'run'}", "algo.group_size=2")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "algo.group_size cannot change when a run is resumed: it is 4, got 2" in outcome.stderr
    outcome = run_train(f"resume={tmp_path / 'run'}", "algo.reference_kl_coef=0.1", "total_steps=640")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "the first policy is not kept" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["num_envs=12", "runtime.groups_per_worker=2"],
            "algo.group_size=4 does not divide the envs of a group of the runtime: num_envs must be a multiple of 8 ",
        ),
        (["num_envs=10"], "algo.group_size=4 does not divide the envs of a group of the runtime: num_envs must be a "),
        (["runtime.decisions=7"], "must be the 40 steps of task reach, got 7 * 4: set runtime.decisions=10"),
        (["policy.horizon=3", "policy.execute=3"], "must be the 40 steps of task reach, got 13 * 3"),
        (["cut_after_success=8"], "cut_after_success: got 8, allowed: 0: algo=grpo compares whole episodes"),
        (["repeat_failures=0.5"], "repeat_failures: got 0.5, allowed: 0: algo=grpo compares whole episodes"),
    ],
)
def test_groups_and_episodes_must_fit(words: list[str], message: str, tmp_path: Path) -> None:
    outcome = run_train(*GRPO, *words, f"out={tmp_path / 'run'}")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_several_seeds_are_runs_of_one_seed_each(tmp_path: Path) -> None:
    words = [*SMALL, "total_steps=128"]
    several = run_train(*words, "seed=3,4", f"out={tmp_path / 'both'}")
    assert several.code == 0, several.stderr
    one = run_train(*words, "seed=4", f"out={tmp_path / 'one'}").result
    result = several.result
    assert [run["run"] for run in result["runs"]] == [str(tmp_path / "both" / f"seed_{seed}") for seed in (3, 4)]
    assert result["runs"][1]["eval"] | {"run": 0} == one["eval"] | {"run": 0}
    assert result["mean"] == pytest.approx(sum(result["values"]) / 2)
    assert result["ci95"][0] <= result["mean"] <= result["ci95"][1]
    again = run_train(*words, "seed=4,5", f"out={tmp_path / 'both'}")
    assert again.code == 2
    assert "seed_4 exists" in again.stderr
