"""Families and tasks of other distributions: installed beside ours, without a change of our code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embodied import tasks
from embodied.core.errors import UserError
from embodied.envs import FAMILIES, TASKS
from tests.commands.helpers import run

FAMILY = '''
from dataclasses import replace
from embodied.core.options import config_dataclass
from embodied.envs.registry import FAMILIES
from tests.runtime.point_env import PointEnv, point_spec


@config_dataclass
class NoOptions:
    """None."""


class Points(PointEnv):
    def __init__(self, num_envs, spec):
        super().__init__(num_envs, spec=spec)


@FAMILIES.register("dots", config=NoOptions)
class Dots:
    def ids(self):
        return ["point"]

    def task_config(self, id):
        return NoOptions

    def spec(self, id, task, cameras=()):
        return replace(point_spec(7), task="dots/point")

    def make(self, id, task, *, num_envs, num_threads, sim, cameras=()):
        return Points(num_envs, self.spec(id, task))
'''
TASK = """
from embodied.envs.registry import TASKS
from embodied.envs.tasks.reach import Reach, ReachConfig


@TASKS.register("touch", config=ReachConfig)
class Touch(Reach):
    name = "touch"
"""
ENTRY_POINTS = """
[embodied.families]
dots = dots_package.family
absent = no_such_module_anywhere
silent = dots_package

[embodied.tasks]
touch = dots_package.touch
"""


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution, as pip lays it out, for the time of a test."""
    package, metadata = tmp_path / "dots_package", tmp_path / "dots_package-1.2.dist-info"
    package.mkdir()
    metadata.mkdir()
    for name, text in {"__init__.py": "", "family.py": FAMILY, "touch.py": TASK}.items():
        (package / name).write_text(text)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dots-package\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    for registry, name in ((FAMILIES, "dots"), (TASKS, "touch")):
        registry._entries.pop(name, None)
    for name in [name for name in sys.modules if name.startswith("dots_package")]:
        del sys.modules[name]


def test_they_are_listed_and_a_broken_one_is_named() -> None:
    assert {"dots", "absent", "silent"} <= set(FAMILIES.names())
    outcome = run(tasks.main, [])
    assert outcome.code == 0, outcome.stderr
    assert {"touch", "dots/point", "reach"} <= {task["task"] for task in outcome.result["tasks"]}
    assert "gym" in outcome.result["families"]
    assert {"absent", "silent"} <= {*outcome.result["broken"]}
    assert not {"gym", "dots", "touch", "reach"} & {*outcome.result["broken"]}
    assert "entry point no_such_module_anywhere of dots-package 1.2: cannot be imported" in outcome.stderr
    assert "importing it registered no family of environments 'silent'" in outcome.stderr


def test_a_family_is_found_when_it_is_named() -> None:
    outcome = run(tasks.main, ["check=dots/point", "resets=60", "num_envs=3"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["passed"]
    assert outcome.result["checks"]["exact_resume"] == {"passed": True, "why": ""}
    with pytest.raises(UserError, match=r"'absent', entry point no_such_module_anywhere .*No module named"):
        FAMILIES["absent"]
    with pytest.raises(UserError, match=r"unknown family of environments 'dot'. Did you mean 'dots'"):
        FAMILIES["dot"]


def test_a_task_of_our_pool_needs_no_file() -> None:
    outcome = run(tasks.main, ["check=touch", "resets=40", "num_envs=2", "steps=6"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["task"] == "touch"
