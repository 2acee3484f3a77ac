"""What an installed wheel contains is enough to train: packages, configs and assets, without the repository."""

from __future__ import annotations

import json
import os
import re
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
        path, target = root / name, source / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, target, symlinks=True, ignore=ignored) if path.is_dir() else shutil.copy(path, target)
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", out, source], check=True)
    (wheel,) = out.glob("embodied_rl-*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_wheel_has_every_data_file(installed: Path, root: Path) -> None:
    package = installed / "embodied"
    for folder in ("configs", "assets"):
        ours = {path.relative_to(root) for path in (root / folder).rglob("*") if path.is_file()}
        assert ours == {path.relative_to(package) for path in (package / folder).rglob("*") if path.is_file()}
    assert (package / "report" / "page.html").is_file()
    assert [path.name for path in installed.iterdir() if path.suffix != ".dist-info"] == ["embodied"]


# A user's project: packages and modules that are called as folders of this repository are.
USERS = {
    "envs/__init__.py": "MINE = True",
    "envs/mine.py": """
import gymnasium

class Push(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))
    metadata = {"render_fps": 20}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action[0]), False, False, {}

gymnasium.register("Push-v0", Push, max_episode_steps=8)
""",
    "policies/__init__.py": "raise ImportError('the policies of a user')",
    "algos.py": "raise ImportError('the algorithms of a user')",
}
HELP = """
import contextlib, io, runpy, sys
import embodied
for command in sys.argv[1].split(","):
    sys.argv[1:] = ["--help"]
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        runpy.run_module(f"embodied.{command}", run_name="__main__", alter_sys=True)
    assert command in page.getvalue(), command
import envs
assert envs.MINE
print(embodied.__path__[0])
"""


@pytest.mark.slow(reason="it loads every command, and trains, from the editable install and from the wheel")
@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_folders_of_a_user_do_not_matter(
    installed: Path, root: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in USERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if kind == "wheel":
        monkeypatch.setenv("PYTHONPATH", str(installed))

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    texts = {path.stem: path.read_text() for path in (root / "embodied").glob("[!_]*.py")}
    commands = [name for name, text in texts.items() if re.search(r"^(main = |def main\()", text, re.M)]
    assert {"train", "eval", "export", "deploy"} < set(commands)
    commands.append("report")
    used = {"editable": root, "wheel": installed}[kind]
    assert run("-c", HELP, ",".join(commands)) == str(used / "embodied"), "this environment has another installation"
    run("-m", "embodied.train", "task=gym/envs.mine:Push-v0", "policy=gaussian", *TINY)
    assert json.loads(run("-m", "embodied.eval", "run=run", "episodes=2"))["episodes"] == 2


def test_wheel_trains(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "embodied.train", "task=reach", "policy=gaussian", *TINY]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] >= 256
    assert (tmp_path / "run" / "checkpoints" / "last").exists()
    assert "uPlot=function" in (tmp_path / "run" / "page.html").read_text("utf-8")
