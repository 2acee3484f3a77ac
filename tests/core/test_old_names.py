"""The names before there was one root are answered by the same modules, where a user has nothing of that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embodied.core.episodes import EpisodeStats
from embodied.core.spec import EnvSpec
from embodied.envs.episodes.sampler import SamplerSetup, UniformSampler


def run(code: str, folder: Path, root: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys\nsys.path.insert(1, {str(root)!r})\nimport embodied\nsys.path.remove({str(root)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_old_names_are_the_same_modules_and_warn(root: Path, tmp_path: Path) -> None:
    code = """
import algos.losses, policies.flow.step
from algos.registry import ALGORITHMS
import embodied.algos.losses, embodied.algos.registry, embodied.policies.flow.step
assert algos.losses is embodied.algos.losses and policies.flow.step is embodied.policies.flow.step
assert ALGORITHMS is embodied.algos.registry.ALGORITHMS
assert embodied.algos.__spec__.name == "embodied.algos"
try:
    import algos.nothing
except ModuleNotFoundError as error:
    assert error.name == "algos.nothing"
"""
    done = run(code, tmp_path, root)
    assert done.returncode == 0, done.stderr
    assert "'algos' is called 'embodied.algos' now" in done.stderr
    assert done.stderr.count("FutureWarning") == 2


def test_modules_that_moved_are_the_same_and_warn(root: Path, tmp_path: Path) -> None:
    """Their old names were in the documents: foreign robots, simulators and samplers import them."""
    code = """
import importlib, sys
from embodied.core.old_names import MOVED
for old, new in MOVED.items():
    assert importlib.import_module(old) is importlib.import_module(new), old
from embodied.envs.common.seeding import EpisodeRng
from embodied.envs.episodes.seeding import EpisodeRng as Present
assert EpisodeRng is Present
"""
    done = run(code, tmp_path, root)
    assert done.returncode == 0, done.stderr
    assert "'embodied.deployment.runner' is called 'embodied.deployment.bundle.runner' now" in done.stderr


def test_types_of_options_that_were_renamed_are_the_same_and_warn(root: Path, tmp_path: Path) -> None:
    code = """
from embodied.core import options
from embodied.core.options import Count, ShareBelow1
assert Count is options.PositiveInt and ShareBelow1 is options.FractionBelow1
"""
    done = run(code, tmp_path, root)
    assert done.returncode == 0, done.stderr
    assert "'embodied.core.options.Count' is called 'PositiveInt' now" in done.stderr


def test_a_curriculum_that_hears_still_learns_how_episodes_end() -> None:
    class Listener(UniformSampler):
        def hear(self, ended: EpisodeStats) -> None:
            self.num_ended = len(ended)

    sampler = Listener(EnvSpec.of_sizes("any", state=1, action=1), None, SamplerSetup(num_envs=2))
    ended = EpisodeStats(torch.tensor([1]), torch.zeros(1), torch.zeros(1), sampler.start().rows(slice(1)), {}, {})
    with pytest.warns(FutureWarning, match="Listener.hear is called 'on_episodes_end' now"):
        sampler.next(ended, torch.zeros(2))
    assert sampler.num_ended == 1


def test_packages_of_a_user_come_first(root: Path, tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    for name in ("envs/__init__.py", "envs/mine.py", "policies.py"):
        (tmp_path / name).write_text("mine = True")
    done = run("import envs.mine, policies\nassert envs.mine.mine and policies.mine", tmp_path, root)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
