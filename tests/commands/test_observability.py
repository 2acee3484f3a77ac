"""What a user sees of a run: its trace, its state, its progress."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from embodied import status
from embodied.report import progress
from embodied.runtime.evaluator import Evaluator
from embodied.session.files import Journal, lock_owner, lock_run
from embodied.session.results.state import read_status
from tests.commands.helpers import SMALL, Outcome, run, run_eval, run_train
from tests.runtime.test_trace import read

SHORT = [*SMALL, "total_steps=640", "eval_episodes=0"]


def test_a_run_writes_its_trace(tmp_path: Path) -> None:
    outcome = run_train(*SHORT, "trace=true", "runtime=local", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    found = read(tmp_path / "run" / "trace.json.gz")
    assert {"env worker 0", "actor server 0", "learner"} <= set(found)
    assert {event["name"] for event in found["learner"]["learner"]} >= {"learn", "publish", "wait_fragments"}


def test_imitation_has_no_trace(tmp_path: Path) -> None:
    outcome = run_train("task=reach", "algo=sft", f"data={tmp_path}", "trace=true", f"out={tmp_path / 'run'}")
    assert outcome.code == 2
    assert "trace=true is for reinforcement learning, not for algo=sft" in outcome.stderr
    assert not (tmp_path / "run").exists()


def run_status(*words: str) -> Outcome:
    return run(status.main, list(words))


def start_training(run_dir: Path) -> subprocess.Popen[bytes]:
    """A training in a process of its own, after its first rows."""
    words = [*SMALL, "total_steps=1000000000", "runtime=local", f"out={run_dir}"]
    process = subprocess.Popen([sys.executable, "-m", "embodied.train", *words], stderr=subprocess.DEVNULL)
    while process.poll() is None and read_lines(run_dir / "metrics.jsonl") < 3:
        time.sleep(0.05)
    assert process.poll() is None
    return process


def read_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reached its end."""
    run_dir = tmp_path_factory.mktemp("status") / "run"
    assert run_train(*SMALL, "total_steps=640", "runtime=local", f"out={run_dir}").code == 0
    return run_dir


def test_status_of_a_finished_run(finished: Path) -> None:
    outcome = run_status(f"run={finished}")
    assert outcome.code == 0
    found = outcome.result
    assert found["state"] == "finished"
    assert found["process"] == f"process {os.getpid()} on {os.uname().nodename}"
    assert (found["task"], found["policy"], found["algo"], found["runtime"]) == ("reach", "gaussian", "ppo", "local")
    assert found["steps"] >= found["total_steps"] == 640
    assert (found["progress"], found["left_s"], found["error"]) == (1.0, None, None)
    final = json.loads(next((finished / "eval").glob("final_*.json")).read_text())
    assert found["eval"] == {
        "steps": found["steps"], "final": True, "episodes": 4, "return_mean": final["return_mean"],
        "success_at_end": final["success_at_end"], "success_at_end_ci95": final["success_at_end_ci95"],
    }  # fmt: skip
    assert set(found["waits"]) == {"env_worker", "actor_server", "learner"}
    for shares in found["waits"].values():
        assert sum(shares.values()) == pytest.approx(1)
    assert found["staleness"]["max"] <= 1
    for text in ("state: finished", "progress: 100%", "env worker: ", "wait_fragments", "staleness: mean"):
        assert text in outcome.stderr
    assert "in 4 episodes, at the end" in outcome.stderr


def test_status_of_a_running_and_then_a_killed_run(tmp_path: Path) -> None:
    process = start_training(tmp_path / "run")
    try:
        found = run_status(f"run={tmp_path / 'run'}").result
        assert found["state"] == "training"
        assert found["process"].startswith(f"process {process.pid} on ")
        assert found["left_s"] > 0
        assert found["steps_per_s"] > 0
    finally:
        process.kill()
        process.wait()
    outcome = run_status(f"run={tmp_path / 'run'}")
    assert outcome.code == 0
    assert outcome.result["state"] == "killed"
    assert f"process {process.pid} on" in outcome.stderr


