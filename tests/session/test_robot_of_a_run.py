"""A run belongs to the robot that it was made with: its demonstrations, evaluation, resume, refusal of another."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
import yaml

from embodied import collect, train
from embodied import eval as evaluate
from embodied.envs.mujoco.robot_file import FOLDER

SMALL = (
    "policy=gaussian", "num_envs=8", "runtime=sync", "runtime.decisions=4", "total_steps=64", "eval_episodes=0",
    "algo.num_minibatches=1", "algo.epochs=1",
)  # fmt: skip


def test_the_so101_has_gymnasium_ids_with_its_own_time_limits_and_sizes() -> None:
    env = gymnasium.make("embodied/SO101Lift-v0")
    assert env.action_space.shape == (5,)
    env.reset(seed=0)
    pool = gymnasium.make_vec("embodied/SO101PickPlace-v0", num_envs=2)
    observations, _ = pool.reset(seed=0)
    assert observations.shape[0] == 2
    for opened in (env, pool):
        opened.close()


def test_demonstrations_of_a_robot_are_imitated(tmp_path: Path) -> None:
    assert collect.main(["task=lift", "task.robot=so101", "episodes=2", f"out={tmp_path}/demos", "num_threads=1"]) == 0
    words = ["algo=sft", f"data={tmp_path}/demos", "algo.updates=2", "algo.batch_size=4", "eval_episodes=0"]
    run = f"out={tmp_path}/run"
    assert train.main(["task=lift", "task.robot=so101", "policy=gaussian", "runtime=sync", *words, run]) == 0


def test_a_run_goes_on_with_its_robot_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = yaml.safe_load((FOLDER / "so101.yaml").read_text())
    robot, mjcf = tmp_path / "mine.yaml", tmp_path / "mine.xml"
    mjcf.write_text((FOLDER / data["mjcf"]).read_text())
    robot.write_text(yaml.safe_dump(data | {"mjcf": "mine.xml"}))
    run = tmp_path / "run"
    assert train.main(["task=lift", f"task.robot={robot}", *SMALL, f"out={run}"]) == 0
    robot.write_text("# a comment changes nothing\n" + robot.read_text())
    assert evaluate.main([f"run={run}", "episodes=2"]) == 0
    capsys.readouterr()
    mjcf.write_text(mjcf.read_text().replace('armature="0.028"', 'armature="0.03"'))
    for command, words in ((evaluate, [f"run={run}", "episodes=2"]), (train, [f"resume={run}", "total_steps=128"])):
        assert command.main(words) == 2
        error = capsys.readouterr().err
        assert f"robot {robot}: its files are not those that the run was made with" in error
    robot.unlink()
    assert evaluate.main([f"run={run}", "episodes=2"]) == 2
    assert "mine.yaml: there is none" in capsys.readouterr().err
