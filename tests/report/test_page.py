"""The page of a run: what it says, that nothing in it is taken for HTML, and how a browser shows it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core.config import parse_overrides
from embodied.core.statistics import t_interval
from embodied.core.words import word
from embodied.report.__main__ import main
from embodied.report.curves import group_runs
from embodied.report.page import Film, next_commands, page
from embodied.runtime import checkpoint
from embodied.runtime.checkpoint_names import newest
from embodied.session.config import read_run, to_mapping, to_yaml
from embodied.session.defaults import compose_new
from embodied.session.files import hashes
from embodied.session.results.page import read_run_files, write_page
from tests.commands.helpers import run

HOSTILE = "</script><script>alert('&amp;')</script><img src=x onerror=\"console.error('x')\">"
CHROMIUM = shutil.which("chromium")


def write_run(folder: Path, seed: int = 0, finals: bool = True, shift: float = 0.0, **words: Any) -> Path:
    """Write the files of a run that learns in ten evaluations of 50 episodes."""
    config = compose_new({"task": "reach", "policy": "gaussian", "seed": seed, **words})
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "state.json").write_text(
        json.dumps({"state": "finished", "process": 1, "machine": "m", "total_steps": 1000})
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(1, 11):
            row = {"iteration": i, "env_steps": 100 * i, "wall_s": 2.0 * i, "perf/env_steps_per_s": 50.0 + i}
            waits = {"time/learner/learn_s": 1.0, "time/learner/wait_fragments_s": 3.0, "async/staleness_mean": None}
            file.write(json.dumps(row | waits) + "\n")
            rates = {"episodes": 50, "success_at_end": (share := min(1.0, i / 10 + shift)), "return_mean": 3.0}
            rates |= {"success_at_end_ci95": [max(0, share - 0.1), min(1.0, share + 0.1)], "iteration": i}
            (folder / "eval" / f"train_{100 * i}.json").write_text(json.dumps(rates | {"env_steps": 100 * i}))
    final = {"episodes": 200, "success_at_end": 0.95 - shift, "success_at_end_ci95": [0.91, 0.97], "return_mean": 9.0}
    split = {"episodes": 10, "success_at_end": 0.5, "success_at_end_ci95": [0.2, 0.8]}
    final["splits"] = {"train": split | {"goals": {"red in left": split}}}
    if finals:
        (folder / "eval" / "final_1000.json").write_text(json.dumps(final))
    return folder


def text_of(path: Path) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", path.read_text().partition("<script>")[0].partition("<body>")[2]))


def test_the_first_screen_answers(tmp_path: Path) -> None:
    text = text_of(write_page([write_run(tmp_path / "run")]))
    for words in (
        "Yes: 95.0%", "91.0% to 97.3%", "200 fresh episodes", "18s to 90%", "after 900 steps", "10.0% after 100 steps",
        "python -m embodied.train task=reach policy=gaussian seed=1,2", "red in left", "learn 25%",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    ("state", "finals", "words"),
    [
        ("interrupted", False, "training was cut short"),
        ("training", True, "cut short"),
        ("finished", False, "episodes during training"),
    ],
)
def test_what_is_not_finished_says_so(tmp_path: Path, state: str, finals: bool, words: str) -> None:
    folder = write_run(tmp_path / "run", finals=finals, max_minutes=5)
    (folder / "state.json").write_text(json.dumps({"state": state, "process": 1, "machine": "m"}))
    text = text_of(write_page([folder]))
    assert words in text
    longer = re.search(rf"resume={folder} (total_steps=\d+ max_minutes=null)?", text)
    assert bool(longer and longer[1]) == (state == "finished"), "what was cut short keeps its limits"
    assert ("of the last evaluation during training" in text) != finals


def test_a_run_that_got_to_no_level_says_so(tmp_path: Path) -> None:
    text = " ".join(text_of(write_page([write_run(tmp_path / "run", shift=-0.2, finals=False)])).split())
    assert "How fast? 20s in all no evaluation during training showed 90% success; 20s and 1.0k steps in all" in text


def test_the_seeds_that_it_proposes_are_others(tmp_path: Path) -> None:
    text = text_of(write_page([write_run(tmp_path / f"seed_{i}", i) for i in (0, 4)]))
    assert re.findall(r" seed=(\S+) ", text.replace("\n", " ")) == ["5,6", "5"] * 2


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "eval" / "final_1000.json").write_text('{"episodes": 200, "suc')
    (folder / "certificate.json").write_text("{")
    text = text_of(write_page([folder]))
    assert "eval/final_1000.json cannot be read" in text
    assert "100.0%" in text
    assert "of the last evaluation during training, not of a final one" in text
    assert f"{folder / 'certificate.json'} cannot be read" in text.partition("Certificate")[2]
    other = write_run(tmp_path / "other")
    (other / "metrics.jsonl").unlink()
    text = text_of(write_page([other]))
    assert "metrics.jsonl is missing or empty" in text
    assert "Yes: 95.0%" in text
    assert not re.search(r"\b0 steps|\b0s\b", text)


def test_a_final_evaluation_is_of_the_end_of_training(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 11, "env_steps": 1100, "wall_s": 22.0}) + "\n")
    text = text_of(write_page([folder]))
    assert "Yes: 100.0%" in text
    assert "of the last evaluation during training" in text
    assert "final_1000" in text


def write_certificate(folder: Path) -> None:
    """Write the certificate of a run's last checkpoint."""
    last = newest(folder)
    checks = {"ratio": {"passed": True, "reason": "fits"}}
    content = {"passed": True, "checks": checks, "checkpoint": last.name, "files": hashes(folder, last)}
    (folder / "certificate.json").write_text(json.dumps(content))


