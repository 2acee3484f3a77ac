"""What runs on a robot's computer needs the standard library, numpy and ONNX Runtime alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment.exports import flow_bundle

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
MODULES = [
    "api_key",
    "bundle",
    "client",
    "controller",
    "home",
    "inference",
    "keys",
    "loop",
    "mapping",
    "observation",
    "options",
    "picture",
    "readme",
    "record",
    "report",
    "request",
    "robots.base",
    "robots.lerobot",
    "robots.sim",
    "runner",
    "safety",
    "schedule",
    "stage",
    "wire",
]


def run_blocked(code: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_without_torch(root: Path, module: str) -> None:
    done = run_blocked(f"import embodied.deployment.{module}", root)
    assert done.returncode == 0, done.stderr


def test_the_block_notices_a_heavy_import(root: Path) -> None:
    assert "is not on a robot's computer" in run_blocked("import torch", root).stderr
    assert "is not on a robot's computer" in run_blocked("import embodied.core.options", root).stderr


def test_the_command_refuses_bad_input_there(root: Path) -> None:
    done = run_blocked("import sys; from embodied.deploy import main; sys.exit(main(['bundle=/nowhere']))", root)
    assert done.returncode == 2, done.stderr
    assert "is not a directory" in done.stderr


def test_a_bundle_runs_there(root: Path) -> None:
    code = f"""
from pathlib import Path
from embodied.deployment.runner import PolicyRunner
runner = PolicyRunner(Path({str(flow_bundle())!r}))
print(runner.parity() <= 1e-5, runner.bundle.horizon)
"""
    done = run_blocked(code, root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "4"]
