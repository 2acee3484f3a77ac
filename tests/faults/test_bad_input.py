"""What users get wrong: one clear message, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from embodied import audit, compare, export, replay, status, train
from embodied import eval as eval_command
from embodied.core.errors import UserError
from embodied.report import __main__ as report
from embodied.report.metrics import read_metrics
from embodied.runtime import checkpoint
from embodied.session.config import read_run
from embodied.session.factories import load_checkpoint, load_policy
from tests.commands.helpers import SMALL, checkpoint_of, run, run_eval, run_train
from tests.faults import damage as damages
from tests.faults.damage import cut


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("task=rech", "unknown task 'rech'. Did you mean 'reach'?"),
        ("policy=flwo", "unknown policy 'flwo'. Did you mean 'flow'?"),
        ("algo=pppo", "unknown algo 'pppo'. Did you mean 'ppo'?"),
        ("runtime=locl", "unknown runtime 'locl'. Did you mean 'local'?"),
        ("polcy=flow", "unknown key 'polcy'. Did you mean 'policy'?"),
        ("learning_rate=1", "Did you mean 'algo.learning_rate'?"),
        ("task.sucess_m=1", "Did you mean 'task.success_m'?"),
        ("algorithm.gamma=1", "unknown key 'algorithm'. Did you mean 'algo'?"),
        ("num_envs=0", "num_envs: got 0, allowed: at least 1"),
        ("max_minutes=-1", "max_minutes: got -1, allowed: above 0 or null"),
        ("seed=-1", "seed: got -1, allowed: at least 0"),
        ("stop_at_success=97", "stop_at_success: got 97, allowed: above 0 and at most 1 or null"),
        ("algo.gamma=2", "algo.gamma: got 2, allowed: at least 0 and at most 1"),
        ("max_staleness=-1", "runtime.max_staleness: got -1, allowed: at least 0"),
        (
            "device=gpu",
            "runtime.device: got 'gpu', allowed: 'auto', 'cpu', 'cuda' or 'cuda:<index>'. Did you mean 'cuda'?",
        ),
        ("eval_episodes=", "eval_episodes: got ''"),
        ("out=' '", "out: got ' ', allowed: text that is not blank or null"),
        (
            "task.control.moode=ee_delta",
            "unknown key 'task.control.moode'. Did you mean 'task.control.mode'? Allowed: task.control.damping, ",
        ),
        ("seed=5000000000000", "seed: got 5000000000000, allowed: at least 0 and below 2147483648"),
        ("task.robot=pandas", "unknown robot 'pandas'. Did you mean 'panda'? Allowed: panda, so101"),
        ("task.control_dt_s=0.0333", "control_dt_s: got 0.0333, allowed: multiples of the physics step"),
        ("task.held_starts=0.5", "held_starts: reach has no object to hold, allowed: 0"),
        ("num_envs", "'num_envs' is not key=value"),
        ("--task=lift", "'--task=lift' is not key=value: write task=lift"),
        ("--num_envs=4", "num_envs"),
        ("seed=1,a", "seed: got 1,a, allowed: different numbers, separated by commas"),
        ("num_envs=1,2", "several values, where one is allowed"),
        ("out=a=b", "cannot read the value of out"),
        ("num_envs.x=1", "'num_envs' is a value"),
        ("resume=nowhere", "'nowhere' is not a directory"),
    ],
)
def test_train(word: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_train("task=reach", *SMALL[1:], word)
    assert outcome.code == 2, outcome.stderr
    assert outcome.stderr.startswith("error: ")
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "run is missing"),
        (["run=nowhere"], "'nowhere' is not a directory"),
        (["run=."], "has no config.yaml, so it is not a run directory"),
        (["run=.", "episodes=0"], "episodes: got 0, allowed: at least 1"),
        (["run=.", "episode=3"], "unknown key 'episode'. Did you mean 'episodes'?"),
        (["run=.", "video=2"], "video: got 2, allowed: true or false"),
    ],
)
def test_eval(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_eval(*words)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_config_that_is_not_a_runs(tmp_path: Path) -> None:
    for text in ("num_envs: 3\n", "[1, 2", "just text"):
        (tmp_path / "config.yaml").write_text(text)
        outcome = run_train(f"resume={tmp_path}")
        assert outcome.code == 2, outcome.stderr
        assert "config.yaml" in outcome.stderr


def test_a_run_of_another_version_is_refused_in_one_line(many_checkpoints: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(many_checkpoints, tmp_path / "run", symlinks=True)
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("  name: gaussian\n", "  name: gaussian\n  noise_anneal: 0\n"))
    for outcome in (
        run_train(f"resume={run_dir}"), run_train(*SMALL, f"init={run_dir}", f"out={tmp_path / 'new'}"),
        run_eval(f"run={run_dir}"),
    ):  # fmt: skip
        assert outcome.code == 2, outcome.stderr
        message = f"{config} does not fit this version of the code, or its files: unknown key 'policy.noise_anneal'"
        assert message in outcome.stderr.splitlines()[-1]
    assert not (tmp_path / "new").exists()


def test_a_run_from_before_samplers_is_refused_in_one_line(many_checkpoints: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(many_checkpoints, tmp_path / "run", symlinks=True)
    config = OmegaConf.load(run_dir / "config.yaml")
    del config["sampler"]
    OmegaConf.save(config, run_dir / "config.yaml")
    outcome = run_eval(f"run={run_dir}")
    assert outcome.code == 2
    [line] = outcome.stderr.splitlines()
    assert "is not the configuration of a run: it needs the sections" in line
    assert "sampler" in line


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "task.control.mode=joint_delta",
            "task.control.mode cannot change when a run is resumed: it is 'ee_delta', got",
        ),
        ("sampler.foo=1", "unknown key 'sampler.foo'. Allowed: none, it has no options"),
        ("task.robot=panda", None),
        ("task.control.mode=ee_delta", None),
    ],
)
def test_what_a_resumed_run_may_change(many_checkpoints: Path, word: str, message: str | None) -> None:
    outcome = run_train(f"resume={many_checkpoints}", word, "total_steps=1", "eval_episodes=0")
    assert outcome.code == (0 if message is None else 2), outcome.stderr
    assert message is None or message in outcome.stderr


def test_a_run_that_is_being_trained_is_not_resumed(many_checkpoints: Path, tmp_path: Path) -> None:
    """Two trainings would mix their rows and checkpoints in one directory."""
    run_dir = shutil.copytree(many_checkpoints, tmp_path / "run", symlinks=True)
    code = (
        f"from embodied.session.files import lock_run; from pathlib import Path; f = lock_run(Path({str(run_dir)!r})); "
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code + "print('locked', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    outcome = run_train(f"resume={run_dir}", "total_steps=640")
    assert outcome.code == 2
    assert f"{run_dir} is being trained by process {holder.pid} on {socket.gethostname()}" in outcome.stderr
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    holder.communicate("\n")
    outcome = run_train(f"resume={run_dir}", "total_steps=640", "eval_episodes=0")
    assert outcome.code == 0, outcome.stderr
    assert run_train(f"resume={run_dir}", "total_steps=704", "eval_episodes=0").code == 0


def test_weights_of_another_version_are_refused_in_one_line(many_checkpoints: Path) -> None:
    found = load_checkpoint(many_checkpoints, "last")
    old = replace(found, state={**found.state, "log_shrink": torch.zeros(())})
    with pytest.raises(UserError, match=r'does not fit .* version of the code: [^\n]*"log_shrink"[^\n]*$'):
        load_policy(read_run(many_checkpoints), old)


@pytest.fixture(scope="module")
def many_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after every iteration (64 steps), 5 iterations."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    words = [*SMALL, "total_steps=320", "checkpoint_minutes=0", "eval_episodes=0", f"out={run_dir}"]
    outcome = run_train(*words)
    assert outcome.code == 0, outcome.stderr
    return run_dir


@pytest.mark.parametrize("damage", [cut, partial(damages.replace, data=b"this is not a policy")], ids=["cut", "text"])
def test_corrupt_checkpoint_falls_back_to_the_one_before(
    many_checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    run_dir = shutil.copytree(many_checkpoints, tmp_path / "run", symlinks=True)
    damage(checkpoint_of(run_dir, 320))
    outcome = run_train(f"resume={run_dir}", "total_steps=384")
    assert outcome.code == 0, outcome.stderr
    assert f"{checkpoint_of(run_dir, 320)} is corrupt" in caplog.text
    assert f"going on from {checkpoint_of(run_dir, 256)}" in outcome.stderr
    assert outcome.result["env_steps"] == 384
    steps = [row["env_steps"] for row in read_metrics(run_dir / "metrics.jsonl")]
    assert steps == [64, 128, 192, 256, 320, 384]


def test_a_damaged_last_checkpoint_is_replaced_by_no_other_unasked(many_checkpoints: Path, tmp_path: Path) -> None:
    """Only a training that goes on takes the one before; what is reported is of the checkpoint that was asked for."""
    run_dir, out = shutil.copytree(many_checkpoints, tmp_path / "run", symlinks=True), tmp_path / "out"
    assert run_eval(f"run={run_dir}", "episodes=2").code == 0
    (evaluation,) = run_dir.glob("eval/step_320*.json")
    cut(checkpoint_of(run_dir, 320))
    older = checkpoint_of(run_dir, 256)
    for main, words in {
        eval_command.main: [f"run={run_dir}"],
        export.main: [f"run={run_dir}", f"out={out}"],
        compare.main: [f"policies=[{run_dir},{older}]", f"out={out}"],
        audit.main: [f"run={run_dir}"],
        replay.main: [f"eval={evaluation}"],
        train.main: [*SMALL, f"init={run_dir}", f"out={out}"],
    }.items():
        outcome = run(main, words)
        assert (outcome.code, outcome.stdout, outcome.stderr.count("\n"), out.exists()) == (2, "", 1, False), outcome
        assert "step_320 is corrupt: policy.pt is not what was written" in outcome.stderr
        if main is not replay.main:
            assert "step_256 is older and whole: eval and export take it with checkpoint=step_256" in outcome.stderr
    assert run_eval(f"run={run_dir}", "checkpoint=step_256", "episodes=2").code == 0
    compared = run(compare.main, [f"policies=[{older},{older}]", "limit=2", f"out={out}"])
    entry = {"checkpoint": "step_256", "checkpoint_sha256": checkpoint.policy_hash(older)}
    assert compared.result["checkpoints"] == [{"policy": str(older), **entry}] * 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("policy:\n", "policy: {[\n", "config.yaml: while parsing a flow"),
        ("policy:\n  name: gaussian\n", "policy:\n", "config.yaml is not the configuration of a run"),
        ("policy:\n  name: gaussian\n", "policy:\n  name: [gaussian]\n", "is not the configuration of a run"),
        ("\nmax_minutes:", "\nmax_minutes: soon #", "is not the configuration of a run|max_minutes: got"),
    ],
)
def test_a_broken_configuration_is_one_line_of_every_command(
    many_checkpoints: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    run_dir, out = shutil.copytree(many_checkpoints, tmp_path / "run", symlinks=True), tmp_path / "out"
    assert run_eval(f"run={run_dir}", "episodes=2").code == 0
    (evaluation,) = run_dir.glob("eval/step_320*.json")
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace(old, new, 1))
    for main, words in {
        train.main: [f"resume={run_dir}"],
        eval_command.main: [f"run={run_dir}"],
        export.main: [f"run={run_dir}", f"out={out}"],
        compare.main: [f"policies=[{run_dir},{run_dir}]"],
        audit.main: [f"run={run_dir}"],
        replay.main: [f"eval={evaluation}"],
        report.main: [f"run={run_dir}"],
        status.main: [f"run={run_dir}"],
    }.items():
        outcome = run(main, words)
        assert (outcome.code, outcome.stdout, outcome.stderr.count("\n")) == (2, "", 1), outcome
        assert re.search(message, outcome.stderr), outcome.stderr


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes, as if the disk were full (OSError EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_keeps_the_last_checkpoint(many_checkpoints: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(many_checkpoints, tmp_path / "run", symlinks=True)
    needed = max(path.stat().st_size for path in checkpoint_of(run_dir, 320).iterdir())
    assert needed > 2 * (run_dir / "metrics.jsonl").stat().st_size
    with largest_file(needed - 1):
        outcome = run_train(f"resume={run_dir}", "total_steps=384")
    assert outcome.code == 2, outcome.stderr
    assert f"error: cannot write a checkpoint in {run_dir}" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {
        path.name for path in (many_checkpoints / "checkpoints").iterdir()
    }
    again = run_train(f"resume={run_dir}", "total_steps=384")
    assert again.code == 0, again.stderr
    assert again.result["env_steps"] == 384
