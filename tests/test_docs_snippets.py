"""Every command, program and file that the documents print is composed, run or read.

```sh``` blocks of a page ── bash, in which programs only note their words ──► words ──► options of the command

A training notes its configuration in ``out=``, so that later commands of the page go on from it. test_extending.py
follows the pages in docs/extending in a copy.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied import bench, train
from embodied.__main__ import _module
from embodied.core import options
from embodied.core.config import parse_overrides
from embodied.deployment.robots.mapping import Entry
from embodied.deployment.validation import from_json
from embodied.envs import make_pool
from embodied.envs.mujoco.robot_file import read_robot
from embodied.envs.registry import FAMILIES, sim_options
from embodied.session.command import with_first_key
from embodied.session.config import OF_OTHERS
from embodied.session.deployed.planned import read_server_mapping

ROOT = Path(__file__).resolve().parents[1]
PATHS = [ROOT / "README.md", *(path for path in ROOT.glob("docs/**/*.md") if path.parent.name != "extending")]
PAGES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PATHS}
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:python -m embodied\.|embodied )[a-z]+(?:\s[^`]*)?)`")
SHELL = """
set -eu
MAKE=$(command -v make) PATH=
note() { printf '%s\\x1e' "$@"; printf '\\x1d'; }
python() { if [ "$1" = -m ]; then note "${@:2}"; else [ -f "$ROOT/$1" ]; fi; }
embodied() { note embodied."$1" "${@:2}"; }
make() { "$MAKE" --dry-run -C "$ROOT" "$@" 1>&2; }
for name in python3 pip ray scp lerobot-{teleoperate,record,replay,edit-dataset}; do eval "$name() { :; }"; done
"""
NOT_COMPOSED = {
    "dots": "the reader's package", "my_arm.yaml": "the reader's arm",
    "task=touch": "the reader's package", "my_module:MyEnv": "the reader's module",
    "what": "stands for a word", "task=task": "stands for a word",
}  # fmt: skip
RUN_ELSEWHERE = {
    "README.md": "test_extending.py", "docs/use_with.md": "envs/test_use_with.py",
    "docs/simulators.md": "envs/test_simulators_page.py", "docs/sim_to_real.md": "deployment/test_docs.py",
    "docs/vla.md": "policies/test_vla_checkpoint.py",
}  # fmt: skip
LAST_STEP = {
    "collect": "compose_run", "tasks": "compose_run", "preflight": "compose_new", "deploy": "parse_words",
    "serve": "parse_words",
}  # fmt: skip
"""What completes the options of a command; of others ``from_mapping``."""


class Composed(BaseException):
    """The options of a command are complete."""


def blocks(page: str, language: str) -> list[str]:
    found = (match.groups() for match in BLOCK.finditer(PAGES[page]))
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, kind, text in found if kind == language]


def commands(page: str) -> list[list[str]]:
    """Return the words of each command of a page, those of its sh blocks as the shell gives them."""
    Path(".venv/bin").mkdir(parents=True)
    Path(".venv/bin/activate").touch()
    lines = [SHELL, *blocks(page, "sh"), *(" ".join(line.split()) for line in INLINE.findall(PAGES[page]))]
    script = re.sub(r"<([\w ]+)>", r"\1", "\n".join(lines))  # of what stands for a word
    shell = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"ROOT": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert shell.returncode == 0, shell.stderr
    return [noted.split("\x1e")[:-1] for noted in shell.stdout.split("\x1d")[:-1]]


def compose(command: str, words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Compose the options of a command as it does, and end it then; fail where it refuses one."""
    found, last = importlib.import_module(f"embodied.{_module(command)}"), LAST_STEP.get(command, "from_mapping")
    if command == "preflight":  # of a data set that the reader has
        meta = Path(with_first_key(words, "data")[0].removeprefix("data=")) / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        for file in ("info.json", "recorded_with.json"):
            (meta / file).write_text('{"task": "reach"}')
    place = found if hasattr(found, last) else options
    original: Callable[..., Any] = getattr(place, last)

    def composing(*args: Any) -> Any:
        result = original(*args)
        if isinstance(result, bench.BenchOptions) and len(words) > 1:
            return result  # the others follow
        raise Composed

    patch.setattr(place, last, composing)
    with pytest.raises(Composed):
        found.main(words)


