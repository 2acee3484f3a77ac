"""The check of a robot says what it measured, and what to change where a robot cannot do the task."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from embodied import tasks
from embodied.core.errors import UserError
from embodied.envs import make_pool
from embodied.envs.checks.robot import check_robot
from embodied.envs.mujoco.robot_file import FOLDER
from embodied.envs.mujoco.robots.described import build_robot
from embodied.envs.mujoco.robots.panda import Panda
from tests.commands.helpers import run

GRIPPER = {
    "actuators": ["left_finger", "right_finger"], "open": 0.04, "closed": -0.005,
    "bodies": ["left_finger", "right_finger"],
}  # fmt: skip


def sliding(folder: Path, changes: dict[str, object]) -> Path:
    """Write the file of an arm whose fingers slide: the Panda."""
    home = [0, np.pi / 8, 0, -5 * np.pi / 8, 0, 3 * np.pi / 4, np.pi / 4]
    data = {
        "mjcf": str(Panda.mjcf), "tool": {"site": "tcp"}, "gripper": GRIPPER,
        "home": {f"joint{i + 1}": float(at) for i, at in enumerate(home)},
    }  # fmt: skip
    path = folder / "arm.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


def findings(robot: str, task: str = "lift") -> dict[str, tuple[bool, str]]:
    pool = make_pool(task, {"robot": robot}, num_envs=32, num_threads=1)
    return {result.name: (result.passed, result.why) for result in check_robot(pool)}


def test_a_robot_that_can_do_the_task_passes_with_what_was_measured() -> None:
    found = findings("so101")
    assert list(found) == ["ik", "fingers", "start", "gap", "still", "hold", "expert"]
    assert all(passed for passed, _ in found.values()), found
    assert "-11 to 49 mm, the object 24 mm wide" in found["gap"][1]


@pytest.mark.parametrize(
    ("change", "check", "why"),
    [
        ({"control": {"from_target": False}}, "still", r"move the tool by \d\d+\.\d mm.*weightless: true.*armature"),
        (
            {"tool": {"pos_m": [0.0115, -0.000218, -0.0781]}},
            "fingers",
            "27 mm beyond the tool, .* 12 mm high: move tool",
        ),
    ],
)
def test_what_a_robot_cannot_do_is_explained(
    tmp_path: Path, change: dict[str, dict[str, object]], check: str, why: str
) -> None:
    data = yaml.safe_load((FOLDER / "so101.yaml").read_text())
    for key, values in change.items():
        data[key] |= values
    data["mjcf"] = str((FOLDER / data["mjcf"]).resolve())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    passed, text = findings(str(tmp_path / "mine.yaml"), "reach")[check]
    assert not passed
    assert re.search(why, text), text


@pytest.mark.parametrize(("closed", "above"), [(-0.0005, False), (0.0, True)])
def test_sliding_fingers_that_close_beyond_where_they_meet_squeeze_from_there(
    tmp_path: Path, closed: float, above: bool
) -> None:
    robot = build_robot(str(sliding(tmp_path, {"gripper": GRIPPER | {"closed": closed}})), {})
    assert (robot.finger_touch_m > 0) == above


@pytest.mark.parametrize("closed", [0.0, 0.002])
def test_sliding_fingers_that_close_until_they_meet_or_just_before_lift(tmp_path: Path, closed: float) -> None:
    assert findings(str(sliding(tmp_path, {"gripper": GRIPPER | {"closed": closed}})))["expert"][0]


def test_a_home_at_the_edge_of_the_workspace_is_named(tmp_path: Path) -> None:
    passed, why = findings(str(sliding(tmp_path, {"base_m": [0, 0, 0.318], "reach_m": 0.6})), "reach")["still"]
    assert not passed
    assert re.search(r"episodes begin with the tool up to \d\d mm outside of the workspace: .*spread", why), why


def test_a_gripper_in_mm_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"gripper.open: got 40, at which the fingers are 1 m apart or more: is it in mm"
    ):
        findings(str(sliding(tmp_path, {"gripper": GRIPPER | {"open": 40}})))


def test_what_a_light_wrist_needs_is_said(tmp_path: Path) -> None:
    text = Panda.mjcf.read_text().replace('kp="100" kv="10"', 'kp="1000" kv="0"').replace('armature="0.1"', "")
    (tmp_path / "light.xml").write_text(text)
    found = findings(str(sliding(tmp_path, {"mjcf": "light.xml"})))
    for check in ("still", "expert"):
        assert not found[check][0]
        assert re.search("servos.*armature.*damping", found[check][1]), found[check][1]


LAZY = """
from embodied.envs.tasks.reach import Reach

class Lazy(Reach):
    def expert(self):
        return 0 * super().expert()
"""


def test_an_expert_that_fails_is_found_without_a_robot_being_named(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(LAZY)
    outcome = run(tasks.main, [f"check={tmp_path / 'lazy.py'}:Lazy", "resets=2", "steps=2", "num_envs=1"])
    assert outcome.code == 2
    why = outcome.result["checks"]["expert"]["why"]
    assert re.fullmatch(r"the scripted expert solves \d.* needed: 95%: see the picture \(picture=<file>.png\)", why)
    assert outcome.stderr.endswith("expert failed\n")
    (tmp_path / "broken.py").write_text(LAZY.replace("0 *", "nil *"))
    words = [
        f"check={tmp_path / 'broken.py'}:Lazy",
        "resets=2",
        "steps=2",
        "num_envs=1",
        f"picture={tmp_path / 'x.png'}",
    ]
    assert "NameError in broken.py, line 6" in run(tasks.main, words).result["checks"]["expert"]["why"]
