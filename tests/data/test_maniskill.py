"""ManiSkill's HDF5 trajectories: converted, read back, and refused with what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from embodied import convert
from embodied.core.errors import UserError
from embodied.data import read
from embodied.data.maniskill import read_trajectories
from tests.commands.helpers import run

LENGTHS = (5, 7, 4)
SOLVED = (True, False, True)
INFO: dict[str, Any] = {
    "env_info": {"env_id": "PickCube-v1", "env_kwargs": {"control_mode": "pd_ee_delta_pose", "obs_mode": "state"}}
}


def record(path: Path, nested: bool = False, change: Callable[[h5py.File], None] | None = None) -> Path:
    """A file as ManiSkill's RecordEpisode writes it, of 3 episodes with 6 state entries and 4 actions."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for i, (length, solved) in enumerate(zip(LENGTHS, SOLVED, strict=True)):
            group = file.create_group(f"traj_{i}")
            state = random.normal(size=(length + 1, 6)).astype(np.float32)
            if nested:
                group["obs/agent/qpos"], group["obs/extra/tcp_pose"] = state[:, :4], state[:, 4:]
                group["obs/sensor_data/base_camera/rgb"] = np.zeros((length + 1, 8, 8, 3), np.uint8)
            else:
                group["obs"] = state
            group["actions"] = random.uniform(-1, 1, size=(length, 4)).astype(np.float32)
            group["success"] = np.arange(length) == (length - 1 if solved else -1)
            group["terminated"] = group["truncated"] = np.zeros(length, bool)
        if change is not None:
            change(file)
    path.with_suffix(".json").write_text(json.dumps(INFO))
    return path


@pytest.mark.parametrize("nested", [False, True])
def test_converted_data_reads_as_what_was_recorded(nested: bool, tmp_path: Path) -> None:
    source = record(tmp_path / "trajectory.h5", nested)
    outcome = run(convert.main, [f"source={source}", f"out={tmp_path / 'set'}"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.result == {
        "data": str(tmp_path / "set"), "task": "PickCube-v1", "episodes": 2, "frames": 9, "dropped": 1,
    }  # fmt: skip
    data = read(tmp_path / "set")
    assert (data.control_hz, data.episode_F.tolist()) == (20.0, [0] * 5 + [1] * 4)
    with h5py.File(source) as file:
        for i, rows in ((0, slice(0, 5)), (2, slice(5, 9))):
            torch.testing.assert_close(data.action_FA[rows], torch.from_numpy(file[f"traj_{i}/actions"][:]))
            obs = file[f"traj_{i}/obs"]
            whole = np.concatenate([obs["agent/qpos"], obs["extra/tcp_pose"]], 1) if nested else obs[:]
            torch.testing.assert_close(data.state_FS[rows], torch.from_numpy(whole[:-1]))
    assert data.state_names[4] == ("extra/tcp_pose[0]" if nested else "state[4]")
    assert data.action_names[0] == "pd_ee_delta_pose[0]"


def test_failures_are_kept_when_asked_for(tmp_path: Path) -> None:
    source = record(tmp_path / "trajectory.h5")
    outcome = run(convert.main, [f"source={source}", f"out={tmp_path / 'set'}", "keep_failures=true"])
    assert (outcome.result["episodes"], outcome.result["dropped"]) == (3, 0)


@pytest.mark.parametrize("robot_uids", [None, "panda", "so100"])
def test_no_robot_is_made_up(tmp_path: Path, robot_uids: str | None) -> None:
    """A converted data set claims no robot: ManiSkill's names are not those of the robots here."""
    source = record(tmp_path / "trajectory.h5")
    kwargs = INFO["env_info"]["env_kwargs"] | ({"robot_uids": robot_uids} if robot_uids else {})
    source.with_suffix(".json").write_text(json.dumps({"env_info": {"env_id": "PickCube-v1", "env_kwargs": kwargs}}))
    assert run(convert.main, [f"source={source}", f"out={tmp_path / 'set'}"]).code == 0
    assert json.loads((tmp_path / "set" / "meta" / "info.json").read_text())["robot_type"] is None


def delete(name: str) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]

    return change


def put(name: str, value: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = value

    return change


def declare(name: str, shape: tuple[int, ...]) -> Callable[[h5py.File], None]:
    """An array of that shape, of which nothing is stored."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, shape, np.float32, chunks=(1024, 6))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (delete("traj_1/obs"), "traj_1 lacks obs; replay with obs_mode=state"),
        (delete("traj_0/actions"), "traj_0 lacks actions"),
        (put("traj_0/obs", np.zeros((5, 6))), "obs/state has 5 rows, needed is 6, one more than actions"),
        (put("traj_0/actions", np.full((5, 4), np.nan)), "traj_0: actions is not finite"),
        (put("traj_0/actions", np.zeros((5, 3))), "trajectories differ in the sizes of state and action"),
        (put("traj_0/actions", np.zeros(5)), r"actions have shape \(5,\), needed: \[T, A\]"),
        (put("traj_0/actions", np.zeros((0, 4))), "with a control step or more"),
        (put("traj_0/actions", [[b"a"] * 4] * 5), "traj_0: actions is not an array of numbers"),
        (put("traj_0/success", np.ones(6)), r"success \(6,\) and rewards \(5,\) must have 5 numbers each"),
        (declare("traj_0/obs", (2**40, 6)), "traj_0: state has 6,597,069,766,656 numbers, allowed: at most"),
    ],
)
def test_what_does_not_fit_is_said(change: Callable[[h5py.File], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_trajectories(record(tmp_path / "trajectory.h5", change=change))


@pytest.mark.parametrize(
    "kwargs", [[1], {"sim_config": {"control_freq": 0}}, {"sim_config": {"control_freq": "fast"}}], ids=str
)
def test_a_damaged_description_is_one_line(kwargs: Any, tmp_path: Path) -> None:
    source = record(tmp_path / "trajectory.h5")
    source.with_suffix(".json").write_text(json.dumps({"env_info": {"env_kwargs": kwargs}}))
    with pytest.raises(UserError, match="is not the description of ManiSkill trajectories"):
        read_trajectories(source)


def test_bad_files_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = record(tmp_path / "trajectory.h5")
    (tmp_path / "empty.h5").write_bytes(b"")
    (tmp_path / "empty.json").write_text(json.dumps(INFO))
    (tmp_path / "alone.h5").write_bytes(source.read_bytes())
    (tmp_path / "there").mkdir()
    cases = [
        ([f"source={tmp_path / 'empty.h5'}"], "cannot read"),
        ([f"source={tmp_path / 'alone.h5'}"], "ManiSkill writes alone.json beside the .h5 file"),
        ([f"source={source}", f"out={tmp_path / 'there'}"], "exists; give a new directory"),
        ([], "source"),
    ]
    for words, message in cases:
        outcome = run(convert.main, [f"out={tmp_path / 'set'}", *words])
        assert (outcome.code, outcome.stdout) == (2, ""), words
        assert message in outcome.stderr
    assert not (tmp_path / "set").exists()
