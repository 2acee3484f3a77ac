"""A simulation that diverges: it alone ends and starts anew, what it was is in a file, and the others do not notice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.envs.mujoco.pool import MujocoPool
from tests.envs.helpers import TASK_NAMES, actions, assert_same, pool, restart

N, BROKEN = 4, 2


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine logs its warnings to MUJOCO_LOG.TXT in the working directory."""
    monkeypatch.chdir(tmp_path)


def _pool(task: str, dump_dir: Path, num_envs: int = N) -> MujocoPool:
    return pool(task, num_envs, sim={"dump_dir": str(dump_dir)})


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("field", ["qvel", "qpos"])
def test_only_the_broken_env_ends(tmp_path: Path, field: str, value: float) -> None:
    env, sound = _pool("lift", tmp_path / "dumps"), _pool("lift", tmp_path / "none")
    plan = actions(list(range(N)), 12, 4)
    for t in range(4):
        env.step(plan[:, t])
        sound.step(plan[:, t])
    env.batch.bind(field)[BROKEN, 3] = value
    injected = env.batch.state[BROKEN].copy()
    step, expected = env.step(plan[:, 4:8]), sound.step(plan[:, 4:8])

    others = torch.tensor([i for i in range(N) if i != BROKEN])
    assert_same(step, expected, others, others)
    assert step.truncated_N.tolist() == [i == BROKEN for i in range(N)]
    assert not step.terminated_N.any()
    assert step.final_ids.tolist() == [BROKEN]
    assert step.num_steps_N.tolist() == [0 if i == BROKEN else 4 for i in range(N)]
    assert (step.reward_NE[BROKEN] == 0).all()
    assert step.episodes.env_id_M.tolist() == [BROKEN]
    for tensor in (*step.obs.values(), *step.final_obs.values(), step.reward_NE):
        assert torch.isfinite(tensor).all()

    (path,) = (tmp_path / "dumps").glob("nan_*.npz")
    with np.load(path) as dump:
        assert dump["ids"].tolist() == [BROKEN]
        np.testing.assert_array_equal(dump["state_before"][0], injected)
        assert dump["state"].shape == dump["state_before"].shape
    assert not (tmp_path / "none").exists()

    fresh = pool("lift", 1, seed=BROKEN)
    torch.testing.assert_close(step.obs["state"][BROKEN], restart(fresh)["state"][0], rtol=0, atol=0)
    for t in range(8, 12):  # the new episode is as sound as any
        after, expected = env.step(plan[:, t]), sound.step(plan[:, t])
        assert_same(after, expected, others, others)
        alone = fresh.step(plan[BROKEN : BROKEN + 1, t])
        assert_same(after, alone, torch.tensor([BROKEN]))
    assert len(list((tmp_path / "dumps").iterdir())) == 1


@pytest.mark.parametrize(("degree", "speed"), [(9, 5e3), (9, -5e3), (12, 1e6)])
def test_a_huge_velocity_is_a_divergence_before_the_engine_warns(tmp_path: Path, degree: int, speed: float) -> None:
    """Of the cube: 9 is along x, m/s, and 12 about x, rad/s."""
    env = _pool("lift", tmp_path / "dumps")
    env.batch.bind("qvel")[BROKEN, degree] = speed
    step = env.step(torch.zeros(N, 1, 4))
    assert step.truncated_N.tolist() == [i == BROKEN for i in range(N)]
    assert step.num_steps_N.tolist() == [0 if i == BROKEN else 1 for i in range(N)]
    assert (env.batch.warning[..., 1] == 0).all()
    (path,) = (tmp_path / "dumps").glob("nan_*.npz")
    with np.load(path) as dump:
        assert dump["ids"].tolist() == [BROKEN]
        assert np.isfinite(dump["state"]).all()


def test_a_cube_that_is_hit_or_dropped_is_no_divergence(tmp_path: Path) -> None:
    env = _pool("lift", tmp_path / "dumps")
    env.batch.bind("qvel")[BROKEN, [9, 12]] = 20.0, 300.0
    assert not env.step(torch.zeros(N, 1, 4)).truncated_N.any()


@pytest.mark.parametrize("task", TASK_NAMES)
def test_breaking_is_no_success(task: str, tmp_path: Path) -> None:
    env = _pool(task, tmp_path / "dumps")
    env.batch.bind("qvel")[:] = np.nan
    step = env.step(torch.zeros(N, 3, 4))
    assert step.truncated_N.all()
    assert not step.episodes.once["success"].any()
    assert not step.episodes.success_at_end_M.any()
    assert all(torch.isfinite(value).all() for value in (*step.obs.values(), *step.final_obs.values()))


def test_dumps_are_limited_and_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = _pool("reach", tmp_path / "dumps", num_envs=1)
    env.guard.dumps = 98
    for _ in range(4):
        env.batch.bind("qvel")[:] = np.nan
        assert env.step(torch.zeros(1, 4)).truncated_N.all()
    assert len(list((tmp_path / "dumps").iterdir())) == 2

    (tmp_path / "file").write_text("not a folder")
    env = _pool("reach", tmp_path / "file" / "dumps", num_envs=1)
    env.batch.bind("qvel")[:] = np.nan
    assert env.step(torch.zeros(1, 4)).truncated_N.all()
    assert "no dump" in caplog.text


def test_a_hard_drive_stays_finite() -> None:
    """Full actions in random directions, arm into the table and into cubes, for eight seconds of robot time."""
    env = pool("stack", 16, stagger=True)
    plan = actions(list(range(16)), 160, 4).sign()
    for t in range(0, 160, 4):
        step = env.step(plan[:, t : t + 4])
        assert all(torch.isfinite(value).all() for value in step.obs.values())
    assert env.guard.dumps == 0
    assert (env.batch.warning[..., 1] == 0).all(), "the engine warned, for instance of a full contact buffer"
