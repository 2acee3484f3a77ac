"""The additions in docs/extending are complete: in a copy of the repository their tests pass and they train."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from embodied.envs import make_pool, make_sampler

COPIED = ("embodied", "envs", "policies", "algos", "configs", "assets", "pyproject.toml", "tests/conftest.py")
HEAD = r"^```(?:python|yaml|xml)\n(?:#|<!--) (?P<path>[\w/.]+)(?P<where>, [^\n]+?)?(?: -->)?\n"
BLOCK = re.compile(HEAD + r"(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^```sh\npython -m embodied\.train (?P<words>.+)\n```$", re.MULTILINE)
AFTER = re.compile(r', after "(.+)"$')
SMALL = ("num_envs=8", "total_steps=512", "eval_episodes=4", "policy.actor_hidden=[16]", "policy.critic_hidden=[16]")

FEWER = {"replay_algorithm": ("algo.steps=10",)}
"""Further options of an example that learns nothing here."""
TESTED_AND_TRAINED = """
import sys
import pytest
from embodied.train import main
sys.exit(pytest.main(["-q", sys.argv[1]]) or main(sys.argv[2:]))
"""
"""Both in one process, because imports take longer than either."""
LEARNED = {"simulator": 0.95}  # trains as its command says, to a success whose interval is above this


def apply_block(copy: Path, match: re.Match[str]) -> Path:
    """Write a new file, or add the block to an existing one where its first line says."""
    path, where, text = copy / match["path"], match["where"], match["text"]
    if where is None:
        assert not path.exists(), f"{match['path']} exists already: the example must choose another name"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    elif after := AFTER.match(where):
        lines = path.read_text().splitlines(keepends=True)
        place = next(i for i, line in enumerate(lines) if line.startswith(after[1])) + 1
        path.write_text("".join([*lines[:place], text, *lines[place:]]))
    else:
        assert where == ", at the end", where
        path.write_text(path.read_text() + "\n" + text)
    return path


PAGES = {"task": 5, "policy": 4, "algorithm": 4, "replay_algorithm": 4, "simulator": 3, "robot": 3, "curriculum": 4}
"""Files of each page: one of code, one YAML where it has a group, one registration, one test.

That of tasks has a second task, in a file of the user's.
"""


def copy_of(root: Path, folder: Path) -> Path:
    """Copy what an addition changes or needs."""
    for name in COPIED:
        source, target = root / name, folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy(source, target)
    return folder


def add(copy: Path, root: Path, page: str) -> tuple[list[Path], str]:
    """Follow a page in a copy. Return the new Python files, code before test, and what the page trains with."""
    text = (root / "docs" / "extending" / f"{page}.md").read_text()
    matches = list(BLOCK.finditer(text))
    paths = [apply_block(copy, match) for match in matches]
    assert len(matches) == PAGES[page]
    new = [path for path, match in zip(paths, matches, strict=True) if path.suffix == ".py" and not match["where"]]
    new.sort(key=lambda path: path.name.startswith("test_"))
    command = COMMAND.search(text)
    assert command is not None
    return new, command["words"]


def run(copy: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)  # trainings, on cores that other tests use
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow(reason="it trains to success")) if page in LEARNED else page
     for page in PAGES],
)  # fmt: skip
def test_worked_example(root: Path, tmp_path: Path, page: str) -> None:
    new, words = add(copy_of(root, tmp_path), root, page)
    small = () if page in LEARNED else (*SMALL, *FEWER.get(page, ()))
    command = [*shlex.split(words), *small, "out=runs/example"]
    result = json.loads(run(tmp_path, "-c", TESTED_AND_TRAINED, str(new[-1]), *command).splitlines()[-1])
    assert result["env_steps"] >= 512
    if page in LEARNED:
        assert result["eval"]["success_at_end_ci95"][0] > LEARNED[page]


def test_a_task_in_a_file_of_your_own(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked, trained and evaluated in another folder, as its section says, and its expert solves it."""
    page = (root / "docs" / "extending" / "task.md").read_text().partition("## A task in the project")[0]
    for match in BLOCK.finditer(page):
        apply_block(tmp_path, match)
    monkeypatch.chdir(tmp_path)
    few = {"tasks": ("resets=4", "steps=4", "num_envs=2"), "train": SMALL, "eval": ("episodes=2",)}
    for command, words in re.findall(r"^python -m embodied\.(\w+) (.+)$", page, re.MULTILINE):
        main = import_module(f"embodied.{command}").main
        assert main([*shlex.split(words), *few[command]]) == 0
    pool = make_pool("my_task.py:Bolt", {}, num_envs=16, num_threads=1)
    pool.reset(make_sampler(pool, seed=0))
    for _ in range(pool.spec.max_episode_steps):
        step = pool.step(pool.task.expert())
    assert step.episodes.success_at_end_M.all()


@pytest.mark.slow(reason="mypy reads the whole project")
def test_all_examples_together_pass_linter_and_type_checker(root: Path, tmp_path: Path) -> None:
    copy_of(root, tmp_path)
    new = [[str(path) for path in add(tmp_path, root, page)[0]] for page in PAGES]
    files = [path for paths in new for path in paths]
    run(tmp_path, "-m", "ruff", "check", "--no-cache", *files)
    run(tmp_path, "-m", "ruff", "format", "--no-cache", "--diff", *files)
    typed = [paths[0] for page, paths in zip(PAGES, new, strict=True) if page != "task"]
    run(tmp_path, "-m", "mypy", "--cache-dir", str(root / ".mypy_cache"), *typed)  # torch is in there already


def test_readme_example_runs(root: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (root / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SAME_STEP" in done.stdout
