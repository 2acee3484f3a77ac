"""The preset ``randomization=sim2real``: which terms it has, for each robot and task, and that they can be changed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from embodied.core.config import parse_overrides, read_preset
from embodied.core.errors import UserError
from embodied.envs.mujoco.robot_file import FOLDER, Perturbation, robot_perturbation
from embodied.session.config import CONFIG_DIR, compose_run, with_environments
from tests.envs.helpers import TASK_NAMES, actions, pool

SIM2REAL = read_preset(CONFIG_DIR, "sim2real")


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_preset_runs_on_every_task(task: str) -> None:
    config = compose_run(parse_overrides([f"task={task}", "randomization=sim2real"]))
    assert set(config.sim.options.randomization) == set(SIM2REAL["randomization"])
    env, plan = pool(task, 3, 6, sim=SIM2REAL), actions([0, 1, 2], 8, 4)
    for t in range(8):
        step = env.step(plan[:, t])
    assert torch.isfinite(step.obs["state"]).all()


@pytest.mark.parametrize("robot", ["panda", "so101"])
def test_the_preset_covers_the_perturbed_arm(robot: str) -> None:
    of_perturbation = {
        "gains": "stiffness", "joint_damping": "joint_damping", "joint_friction": "joint_friction",
        "object_mass": "object_mass", "object_friction": "finger_friction", "action_delay_s": "action_delay",
        "backlash_rad": "backlash", "encoder_offset_rad": "encoder_offset", "joint_noise_rad": "joint_noise",
        "velocity_noise_rad_s": "velocity_noise", "object_noise_m": "object_noise",
    }  # fmt: skip
    perturbation = asdict(robot_perturbation(robot))
    assert of_perturbation.keys() == perturbation.keys()
    plain = compose_run({"task": "lift", "task.robot": robot})
    config = compose_run({"task": "lift", "task.robot": robot, "randomization": "sim2real"})
    assert config.sim == with_environments(plain, None, "sim2real").sim
    terms = config.sim.options.randomization
    assert terms.keys() == SIM2REAL["randomization"].keys()
    for name, value in perturbation.items():
        if value != getattr(Perturbation(), name):
            low, high = terms[of_perturbation[name]].range
            assert low < value < high, name


def test_the_preset_is_that_of_the_robot_wherever_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "mine.py"
    task.write_text(
        "from embodied.core.options import config_dataclass\n"
        "from embodied.envs.tasks.config import LiftConfig\n"
        "from embodied.envs.tasks.lift import Lift\n"
        "@config_dataclass\nclass Mine(LiftConfig):\n    robot: str = 'so101'\n"
        "class MyLift(Lift):\n    config: Mine\n"
    )
    monkeypatch.setattr("embodied.core.user_files._named", {task})  # as if on the command line
    words = {"task": f"{task}:MyLift", "randomization": "sim2real"}
    assert compose_run(words).sim.options.randomization["backlash"].range == (0, 0.02)
    words |= {"task.robot": "panda", "sim.randomization.joint_noise": None}
    terms = compose_run(words).sim.options.randomization
    assert terms["backlash"].range == (0, 0.006)
    assert terms["joint_noise"] is None


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("{backlsh: {range: [0, 0.1]}}", "unknown term in randomization of robot .* 'backlsh'"),
        ("{backlash: 0.1}", "robot mine.yaml: randomization.backlash: got 0.1"),
    ],
)
def test_terms_of_a_robot_that_are_no_terms_are_named(tmp_path: Path, terms: str, message: str) -> None:
    path, mjcf = tmp_path / "mine.yaml", (FOLDER / "../../assets/so101/so101.xml").resolve()
    robot = (FOLDER / "so101.yaml").read_text().partition("# its servos")[0]
    robot = robot.replace("../../assets/so101/so101.xml", str(mjcf))
    path.write_text(f"{robot}randomization: {terms}")
    with pytest.raises(UserError, match=message):
        compose_run({"task": "lift", "task.robot": str(path), "randomization": "sim2real"})


def test_a_term_can_be_changed_or_removed() -> None:
    words = ["randomization=sim2real", "sim.randomization.backlash.range=[0,0.1]", "sim.randomization.arm_push=null"]
    config = compose_run(parse_overrides(words))
    assert config.sim.options.randomization["backlash"].range == (0, 0.1)
    assert config.sim.options.randomization["arm_push"] is None
    env = pool("reach", 1, sim=asdict(config.sim.options))
    assert "arm_push" not in env.randomizer.terms
    plain = with_environments(config, None, "none")
    assert plain.sim.options.randomization == {}
    assert plain.sim.options.camera_randomization.position_m == 0
    assert with_environments(plain, None, "sim2real").sim.options.randomization["arm_push"] is not None
    on_warp = with_environments(config, "warp", None).sim.options
    assert on_warp.randomization == config.sim.options.randomization
    assert on_warp.camera_randomization == config.sim.options.camera_randomization
    assert on_warp.camera_randomization.position_m > 0
    with pytest.raises(UserError, match=r"randomization 'sim2reel'. Did you mean 'sim2real'"):
        compose_run(parse_overrides(["randomization=sim2reel"]))
