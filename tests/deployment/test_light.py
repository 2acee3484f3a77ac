"""What runs on a robot's computer needs the standard library, numpy and ONNX Runtime alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embodied import convert
from embodied.data import read
from embodied.deployment.robots.mapping import write_mapping
from tests.commands.helpers import run
from tests.deployment.exports import flow_bundle
from tests.deployment.test_mapping import confirmed, reach_bundle, toy_mapping

BLOCK = """
import importlib.abc, sys
ALLOWED = set(sys.stdlib_module_names) | {"numpy", "onnxruntime", "embodied", "google", "flatbuffers", "packaging"}
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ImportError(f"{name} is not on a robot's computer")
        return None
sys.meta_path.insert(0, Block())
"""
ELSEWHERE = ("bundle.torch_policy", "bundle.write", "serving.client", "serving.server")
"""Modules of embodied.deployment that export, which needs torch, or serve, which needs websockets."""


def run_blocked(code: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], cwd=root, capture_output=True, text=True, check=False)


def test_modules_import_without_torch(root: Path) -> None:
    """Each alone, so that none of them is found only because another one was imported before."""
    room = root / "embodied" / "deployment"
    names = [".".join(path.relative_to(room).with_suffix("").parts) for path in sorted(room.rglob("*.py"))]
    light = [name.removesuffix(".__init__") for name in names if name not in (*ELSEWHERE, "__init__")]
    code = f"""
import importlib, sys
for name in {light!r}:
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("embodied.deployment")]:
        del sys.modules[loaded]
    importlib.import_module("embodied.deployment." + name)
"""
    done = run_blocked(code, root)
    assert done.returncode == 0, done.stderr
    assert len(light) > 15


def test_the_block_notices_a_heavy_import(root: Path) -> None:
    assert "is not on a robot's computer" in run_blocked("import torch", root).stderr
    assert "is not on a robot's computer" in run_blocked("import embodied.core.options", root).stderr


def test_the_command_refuses_bad_input_there(root: Path) -> None:
    done = run_blocked("import sys; from embodied.deploy import main; sys.exit(main(['bundle=/nowhere']))", root)
    assert done.returncode == 2, done.stderr
    assert "is not a directory" in done.stderr


def test_a_robot_is_driven_and_its_episodes_become_a_data_set_elsewhere(root: Path, tmp_path: Path) -> None:
    """Page and arrays there; ``convert`` reads the arrays where the libraries of data sets are."""
    folder = str(Path(__file__).parent)
    write_mapping(tmp_path / "toy.json", confirmed(toy_mapping()))
    words = [f"bundle={reach_bundle()}", "robot=toy_arm:ToyArm", f"mapping={tmp_path / 'toy.json'}", "home=false"]
    words += ["episodes=2", f"report={tmp_path / 'report'}"]
    code = f"ALLOWED.add('toy_arm'); sys.path.append({folder!r}); from embodied.deploy import main; sys.exit(main("
    done = run_blocked(f"{code}{words!r}))", root)
    assert done.returncode == 0, done.stderr
    assert "embodied.convert source=" in done.stderr
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "episodes", "interventions.jsonl", "report.html", "result.json",
    ]  # fmt: skip
    source, out = f"source={tmp_path / 'report' / 'episodes'}", tmp_path / "data"
    none_solved = run(convert.main, [source, f"bundle={reach_bundle()}", f"out={out}"])
    assert "none of its 2 episodes ends solved" in none_solved.stderr  # nobody judged them
    made = run(convert.main, [source, f"bundle={reach_bundle()}", f"out={out}", "keep_failures=true"])
    assert made.code == 0, made.stderr
    assert len(read(out).state_FS) == made.result["frames"] == 80
    for path in (tmp_path / "report" / "episodes").iterdir():  # those of two deployments in one folder
        shutil.copy(path, path.with_name(f"second_{path.name}"))
    made = run(convert.main, [source, f"bundle={reach_bundle()}", f"out={tmp_path / 'both'}", "keep_failures=true"])
    assert (made.result["episodes"], made.result["frames"]) == (4, 160)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs bundle=<bundle dir>"),
        ([f"bundle={flow_bundle()}"], "has no episodes of a report"),
    ],
)
def test_what_is_no_episodes_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    outcome = run(convert.main, [f"source={tmp_path / 'other.npz'}", f"out={tmp_path / 'data'}", *words])
    assert (outcome.code, message in outcome.stderr) == (2, True), outcome.stderr


def test_a_server_needs_two_packages_more(root: Path) -> None:
    words = [f"bundle={flow_bundle()}", "server=ws://127.0.0.1:9"]
    done = run_blocked(f"from embodied.deploy import main; sys.exit(main({words!r}))", root)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        "error: server=ws://127.0.0.1:9: websockets is not on a robot's computer; pip install"
    )


def test_serving_needs_them_too(root: Path) -> None:
    code = "import sys; from embodied.serve import main; sys.exit(main(sys.argv[1:] or "
    done = run_blocked(f"{code}[{f'bundle={flow_bundle()}'!r}]))", root)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error: embodied.serve: websockets is not on a robot's computer; pip install websockets msgpack\n"
    )
    assert run_blocked(f"{code}['--help']))", root).returncode == 0


def test_a_bundle_runs_there(root: Path) -> None:
    code = f"""
from pathlib import Path
from embodied.deployment.bundle.runner import PolicyRunner, parity
runner = PolicyRunner(Path({str(flow_bundle())!r}))
print(parity(runner, runner.path) <= 1e-5, runner.bundle.horizon)
"""
    done = run_blocked(code, root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "4"]