def test_a_certificate_of_other_weights_is_not_shown_in_green(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    weights = {"policy": {"weight": torch.ones(2)}}
    checkpoint.save(folder, 1000, weights)
    write_certificate(folder)

    def certificate() -> str:
        return write_page([folder]).read_text().partition(">Certificate<")[2].partition(">Go on<")[0]

    assert '<b class="good">yes</b>' in certificate()
    weights["policy"]["weight"][0] += 1e-3
    checkpoint.save(folder, 1000, weights)
    assert '<b class="good">' not in certificate()
    assert "checkpoints/step_1000/policy.pt changed since" in certificate()
    write_certificate(folder)
    checkpoint.save(folder, 1100, weights, after=1000)
    assert '<b class="good">' not in certificate()
    assert "is of step_1000, the last checkpoint is step_1100" in certificate()


def test_after_imitation_comes_reinforcement_learning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", algo="sft", data="demos")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 11, "wall_s": 22.0, "train/validation_loss": 0.1}) + "\n")
    text = text_of(write_page([folder]))
    assert "Reinforcement learning from the policy of this run" in " ".join(text.split())
    assert f"task=reach policy=gaussian init={folder}" in text
    assert "22s and 11 updates in all" in text


def test_seeds_of_a_configuration_are_a_band_with_the_t_interval(tmp_path: Path) -> None:
    runs = [read_run_files(write_run(tmp_path / f"seed_{i}", i, shift=0.02 * i)) for i in range(3)]
    [group] = group_runs(runs)
    curve, final = group.evaluations("steps")
    low, high = t_interval([30.0, 32.0, 34.0])
    assert (curve["x"][2], curve["y"][2]) == (300, pytest.approx(32.0))
    assert (curve["low"][2], curve["high"][2]) == (pytest.approx(low), pytest.approx(high))
    assert final["y"] == [pytest.approx(93.0)]
    assert final["low"] == [pytest.approx(100 * t_interval([0.95, 0.93, 0.91])[0])]
    assert max(curve["high"]) <= 100


def test_seeds_that_end_alike_have_the_interval_of_their_episodes(tmp_path: Path) -> None:
    [group] = group_runs([read_run_files(write_run(tmp_path / f"seed_{i}", i)) for i in range(2)])
    value, interval, note = group.result() or pytest.fail("no result")
    assert (value, "400 fresh episodes; all 2 seeds" in note) == (0.95, True)
    assert interval == pytest.approx((0.924, 0.967), abs=1e-3)


def test_other_configurations_are_other_curves(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", **{"algo.gamma": 0.5})]
    text = text_of(write_page(folders))
    assert re.search(r"algo\.gamma\s+0\.97\s+0\.97\s+0\.5", text), text
    assert (tmp_path / "page.html").is_file()


def test_the_commands_are_read_as_they_are_meant(tmp_path: Path) -> None:
    folder = write_run(tmp_path / 'it\'s $HOME, "a"\\', **{"algo.gamma": 0.5, "sim": "warp", "sampler": "uniform"})
    [group] = group_runs([read_run_files(folder)])
    found = next_commands(group.runs[0], group)
    assert parse_overrides(shlex.split(found["Evaluate"])[3:]) == {"run": str(folder), "episodes": 1000}
    words = parse_overrides(shlex.split(found["More seeds"])[3:-1])
    assert to_mapping(compose_new(words)) == to_mapping(read_run(folder))
    assert parse_overrides([shlex.split(word("a", "x\\"))[0]]) == {"a": "x\\"}


def hostile(folder: Path) -> Path:
    """A run whose texts are HTML wherever a user or a simulator may write texts."""
    folder = write_run(folder / HOSTILE.replace("/", "∕"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["task"] |= {"name": HOSTILE, HOSTILE: HOSTILE}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "state.json").write_text(json.dumps({"state": HOSTILE, "process": 1, "machine": "", "error": HOSTILE}))
    rates = {"episodes": 1, "success_at_end": 1.0, "success_at_end_ci95": [0.0, 1.0]}
    (folder / "eval" / "step_1.json").write_text(
        json.dumps(rates | {"splits": {HOSTILE: rates | {"goals": {HOSTILE: rates}}}})
    )
    checks = {f"{HOSTILE}{passed}": {"passed": passed, "reason": HOSTILE} for passed in (True, False, None)}
    (folder / "certificate.json").write_text(json.dumps({"checks": checks, "checkpoint": HOSTILE, "files": {}}))
    return folder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


def test_no_text_is_taken_for_html(tmp_path: Path) -> None:
    runs = [read_run_files(hostile(tmp_path)), read_run_files(write_run(tmp_path / "other"))]
    html = page(runs, [Film(b"mp4", False, HOSTILE)])
    tags = Tags()
    tags.feed(html)
    assert [tag for tag, _ in tags.found].count("script") == 3
    assert not [tag for tag, attributes in tags.found if tag == "img" or "onerror" in attributes]
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", html.partition("<script>")[0])


def test_the_page_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    code = f"""import sys
from embodied.report.__main__ import main
assert main(["run={folder}", "videos=false"]) == 0
sys.exit("torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", finals=False)
    (empty / "metrics.jsonl").unlink()
    for words, message in {
        (f"run={empty}",): "has no metrics and no final evaluation",
        (f"run={tmp_path}",): "has no config.yaml",
        ("videos=false",): "run is missing",
        (f"run={empty}", "video=true"): "Did you mean 'videos'",
        (f"run={write_run(tmp_path / 'run')}", f"out={tmp_path}"): "is a directory: give a file",
    }.items():
        outcome = run(main, list(words))
        assert (outcome.code, outcome.stdout, len(outcome.stderr.splitlines())) == (2, "", 1), outcome
        assert message in outcome.stderr
    assert not (empty / "page.html").exists()


# What a page does in a browser. It is in frames, as a window is at least 500 pixels wide.
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const found = {errors, view: innerWidth, width: document.documentElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, plots: document.querySelectorAll(".u-wrap canvas").length,
    answers: document.querySelector(".cards").getBoundingClientRect().bottom};
  parent.postMessage("found " + JSON.stringify(found) + " end", "*");
}, 300))</script></body>"""
FRAMES = """<script>onmessage = message => document.body.append(message.data)</script><body>
<iframe src="page.html" width="1440" height="900" style="border: 0"></iframe>
<iframe src="page.html" width="390" height="844" style="border: 0"></iframe></body>"""
WATCH = "<head><script>const errors = []; console.error = onerror = text => errors.push(String(text))</script>"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_without_errors_and_overflow(tmp_path: Path, dark: bool) -> None:
    runs = [read_run_files(write_run(tmp_path / "run")), read_run_files(hostile(tmp_path))]
    html = page(runs if dark else runs[:1], [Film(b"mp4", True, HOSTILE)])
    (tmp_path / "page.html").write_text(html.replace("<head>", WATCH).replace("</body>", PROBE))
    (tmp_path / "frames.html").write_text(FRAMES)
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1500,1800", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "frames.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = [json.loads(unescape(text)) for text in re.findall("found (.*?) end", done.stdout)]
    assert sorted(view["view"] for view in found) == [390, 1440]
    for view in found:
        assert (view["errors"], view["dark"], view["plots"]) == ([], dark, 3)
        assert view["width"] <= view["view"]
        if not dark:
            assert view["answers"] <= 844