def test_status_of_an_interrupted_run(tmp_path: Path) -> None:
    process = start_training(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    assert read_status(tmp_path / "run")["state"] == "interrupted"


def test_status_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Evaluator, *_: Any) -> None:
        logging.getLogger("embodied.runtime").warning("env worker 0 is replaced:\n  it died")
        raise FloatingPointError("the evaluation is broken")

    monkeypatch.setattr(Evaluator, "_evaluate", broken)
    run_train(*SMALL, "total_steps=6400", "runtime.eval_every=1", f"out={tmp_path / 'run'}")
    found = run_status(f"run={tmp_path / 'run'}").result
    assert (found["state"], found["error"]) == ("failed", "FloatingPointError: the evaluation is broken")
    assert found["warning"].endswith("env worker 0 is replaced: it died")


def test_status_on_a_terminal_is_a_table_until_ctrl_c(tmp_path: Path) -> None:
    training = start_training(tmp_path / "run")
    main, terminal = pty.openpty()
    try:
        shown = subprocess.Popen(
            [sys.executable, "-m", "embodied.status", f"run={tmp_path / 'run'}"],
            stdout=subprocess.PIPE, stderr=terminal, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        text = b""
        while text.count(b"wait_ticket") < 3:  # the table was renewed
            text += os.read(main, 65536)
        shown.send_signal(signal.SIGINT)
        out, _ = shown.communicate()
    finally:
        training.kill()
        training.wait()
        os.close(main)
        os.close(terminal)
    assert shown.returncode == 0
    assert json.loads(out.splitlines()[-1])["state"] == "training"
    assert b"training" in text


@pytest.mark.parametrize(("words", "message"), [
    (["run=nowhere"], "'nowhere' is not a directory"),
    (["run=tests"], "'tests' has no config.yaml"),
    ([], "run"),
    (["run=tests", "onec=true"], "Did you mean 'once'"),
])  # fmt: skip
def test_status_of_what_is_not_a_run(words: list[str], message: str) -> None:
    outcome = run_status(*words)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_status_of_a_run_without_a_state_and_without_rows(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((finished / "config.yaml").read_text())
    found = read_status(tmp_path)
    assert (found["state"], found["steps"], found["eval"], found["waits"]) == ("unknown", 0, None, {})
    with lock_run(tmp_path):
        assert read_status(tmp_path)["state"] == "starting"
    outcome = run_status(f"run={tmp_path}")
    assert (outcome.code, outcome.result["state"]) == (0, "unknown")


def test_a_reader_of_the_lock_does_not_keep_a_training_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock_owner(tmp_path) is None
    reader = (tmp_path / ".lock").open("w")
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: reader.close())
    with lock_run(tmp_path):
        assert lock_owner(tmp_path) == f"process {os.getpid()} on {os.uname().nodename}"
    assert lock_owner(tmp_path) is None


def test_warnings_are_still_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with Journal(tmp_path, 1):
            logging.getLogger("embodied").warning("no progress")
        assert root.handlers == []
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err == "no progress\n"
    assert (tmp_path / "warnings.log").read_text().endswith(" no progress\n")


def test_status_imports_no_torch() -> None:
    code = "import sys, embodied.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_long_evaluation_shows_its_progress(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    outcome = run_eval(f"run={finished}", "episodes=4")
    assert outcome.code == 0
    assert re.search(r"^ *\d+%  of 4 episodes evaluated  .* gone  .* left$", outcome.stderr, re.MULTILINE)
    assert "100%  of 4 episodes evaluated" in outcome.stderr
    outcome = run_train(*SMALL, "total_steps=64", f"out={tmp_path / 'run'}")
    assert outcome.code == 0
    shares = [int(share) for share in re.findall(r"(\d+)%  of 4 episodes evaluated", outcome.stderr)]
    assert shares == sorted(shares), "both kinds of noise count together"
    assert shares[-1] == 100


def test_a_task_without_success_shows_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    words = [word for word in SMALL if not word.startswith("task=")]
    outcome = run_train(*words, "task=gym/Pendulum-v1", "total_steps=64", "eval_episodes=0", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert "return -  evaluated -" in outcome.stderr
    assert "  success " not in outcome.stderr
