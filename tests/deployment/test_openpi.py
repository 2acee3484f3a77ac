"""The unchanged openpi-client gets actions from our server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.deployment.bundle.description import PARITY_FILE
from embodied.deployment.bundle.runner import PolicyRunner
from tests.deployment.exports import flow_bundle
from tests.deployment.servers import serving


def test_the_real_client_gets_actions(root: Path) -> None:
    environment = Path(sys.prefix) / "lerobot"
    if not (environment / ".installed").exists():
        pytest.skip(
            f"openpi-client is not installed in {environment}: make VENV={sys.prefix} {environment / '.installed'}"
        )
    script = [environment / "bin" / "python", Path(__file__).with_name("openpi_robot.py")]
    with serving(PolicyRunner(flow_bundle())) as (_, port):
        done = subprocess.run(
            [*script, str(port), flow_bundle() / PARITY_FILE],
            cwd=root, capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"no_proxy": "*"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["difference"] < 1e-6
    assert "state: got float32 [3], needed numbers [40]" in result["error"]
    assert result["timing"] == ["batch", "infer_ms", "prev_total_ms"]
    assert result["task"] == "task"
