"""What a user sees of a run: its trace, its state, its progress."""

from __future__ import annotations

from pathlib import Path

from tests.commands.helpers import SMALL, run_train
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