def compose_training(words: Sequence[str]) -> None:
    words = [word for word in with_first_key(words, "task") if word != "--config"]
    given = parse_overrides([word for word in words if not word.startswith("seed=")])
    for key in {"init", "resume"} & given.keys():
        if not Path(given[key]).exists():  # the page begins with a run that the reader has
            others = [word for word in words if not word.startswith((f"{key}=", "out="))]
            compose_training([*others, f"out={given[key]}"])
    with redirect_stdout(io.StringIO()) as printed:
        assert train.main([*words, "--config"]) == 0
    if "out" in given:
        Path(given["out"]).mkdir(parents=True, exist_ok=True)
        config = json.loads(printed.getvalue().splitlines()[-1])
        (Path(given["out"]) / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("page", PAGES)
def test_the_options_of_every_command_compose(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in (*blocks(page, "python"), *blocks(page, "xml")):
        if name := re.match(r"(?:#|<!--) (\w+\.\w+)", file):
            (tmp_path / name[1]).write_text(file)
    for module, *words in commands(page):
        if words and not any(part in word for part in NOT_COMPOSED for word in words):
            with monkeypatch.context() as patch:
                command = module.removeprefix("embodied.")
                compose_training(words) if command == "train" else compose(command, words, patch)


@pytest.mark.parametrize(
    "line",
    ["embodied replay runs/x episod=1", "python -m embodied.train task=reach algo.epoch=2", "embodied bench cameras",
     "embodied collect stack sim=mujoko", "python -m embodied.deploy bundle=x schedule=rtcc", "embodied evaluate x"],
)  # fmt: skip
def test_a_mistyped_word_is_noticed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES, "page", f"```sh\n{line}\n```\n")
    with pytest.raises((pytest.fail.Exception, AssertionError, ModuleNotFoundError)):
        test_the_options_of_every_command_compose("page", tmp_path, monkeypatch)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE])
def test_every_program_runs(page: str) -> None:
    for program in blocks(page, "python"):
        exec(compile(program, page, "exec"), {})


def test_every_file_is_read_by_the_code_that_reads_it(tmp_path: Path) -> None:
    [rough] = map(yaml.safe_load, blocks("docs/environments.md", "yaml"))
    assert sim_options("pick_place", rough)[1].randomization.keys() == {"grip", "cube_mass", "stiffness"}
    (tmp_path / "kitchen.xml").write_text(*blocks("docs/environments.md", "xml"))
    pool = make_pool("lift", {"scene": str(tmp_path / "kitchen.xml")}, num_envs=1, num_threads=1)
    assert pool.model.joint("scene/drawer").range[1] == 0.15
    (tmp_path / "server.json").write_text(*blocks("docs/commands.md", "json"))
    assert read_server_mapping(tmp_path / "server.json").execute == 4
    [joint] = blocks("docs/sim_to_real.md", "json")
    from_json(Entry, json.loads(f"{{{joint}}}")["joint2"]).check("joint2")
    [entry_points] = map(tomllib.loads, blocks("docs/simulators.md", "toml"))
    groups = {registry.group for registry in (FAMILIES, *OF_OTHERS.values())}
    assert {*entry_points["project"]["entry-points"]} == groups
    (tmp_path / "my_arm.yaml").write_text(*blocks("docs/robots.md", "yaml"))
    assert read_robot(tmp_path / "my_arm.yaml").gripper.bodies == ("left_finger", "right_finger")
    assert (
        len([kind for page in PAGES for _, kind, _ in BLOCK.findall(PAGES[page]) if kind in ("yaml", "json", "toml")])
        == 5
    )
