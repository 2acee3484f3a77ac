"""A run belongs to the robot that it was made with: its demonstrations, evaluation, resume, refusal of another."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import pytest
import yaml

from embodied import collect, deploy, export, preflight, tasks, train
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


def written(folder: Path) -> tuple[Path, Path]:
    """Write the files of an SO-101 of the user's: YAML and MJCF."""
    data = yaml.safe_load((FOLDER / "so101.yaml").read_text())
    folder.mkdir(exist_ok=True)
    robot, mjcf = folder / "mine.yaml", folder / "mine.xml"
    mjcf.write_text((FOLDER / data["mjcf"]).read_text())
    robot.write_text(yaml.safe_dump(data | {"mjcf": "mine.xml"}))
    return robot, mjcf


def test_demonstrations_name_the_files_of_their_robots_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot, _ = written(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [f"task.robots.{side}={robot.name}" for side in ("left", "right")]
    assert collect.main(["task=lift_bar", *words, "episodes=2", "noise=0", "out=demos", "num_threads=1"]) == 0
    recorded = json.loads(Path("demos/meta/recorded_with.json").read_text())
    assert recorded["task.robots.left"] == recorded["task.robots.right"] == str(robot)


def test_a_run_goes_on_with_its_robot_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (robot, mjcf), run = written(tmp_path), tmp_path / "run"
    assert train.main(["task=lift", f"task.robot={robot}", *SMALL, f"out={run}"]) == 0
    robot.write_text("# a comment changes nothing\n" + robot.read_text())
    assert evaluate.main([f"run={run}", "episodes=2"]) == 0
    capsys.readouterr()
    mjcf.write_text(mjcf.read_text().replace('armature="0.028"', 'armature="0.03"'))
    for command, words in ((evaluate, [f"run={run}", "episodes=2"]), (train, [f"resume={run}", "total_steps=128"])):
        assert command.main(words) == 2
        error = capsys.readouterr().err
        assert f"robot {robot}: its files are not those that the run was made with: undo the change" in error
        assert "robot_file=<path>" in error


def test_export_and_init_name_the_robot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robot, _ = written(tmp_path)
    robot.write_text(yaml.safe_dump({**yaml.safe_load(robot.read_text()), "max_velocity": {}}))
    run = tmp_path / "run"
    assert train.main(["task=lift", f"task.robot={robot}", *SMALL, f"out={run}"]) == 0
    capsys.readouterr()
    assert export.main([f"run={run}", f"out={tmp_path}/bundle"]) == 2
    assert f"embodied.tasks check=lift task.robot={robot} says what it lacks" in capsys.readouterr().err
    assert train.main(["task=lift", *SMALL, f"init={run}", f"out={tmp_path}/other"]) == 2
    error = capsys.readouterr().err
    assert f"init={run} is a run of robot {robot}, this one is of panda: state 'joint_pos' was 5 numbers, is 7" in error


@pytest.mark.slow(reason="fifteen commands: two trainings, two exports, three deployments")
def test_the_files_of_a_run_its_bundle_and_its_data_may_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    robot, _ = written(tmp_path / "old")
    scene = tmp_path / "old" / "scene.xml"
    scene.write_text("<mujoco><worldbody><geom type='box' size='.1 .1 .1' pos='2 0 .1'/></worldbody></mujoco>")
    monkeypatch.chdir(tmp_path / "old")
    words = ["task=lift", "task.robot=mine.yaml", "task.scene=scene.xml"]
    assert train.main([*words, *SMALL, "out=../run"]) == 0
    assert collect.main([*words, "episodes=1", "noise=0", "out=../demos", "num_threads=1"]) == 0
    monkeypatch.chdir(tmp_path)
    assert export.main(["run=run", "out=bundle"]) == 0
    (tmp_path / "old").rename(tmp_path / "new")
    commands = (
        (evaluate, ["run=run", "episodes=2"]), (export, ["run=run", "out=again"]), (preflight, ["data=demos"]),
        (deploy, ["bundle=bundle", "robot=sim", "lockstep=true", "home=false"]),
        (train, ["resume=run", "total_steps=128"]),  # which writes the new places into config.yaml
    )  # fmt: skip
    for command, argv in commands:
        capsys.readouterr()
        assert command.main(argv) == 2
        error = capsys.readouterr().err
        assert f"the file of its robot, {robot}, is missing: say where it is now: robot_file=<path>" in error
        assert command.main([*argv, "robot_file=new/mine.yaml"]) == 2
        assert f"the file of its scene, {scene}, is missing" in capsys.readouterr().err
        assert command.main([*argv, "robot_file=new/mine.yaml", "scene_file=new/scene.xml"]) in (0, 1), command
        assert "error: " not in capsys.readouterr().err, command
    assert evaluate.main(["run=run", "episodes=2"]) == 0
    mjcf = tmp_path / "new" / "mine.xml"
    mjcf.write_text(mjcf.read_text().replace('armature="0.028"', 'armature="0.03"'))
    assert evaluate.main(["run=run", "robot_file=new/mine.yaml", "scene_file=new/scene.xml"]) == 2
    assert "its files are not those that the run was made with" in capsys.readouterr().err
    words = ["run=run", "robot_file=new/mne.yaml"]
    assert evaluate.main(words) == 2
    assert "Did you mean 'new/mine.yaml'?" in capsys.readouterr().err
    for command, argv in ((train, ["task=lift"]), (collect, ["task=lift", "out=more"]), (tasks, ["check=lift"])):
        assert command.main([*argv, "robot_file=new/mine.yaml"]) == 2, "a word without a use would leave the Panda"
        assert "here: task.robot=<path>" in capsys.readouterr().err
