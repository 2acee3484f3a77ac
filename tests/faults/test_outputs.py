"""An output that exists or cannot be written: one line, exit code 2, and nothing half-written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodied import collect, convert
from embodied.session import command
from tests.commands.helpers import SMALL, run, run_collect, run_train


def test_out_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    outcome = run_train(*SMALL, f"out={tmp_path / 'run'}")
    assert outcome.code == 2
    assert "exists" in outcome.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file/run", "Not a directory"),
        ("file/deeper/run", "Not a directory"),
        ("/proc/none/run", "No such file or directory"),
        ("x" * 300, "File name too long"),
    ],
)
@pytest.mark.parametrize("command", ["train", "collect", "convert"])
def test_an_out_that_cannot_be_written_is_refused_before_the_work(
    command: str, out: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these is refused for root too. The expert solves nothing, which collect would say after its work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    outcome = {
        "train": lambda: run_train(*SMALL, f"out={out}"),
        "collect": lambda: run_collect("task=reach", "task.success_m=0.000001", "episodes=1", f"out={out}"),
        "convert": lambda: run(convert.main, ["source=none.h5", f"out={out}"]),
    }[command]()
    assert (outcome.code, outcome.stdout) == (2, ""), outcome.stderr
    assert outcome.stderr == f"error: out={out} cannot be written: {reason}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_out_that_can_no_longer_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A file takes the place of its parent while the episodes are recorded."""
    parent, make = tmp_path / "demos", collect.make_demonstrating

    def replacing(*args: Any) -> Any:
        parent.touch()
        return make(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "make_demonstrating", replacing)
        outcome = run_collect("task=reach", "episodes=1", f"out={parent / 'reach'}", "num_threads=1")
    assert (outcome.code, outcome.stdout) == (2, ""), outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith(f"error: out={parent / 'reach'} cannot be written: ")
    assert "Traceback" not in outcome.stderr
    assert list(tmp_path.iterdir()) == [parent]


def test_what_a_disk_refuses_is_no_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(argv: object) -> dict[str, object]:
        (tmp_path / ("x" * 300)).touch()
        return {}

    assert command.run_command(write, None, []) == 2
    assert capsys.readouterr().err.startswith("error: File name too long: ")
