"""The report command: every training ends with a page, and videos of it show what the episodes say."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import imageio_ffmpeg
import pytest

from embodied.report import __main__ as report
from embodied.session.results import filming
from tests.commands.helpers import SMALL, Outcome, run, run_train


def test_a_training_ends_with_its_page(trained: tuple[Path, Outcome]) -> None:
    run_dir, outcome = trained
    assert outcome.result["page"] == str(run_dir / "page.html")
    assert "finished" in (run_dir / "page.html").read_text("utf-8").partition("<script>")[0]
    assert "<video" not in (run_dir / "page.html").read_text("utf-8")


def test_seeds_end_with_one_page_of_all(tmp_path: Path) -> None:
    outcome = run_train(*SMALL, "total_steps=128", "seed=0,1", f"out={tmp_path / 'runs'}")
    assert outcome.result["page"] == str(tmp_path / "runs" / "page.html")
    assert "runs, 2 seeds" in (tmp_path / "runs" / "page.html").read_text("utf-8")
    assert [Path(one["page"]).is_file() for one in outcome.result["runs"]] == [True, True]


def test_a_disk_that_takes_no_page_does_not_fail_a_training(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embodied.session.results.page.PAGE_FILE", "config.yaml/page.html")
        outcome = run_train(*SMALL, "total_steps=64", "eval_episodes=0", f"out={tmp_path / 'run'}")
    assert (outcome.code, outcome.result["page"]) == (0, None)
    assert "no page could be written" in outcome.stderr


def test_the_only_failure_of_the_final_evaluation_is_filmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filming, "SIZE", (64, 48))
    folder = tmp_path / "run"
    run_train(*SMALL, "total_steps=64", "eval_episodes=60", "task.success_m=0.38", f"out={folder}")
    rows = [json.loads(line) for line in (folder / "eval" / "final_64.episodes.jsonl").read_text().splitlines()]
    failures = [row["episode"] for row in rows if not row["success_at_end"]]
    assert 0 < len(failures) < 3, failures
    run(report.main, [f"run={folder}", "videos=true"])
    html = (folder / "page.html").read_text("utf-8")
    filmed = re.findall(r"<figcaption><b[^>]*>failure</b> [^<]*, episode (\d+)<", html)
    assert [int(i) for i in filmed] == failures


def test_a_run_without_a_final_evaluation_has_no_videos_and_says_so(tmp_path: Path) -> None:
    run_train(*SMALL, "total_steps=64", "eval_episodes=0", f"out={tmp_path / 'run'}")
    outcome = run(report.main, [f"run={tmp_path / 'run'}"])
    assert (outcome.code, outcome.result["videos"]) == (0, 0)
    assert "is not filmed: it has no final evaluation of step_64" in outcome.stderr


def test_videos_are_of_successes_and_of_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filming, "SIZE", (64, 48))
    run_train(*SMALL, "total_steps=64", "eval_episodes=16", "task.success_m=0.25", f"out={tmp_path / 'run'}")
    outcome = run(report.main, [f"run={tmp_path / 'run'}", "videos=true"])
    html = (tmp_path / "run" / "page.html").read_text("utf-8")
    assert outcome.result == {
        "page": str(tmp_path / "run" / "page.html"), "runs": [str(tmp_path / "run")], "videos": 6,
        "bytes": len(html.encode()),
    }  # fmt: skip
    assert re.findall(r"<figcaption><b[^>]*>(\w*)<", html) == ["success"] * 3 + ["failure"] * 3
    for i, text in enumerate(re.findall(r"data:video/mp4;base64,([^\"]*)", html)):
        video = tmp_path / f"{i}.mp4"
        video.write_bytes(base64.b64decode(text))
        assert imageio_ffmpeg.count_frames_and_secs(str(video)) == (41, pytest.approx(2.05))
