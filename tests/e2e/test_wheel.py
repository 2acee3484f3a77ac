"""What an installed wheel contains is enough to train: packages, configs and assets, without the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BUILT_FROM = ("embodied", "envs", "policies", "algos", "configs", "assets", "pyproject.toml", "README.md", "LICENSE")
TINY = ("num_envs=8", "total_steps=256", "eval_episodes=2", "runtime=sync", "out=run")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A folder with the content of the wheel, as pip would install it."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        path = root / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, source / name, symlinks=True, ignore=ignored) if path.is_dir() else shutil.copy(path, source)
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", out, source], check=True)
    (wheel,) = out.glob("embodied_rl-*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_wheel_has_every_data_file(installed: Path, root: Path) -> None:
    for folder, suffix in (("configs", ".yaml"), ("assets", ".xml")):
        ours = {path.relative_to(root) for path in (root / folder).rglob(f"*{suffix}")}
        assert ours == {path.relative_to(installed) for path in (installed / folder).rglob(f"*{suffix}")}


def test_wheel_trains(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "embodied.train", "task=reach", "policy=gaussian", *TINY]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] >= 256
    assert (tmp_path / "run" / "checkpoints" / "last").exists()
