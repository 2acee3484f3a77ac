"""A session does for any trainer what stands around training: limits, metrics, checkpoints, going on, the end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from embodied.core.clock import running_s
from embodied.core.config import parse_overrides
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.statistics import wilson_interval
from embodied.report import progress
from embodied.report.metrics import evaluated_success, read_metrics
from embodied.runtime import checkpoint
from embodied.session.command import Stopped
from embodied.session.config import RunConfig, compose_run, read_run, resume_run
from embodied.session.factories import make_policy, make_spec
from embodied.session.files import lock_run
from embodied.session.session import Session
from embodied.session.trainer import Report, Trainer

OPTIONS: dict[str, Any] = {
    "task": "reach", "policy": "gaussian", "policy.actor_hidden": [4], "policy.critic_hidden": [4], "total_steps": 5,
    "checkpoint_minutes": 60,
}  # fmt: skip


def rates(solved: int) -> dict[str, Any]:
    return {"episodes": 10, "success_at_end": solved / 10, "success_at_end_ci95": wilson_interval(solved, 10)}


class Counting(Trainer):
    """The shortest trainer: an iteration counts ten steps, and some of them do what a test asks for."""

    evaluates = True

    def __init__(
        self, config: RunConfig, run_dir: Path, new: bool, fails: int = -1, stops: int = -1, evaluated: bool = True
    ) -> None:
        super().__init__(config, run_dir, new)
        self._policy = make_policy(config, make_spec(config))
        self.count, self.fails, self.stops, self.evaluated = 0, fails, stops, evaluated
        self.finished = self.closed = self.kept = False

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def iteration(self) -> int:
        return self.count

    @property
    def steps(self) -> int:
        return 10 * self.count

    @property
    def total_steps(self) -> int:
        return 10 * self.config.total_steps

    def announcement(self) -> str:
        return "counting"

    def iterations(self, stop: threading.Event, deadline_s: float) -> Iterator[Report]:
        while self.steps < self.total_steps and not stop.is_set() and running_s() < deadline_s:
            self.count += 1
            if self.count == self.fails:
                raise FloatingPointError("loss nan")
            if self.count == self.stops:
                os.kill(os.getpid(), signal.SIGINT)
            evaluation = {"env_steps": self.steps, **rates(self.count), "success_once": 1.0, "return_mean": 0.0}
            goal = self.config.stop_at_success
            if goal is not None and self.count >= 10 * goal:  # fresh episodes are solved less often
                evaluation["confirmation"] = rates(self.count - 1)
            yield Report({"env_steps": self.steps}, evaluation if self.evaluated else None)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self._policy.state_dict(), "count": self.count, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]

    def keep_evaluated(self) -> None:
        self.kept = True

    def finish(self) -> None:
        self.finished = True

    def result(self) -> dict[str, Any]:
        return {"env_steps": self.steps}

    def evaluate(self, watch: Callable[[float], None]) -> dict[str, Any]:
        assert self.finished
        return {"judged": self.count}

    def close(self) -> None:
        self.closed = True


def run(session: Session, **options: int) -> dict[str, Any]:
    with Counting(session.config, session.run_dir, session.found is None, **options) as trainer:
        return session.run(trainer)


def new(path: Path, **changes: Any) -> Session:
    return Session(compose_run({**OPTIONS, **changes, "out": str(path)}))


def resume(path: Path, **changes: Any) -> Session:
    return Session(resume_run(path, changes), path)


def iterations(path: Path) -> list[int]:
    return [row["iteration"] for row in read_metrics(path / "metrics.jsonl")]


def saved(path: Path) -> list[str]:
    return sorted(folder.name for folder in (path / "checkpoints").glob("step_*"))


def test_a_run_leaves_its_directory_and_result(tmp_path: Path) -> None:
    path = tmp_path / "run"
    result = run(new(path))
    assert {key: result[key] for key in ("run", "env_steps", "iterations")} == {
        "run": str(path), "env_steps": 50, "iterations": 5,
    }  # fmt: skip
    assert result["eval"] == {"judged": 5} == json.loads((path / "eval" / "final_50.json").read_text())
    assert json.loads((path / "eval" / "train_30.json").read_text())["success_at_end"] == 0.3
    assert iterations(path) == [1, 2, 3, 4, 5]
    assert saved(path) == ["step_50"], "none was due before the end"
    assert read_run(path).total_steps == 5


def test_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    run(new(tmp_path / "run", checkpoint_minutes=0))
    assert saved(tmp_path / "run") == ["step_30", "step_40", "step_50"], "the newest three"


def test_no_episodes_no_evaluation(tmp_path: Path) -> None:
    assert run(new(tmp_path / "run", eval_episodes=0))["eval"] is None
    assert not list((tmp_path / "run" / "eval").glob("final*"))


def test_a_good_evaluation_ends_a_run_when_fresh_episodes_confirm_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    result = run(new(path, stop_at_success=0.3, checkpoint_minutes=0))
    last = checkpoint.load_last(path)
    assert (last.env_steps, last.state["kept"]) == (40, True), "the weights that were confirmed, in place of the newest"
    assert result["iterations"] == 4
    assert result["stop"] == {"evaluation": rates(4), "confirmation": rates(3)}
    fresh = [row.get("eval/confirmation/success_at_end") for row in read_metrics(path / "metrics.jsonl")]
    assert fresh == [None, None, 0.2, 0.3]
    assert json.loads((path / "eval" / "train_30.json").read_text())["confirmation"]["success_at_end"] == 0.2
    shown = [line for line in capsys.readouterr().err.splitlines() if "stop_at_success" in line]
    assert shown == [
        "success 30.0% (10.8% to 60.3%) of 10 episodes reaches stop_at_success=0.3; "
        "fresh ones: 20.0% (5.7% to 51.0%) of 10 episodes, not confirmed, training goes on",
        "success 40.0% (16.8% to 68.7%) of 10 episodes reaches stop_at_success=0.3; "
        "fresh ones: 30.0% (10.8% to 60.3%) of 10 episodes, confirmed, training ends",
    ]


def test_a_signal_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(Stopped) as stopped:
        run(new(path), stops=2)
    assert (stopped.value.result["iterations"], stopped.value.result["eval"]) == (2, None)
    assert saved(path) == ["step_20"]
    result = run(resume(path))
    assert (result["iterations"], result["eval"]) == (5, {"judged": 5})
    assert result["wall_s"] > stopped.value.result["wall_s"], "the clock counts both sessions"
    assert iterations(path) == [1, 2, 3, 4, 5]


def test_a_failure_says_how_to_go_on_if_there_is_something_to_go_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    with pytest.raises(FloatingPointError):
        run(new(path), fails=3)
    assert "failed" not in capsys.readouterr().err
    assert not saved(path)
    with pytest.raises(FloatingPointError):
        run(resume(path, checkpoint_minutes=0), fails=4)
    assert f"to go on from the last checkpoint: resume={path}" in capsys.readouterr().err
    assert saved(path) == ["step_10", "step_20", "step_30"]
    assert run(resume(path))["iterations"] == 5
    assert iterations(path) == [1, 2, 3, 4, 5]


def test_a_resumed_run_shows_the_last_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    path = tmp_path / "run"
    with pytest.raises(Stopped):
        run(new(path), stops=3)
    assert "evaluated 30%" in capsys.readouterr().err
    assert run(resume(path, stop_at_success=0.3), evaluated=False)["iterations"] == 5, "an old evaluation ends nothing"
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert len(lines) == 2
    assert all("evaluated 30%" in line for line in lines)


def test_the_evaluation_that_is_shown_is_of_instructions_that_are_trained_on() -> None:
    assert evaluated_success({"eval/success_at_end": 0.5, "eval/train/success_at_end": 0.7}) == 0.7
    assert evaluated_success({"iteration": 2, "eval/success_at_end": 0.5}) == 0.5
    assert evaluated_success({}) is None


def test_what_goes_on_with_a_run_is_written_for_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rl 1, it's"
    with pytest.raises(Stopped):
        run(new(path), stops=2)
    told = capsys.readouterr().err.partition("go on with: ")[2].splitlines()[0]
    assert told.startswith("python -m embodied.train ")
    assert parse_overrides(shlex.split(told)[3:]) == {"resume": str(path)}
    with pytest.raises(UserError) as caught:
        new(path)
    assert parse_overrides(shlex.split(str(caught.value).partition("that run: ")[2])) == {"resume": str(path)}


def test_a_new_run_takes_no_directory_of_another(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists; give a new directory; it has no checkpoint to go on from"):
        new(tmp_path)
    (tmp_path / "old" / "checkpoints" / "0000000010").mkdir(parents=True)
    with pytest.raises(UserError, match=r"exists; give a new directory, or go on with that run: resume=.*old"):
        new(tmp_path / "old")
    session = new(tmp_path / "run")
    (tmp_path / "run").mkdir()  # meanwhile
    with pytest.raises(UserError, match="cannot make the run directory"):
        run(session)
    assert not list((tmp_path / "run").iterdir())


def test_a_file_system_without_locks_is_trained_on_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with lock_run(tmp_path), lock_run(tmp_path):
        assert (tmp_path / ".lock").exists()


def test_a_directory_that_is_not_there_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write into the run directory"):
        lock_run(tmp_path / "none")
