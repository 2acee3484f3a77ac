"""Families, tasks, policies, algorithms and samplers of other distributions: installed beside ours, not in our code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodied import tasks
from embodied.algos import ALGORITHMS
from embodied.core.errors import UserError
from embodied.core.registry import Registry
from embodied.envs import FAMILIES, SAMPLERS, TASKS
from embodied.policies import POLICIES
from embodied.session.defaults import compose_new
from tests.commands.helpers import SMALL, run, run_eval, run_train

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
PARTS = """
from embodied.algos import ALGORITHMS
from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.options import config_dataclass
from embodied.envs import SAMPLERS, UniformConfig
from embodied.envs.episodes.sampler import UniformSampler
from embodied.policies import POLICIES
from embodied.policies.config import GaussianConfig
from embodied.policies.gaussian import GaussianPolicy


@config_dataclass
class DottyConfig(GaussianConfig):
    dots: int = 3


@POLICIES.register("dotty", config=DottyConfig)
class Dotty(GaussianPolicy):
    pass


@ALGORITHMS.register("dot_ppo", config=PPOConfig)
class DotPPO(PPO):
    pass


@SAMPLERS.register("dot_sampler", config=UniformConfig)
class DotSampler(UniformSampler):
    pass
"""
ENTRY_POINTS = """
[embodied.families]
dots = dots_package.family
absent = no_such_module_anywhere
silent = dots_package

[embodied.tasks]
touch = dots_package.touch

[embodied.policies]
dotty = dots_package.parts
broken = no_such_module_anywhere

[embodied.algorithms]
dot_ppo = dots_package.parts

[embodied.samplers]
dot_sampler = dots_package.parts
"""


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution, as pip lays it out, for the time of a test."""
    package, metadata = tmp_path / "dots_package", tmp_path / "dots_package-1.2.dist-info"
    package.mkdir()
    metadata.mkdir()
    for name, text in {"__init__.py": "", "family.py": FAMILY, "touch.py": TASK, "parts.py": PARTS}.items():
        (package / name).write_text(text)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dots-package\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    registered: list[tuple[Registry[Any], str]] = [
        (FAMILIES, "dots"), (TASKS, "touch"), (POLICIES, "dotty"), (ALGORITHMS, "dot_ppo"), (SAMPLERS, "dot_sampler"),
    ]  # fmt: skip
    for registry, name in registered:
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


def test_a_run_has_a_policy_an_algorithm_and_a_sampler_of_another_distribution(tmp_path: Path) -> None:
    parts = ["policy=dotty", "policy.dots=5", "algo=dot_ppo", "sampler=dot_sampler"]
    words = [word for word in SMALL if not word.startswith("policy=")]
    outcome = run_train(*words, *parts, "total_steps=64", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert run_eval(f"run={tmp_path / 'run'}", "episodes=2").code == 0


def test_a_wrong_or_broken_name_of_a_part_is_named() -> None:
    with pytest.raises(UserError, match=r"unknown policy 'doty'\. Did you mean 'dotty'"):
        compose_new({"policy": "doty"})
    with pytest.raises(UserError, match=r"unknown algo 'dot_po'\. Did you mean 'dot_ppo'"):
        compose_new({"algo": "dot_po"})
    with pytest.raises(UserError, match=r"policy 'broken', entry point no_such_module_anywhere .*cannot be imported"):
        compose_new({"policy": "broken"})
