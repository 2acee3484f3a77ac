"""A bundle of the SO-101, whose displacements add to its last targets and whose gripper is one turning joint."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from embodied import compare, deploy, export
from embodied.core.execution import EvalRollout
from embodied.deployment.bundle.format import read_bundle, read_simulation
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.control.arm import ArmController
from embodied.deployment.control.inference import Clock, Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Safety
from embodied.deployment.robots.setup import propose
from embodied.deployment.robots.sim import SimRobot
from embodied.envs import make_pool, make_sampler
from embodied.session.factories import evaluation_plans, make_env
from tests.commands.helpers import SMALL, run, run_train
from tests.deployment.exports import flow_bundle, random_policy, small_config, write_small

CONFIG = {"task.robot": "so101", "task.max_episode_steps": 40}
NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")


@cache
def lift_bundle() -> Path:
    path = Path(mkdtemp(prefix="bundle-"))
    write_small(path, small_config("lift", "gaussian", **CONFIG))
    return path


@pytest.mark.slow(reason="trains, exports, compares and deploys")
def test_a_run_and_its_bundle_agree_and_drive_the_simulated_arm(tmp_path: Path) -> None:
    trained, bundle = tmp_path / "run", tmp_path / "bundle"
    words = [*SMALL, "task.robot=so101", "task.max_episode_steps=10", "total_steps=256", f"out={trained}"]
    assert run_train(*words).code == 0
    assert run(export.main, [f"run={trained}", f"out={bundle}", "episodes=2"]).result["parity_max"] < 1e-5
    words = [f"policies=[{trained},{bundle}]", "limit=20", "num_threads=1", f"out={tmp_path}/compared.json"]
    assert run(compare.main, words).result["solved_by_one"] == [0, 0]
    for words in (["episodes=3", "lockstep=true", "perturbation=real"], ["episodes=1"]):
        driven = run(deploy.main, [f"bundle={bundle}", "robot=sim", *words])
        assert driven.code == 0, driven.stderr
        assert driven.result["ended"] == {"time limit": driven.result["episodes"]}
        assert "did not reach its default pose" not in driven.stderr


def test_an_arm_that_sags_more_than_in_training_has_come_home() -> None:
    words = [f"bundle={lift_bundle()}", "robot=sim", "episodes=2", "lockstep=true", "perturbation=real"]
    outcome = run(deploy.main, words)
    assert (outcome.code, outcome.result["error"]) == (0, None), outcome.stderr


def test_an_episode_is_the_one_of_the_evaluation_with_the_last_targets_in_its_state() -> None:
    config, bundle = small_config("lift", "gaussian", **CONFIG), read_bundle(lift_bundle())
    env = make_env(config, 1, 1)
    expected: list[np.ndarray] = []
    env.on_control_step = lambda pool: expected.append(pool.arm.qpos[0, :6].copy())
    plans = evaluation_plans(env.spec, 2, 5).rows(slice(1, 2))
    rollout = EvalRollout(random_policy(config), env, plans, seeded=False)
    while len(expected) < 36:
        rollout.step()
    env.close()
    safety = Safety(bundle.arms)
    safety.limits = replace(safety.limits, ramp_s=0.0)
    with SimRobot(bundle, read_simulation(lift_bundle()), lockstep=True) as robot:
        robot.reset(5, 1)
        inference = Inference(PolicyRunner(lift_bundle()), robot, simulated=True)
        record = ControlLoop(bundle, robot, inference, safety).run(steps=36)
    assert record.interventions == {}
    np.testing.assert_allclose(record.stack("qpos")[1:], np.stack(expected)[:35, :5], atol=1e-6)
    first = sum(term.size for term in bundle.state[: [term.name for term in bundle.state].index("joint_target")])
    np.testing.assert_allclose(record.stack("state")[1:, first : first + 5], record.stack("target")[:-1], atol=1e-6)


@pytest.mark.parametrize("control", [{}, {"mode": "joint_delta", "rotation": False, "from_target": False}])
def test_targets_are_those_of_training(control: dict[str, object]) -> None:
    pool = make_pool("lift", {"robot": "so101", "control": control}, num_envs=4, num_threads=1)
    pool.reset(make_sampler(pool, seed=3))
    draw = torch.Generator().manual_seed(0)
    for _ in range(8):
        pool.step(2 * torch.rand(4, 1, pool.spec.action_dim, generator=draw) - 1)
    arm, terms = pool.spec.arm, pool.spec.action.terms
    scale, offset = (np.array([getattr(term, name) for term in terms]) for name in ("scale", "offset"))
    chosen = 2 * torch.rand(4, len(terms), generator=draw).double().numpy() - 1
    before = pool.arm.ctrl.copy()
    from_NJ = before[:, :5] if arm.from_target else pool.arm.qpos[:, :5].copy()
    pool.arm.apply(chosen, None)
    for n in range(4):
        targets, finger = ArmController(arm, terms).targets(chosen[n] * scale + offset, from_NJ[n], before[n, 5])
        np.testing.assert_allclose([*targets, finger], pool.arm.ctrl[n], atol=1e-9)


def test_the_description_says_what_the_panda_does_not_need() -> None:
    bundle, content = read_bundle(lift_bundle()), json.loads((lift_bundle() / "bundle.json").read_text())
    assert (bundle.arm.orientation, bundle.arm.from_target) == ("free", True)
    assert (bundle.arm.gripper.position_unit, bundle.arm.gripper.fingers) == ("rad", 1)
    assert {(joint.max_velocity, joint.damping) for joint in bundle.arm.joints} == {(5.45, 0.61)}
    assert [note for note in content["notes"] if "pose of the last targets" in note]
    assert "0.6 rad opens, -0.17 rad closes" in (lift_bundle() / "README.md").read_text()
    old = json.loads((flow_bundle() / "bundle.json").read_text())["arm"]
    assert not {"orientation", "from_target"} & old.keys()
    assert old["gripper"].keys() == {"open_m", "closed_m", "max_step_m", "max_position_m"}


class LeRobotArm(Clock):
    """The names and units of LeRobot's SO-101: degrees, and 0 to 100 of the gripper."""

    name = "so101_follower"
    action_features = observation_features = dict.fromkeys([*(f"{name}.pos" for name in NAMES), "gripper.pos"], float)

    def get_observation(self) -> dict[str, Any]:
        return dict.fromkeys(self.action_features, 45.0)


def test_the_draft_of_a_mapping_has_the_names_and_units_of_lerobot() -> None:
    drafted = propose(read_bundle(lift_bundle()), LeRobotArm())
    assert {name: (entry.name, entry.unit) for name, entry in drafted.joints.items()} == {
        name: (f"{name}.pos", "deg") for name in NAMES
    }
    assert drafted.gripper.from_robot(0.0) == pytest.approx(-0.17)
    assert drafted.gripper.from_robot(100.0) == pytest.approx(1.7453)
