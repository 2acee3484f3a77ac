"""The program in docs/sim_to_real.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.deployment.bundle.description import PARITY_FILE
from embodied.deployment.bundle.format import load_arrays
from tests.deployment.exports import flow_bundle


def test_the_program_of_the_page_runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (root / "docs" / "sim_to_real.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "pick_place").symlink_to(flow_bundle())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)
    state = load_arrays(flow_bundle() / PARITY_FILE)["state"][0]
    entries = [entry.name for entry in names["bundle"].state_range]
    recorded = dict(zip(entries, state.tolist(), strict=True))
    observation = {name: recorded[name] for name in names["builder"].needed if name in recorded}
    for i in range(7):
        observation |= {
            f"joint{i + 1}.pos": recorded[f"joint_pos[{i}]"],
            f"joint{i + 1}.vel": recorded[f"joint_vel[{i}]"],
        }
    observation["gripper.pos"] = recorded["fingers[0]"]
    targets, finger_m = names["joint_targets"](observation, 0.04)
    assert targets.shape == (7,)
    assert np.abs(targets - state[:7]).max() < 0.5
    assert 0.03 <= finger_m <= 0.04
