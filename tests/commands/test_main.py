"""``embodied <command>``: the commands at hand."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from embodied.__main__ import COMMANDS, main
from embodied.core.config import parse_overrides
from embodied.session.command import with_first_key

ROOT = Path(__file__).resolve().parents[2]


def test_every_command_is_listed_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    modules = {path.stem for path in (ROOT / "embodied").glob("*.py")} - {"__init__", "__main__"}
    assert modules | {"report"} == set(COMMANDS)
    for command in COMMANDS:
        assert any(line.split()[:1] == [command] and len(line.split()) > 2 for line in listed.splitlines()), command


def test_the_console_script_is_this_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"embodied": "embodied.__main__:main"}


def test_a_command_gets_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "reach", "--config"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["task"]["name"] == "reach"


def test_help_costs_no_imports(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from embodied.__main__ import main; main(['collect', '--help']); print('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    out = capfd.readouterr().out
    assert out.startswith("Record a scripted expert")
    assert out.endswith("False\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["eval", "nowhere"], "'nowhere' is not a directory"),
        (["status", "nowhere"], "nowhere"),
        (["report", "nowhere"], "'nowhere' is not a directory"),
        (["deploy", "nowhere", "robot=sim"], "nowhere"),
        (["train", "reech"], "unknown task 'reech'. Did you mean 'reach'?"),
        (["eval", "nowhere", "anything"], "'anything' is not key=value"),
    ],
)
def test_what_is_mistyped_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_only_the_first_word_may_lack_its_key() -> None:
    assert parse_overrides(with_first_key(["runs/a", "seed=1"], "run")) == {"run": "runs/a", "seed": 1}
    assert parse_overrides(with_first_key(["run=runs/a"], "run")) == {"run": "runs/a"}
