"""``plugins/lerobot_robot_embodied``: LeRobot finds it by its name and drives a simulated SO-101 in its own units."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import degrees
from pathlib import Path

import pytest

from embodied.envs.mujoco.robots.described import build_robot

JOINTS = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll"]


@pytest.mark.slow(reason="LeRobot's imports, and three starts of the simulated arm")
def test_lerobot_drives_a_simulated_so101_in_its_own_keys_and_units(root: Path, tmp_path: Path) -> None:
    python = Path(sys.prefix) / "lerobot" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"LeRobot 0.4.4 is not installed in {python.parents[1]}: make {python.parents[1] / '.installed'}")
    shutil.copytree(root / "plugins" / "lerobot_robot_embodied", tmp_path / "source")
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", tmp_path / "site"]
    subprocess.run([sys.executable, "-m", *install, tmp_path / "source"], check=True)
    path = os.pathsep.join(map(str, (root, tmp_path / "site")))
    variables = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    script = Path(__file__).with_name("lerobot_plugin.py")
    done = subprocess.run([python, script], cwd=root, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    keys = [*(f"{joint}.pos" for joint in JOINTS), "gripper.pos"]
    assert sorted(seen["features"]) == sorted([*keys, "front"])
    assert (seen["features"]["front"], seen["features"]["gripper.pos"]) == ("(24, 32, 3)", "<class 'float'>")
    assert (seen["type"], seen["calibrated"], seen["connected"], seen["sent"]) == ("embodied", True, False, True)
    assert seen["image"][:4] == ["uint8", 24, 32, 3]
    assert seen["image"][4] > 5
    arm = build_robot("so101", {}).kinematics
    for joint in arm.joints:
        name = f"{joint.name}.pos"
        assert seen["first"][name] == pytest.approx(degrees(joint.home), abs=5)
        middle, half = (joint.high + joint.low) / 2, (joint.high - joint.low) / 2
        assert seen["share"][name] == pytest.approx(100 * (joint.home - middle) / half, abs=5)
    assert seen["first"]["gripper.pos"] == pytest.approx(100 * (0.6 + 0.17) / (1.745 + 0.17), abs=2)
    assert seen["moved"]["shoulder_pan.pos"] == pytest.approx(20, abs=2)
    assert seen["moved"]["gripper.pos"] == pytest.approx(40, abs=2)
    assert abs(seen["again"]["shoulder_pan.pos"]) < 5
    assert sorted(seen["both"]) == sorted(f"{side}_{key}" for side in ("left", "right") for key in keys)
    assert seen["sent_both"] == pytest.approx(seen["both"])
    assert "unknown robot 'so10'. Did you mean 'so101'" in seen["error"]
