"""Two robots at one table: what each has, a pair has twice; they lift a bar that one arm cannot lift level."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import gymnasium
import pytest
import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec
from embodied.envs import make_sampler
from embodied.envs.checks.conformance import check_env
from embodied.envs.checks.robot import check_robot
from embodied.envs.mujoco.config import SIDES
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.robots.pair import halves
from embodied.envs.rendering.cameras import Camera
from embodied.envs.tasks import common
from embodied.session.config import compose_run
from tests.envs.helpers import PANDA, pool
from tests.envs.test_warp import kernels, make

NAMES = ("panda", "so101")


def two(name: str = "panda", num_envs: int = 4, **options: Any) -> MujocoPool:
    return pool("lift_bar", num_envs, config={"robots": {"left": name, "right": name}}, **options)


def tools(env: MujocoPool) -> tuple[Tensor, Tensor]:
    left, right = (view.tcp_pos.clone() for view in env.view.views)
    return left, right


def test_what_a_robot_has_a_pair_has_twice_left_first() -> None:
    env = two()
    names = [term.name for term in PANDA.terms]
    sides = ("left", "right")
    assert [term.name for term in env.spec.state][: 2 * len(names)] == [f"{s}_{name}" for s in sides for name in names]
    assert env.spec.action_names == tuple(f"{s}_{name}" for s in sides for name in PANDA.action.names)
    observed, (left, right) = {**env.arm.observe(), **env.task.observe()}, tools(env)
    torch.testing.assert_close(torch.cat([observed["left_tcp_pos"], observed["right_tcp_pos"]], 1), env.arm.tcp_pos)
    torch.testing.assert_close(observed["right_handle_from_tcp"], env.view.position("right_handle") - right)
    assert (observed["left_joint_pos"] != observed["right_joint_pos"]).any(-1).all()
    assert ((left - right)[:, 1] > 0.5).all()


@pytest.mark.parametrize("name", NAMES)
def test_each_arm_follows_its_own_half_of_an_action(name: str) -> None:
    env = two(name)
    before, action = tools(env), torch.zeros(4, env.spec.action_dim)
    halves(action)[1][:, 0] = 0.5
    for _ in range(5):
        env.step(action)
    left, right = (after - start for after, start in zip(tools(env), before, strict=True))
    assert left[:, :2].abs().max() < 0.01 < right[:, 0].min()
    assert right[:, 1].abs().max() < 0.01


def test_the_arms_touch_each_other_and_neither_touches_itself() -> None:
    model = two(num_envs=1).model
    bits = [(model.geom_contype[i], model.geom_conaffinity[i], model.geom(i).name) for i in range(model.ngeom)]
    robots = [each for each in bits if each[2].startswith(("left/", "right/"))]
    assert len(robots) > 6
    for (type_a, affinity_a, a), (type_b, affinity_b, b) in combinations(robots, 2):
        assert bool(type_a & affinity_b or type_b & affinity_a) == (a[0] != b[0]), (a, b)


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_lifts_the_bar_and_holds_it_level(name: str) -> None:
    env = two(name, 200)
    assert not env.task.success().any()
    best_before, at_end, solved_once = torch.zeros(200), torch.zeros(200), torch.zeros(200, dtype=torch.bool)
    for t in range(env.spec.max_episode_steps):
        step = env.step(env.task.expert())
        solved = step.info["success"]
        solved_once |= solved
        best_before = torch.where(solved_once, best_before, best_before.maximum(step.reward_N))
        at_end = torch.where(solved, step.reward_N, at_end)
        if t < env.spec.max_episode_steps - 1:
            terms = env.task.rewards(solved)
            assert all((value >= 0).all() for value in terms.values())
    assert step.episodes.success_at_end_M.float().mean() >= 0.95
    assert (at_end[solved_once] > best_before[solved_once]).all()
    assert at_end.max() <= 1


def test_one_arm_cannot_lift_the_bar_level() -> None:
    env = two(num_envs=16)
    (view, handle), (_, other) = env.task.hands
    for t in range(50):
        target, gripper = common.grasp_move(view, handle, env.task.half_width_m)
        if t > 20:
            target, gripper = view.tcp_pos + torch.tensor([0.0, 0.0, 0.1]), -torch.ones(16)
        move = common.move_towards(view, target, gripper, limit=1.0 if t < 20 else 0.5)
        env.step(torch.cat([move, torch.zeros_like(move)], 1))
    assert (view.position(handle)[:, 2] > 0.2).all()
    assert (view.position(other)[:, 2] < 0.06).all()


def test_it_keeps_the_contract_of_an_environment() -> None:
    check_env(lambda num_envs: two("so101", num_envs, max_episode_steps=5))


def test_the_check_of_a_robot_checks_both() -> None:
    found = {result.name: (result.passed, result.why) for result in check_robot(two("so101", 8))}
    assert list(found) == ["ik", "fingers", "start", "gap", "still", "expert"]
    assert all(passed for passed, _ in found.values()), found


def test_both_arms_are_randomised_and_measured_apart() -> None:
    terms = compose_run({"randomization": "sim2real"}).sim.options.randomization
    env = two(num_envs=32, sim={"randomization": terms})
    offset = env.arm.encoder_offset_NJ
    assert offset.shape == (32, 14)
    for _ in range(20):
        env.step(env.task.expert())
    measured, (left, right) = env.non_model.observe(None), tools(env)
    for seen, true in ((measured["left_tcp_pos"], left), (measured["right_tcp_pos"], right)):
        assert 1e-5 < (seen - true).norm(dim=-1).mean() < 0.01
    torch.testing.assert_close(measured["right_joint_pos"], halves(env.arm.joint_pos + offset)[1], atol=0.02, rtol=0)
    assert env.task._grasped().float().mean() > 0.5
    stiffness = env.batch.expanded("actuator_gainprm")[:, [env.model.actuator("right/joint1").id, 0], 0]
    assert stiffness.std(0).min() > 50


def test_arms_whose_actions_add_to_the_last_targets_have_backlash_each() -> None:
    words = {"task": "lift_bar", "task.robots": {"left": "so101", "right": "so101"}, "randomization": "sim2real"}
    terms = compose_run(words).sim.options.randomization
    assert terms["backlash"].range == (0, 0.02)
    env = two("so101", sim={"randomization": terms})
    env.step(torch.full((4, env.spec.action_dim), 0.5))
    offsets, wanted = halves(env.arm.encoder_offset_NJ), halves(env.state_dict()["hardware/wanted"])
    for arm, offset, of_arm in zip(env.arm.arms, offsets, wanted, strict=True):
        torch.testing.assert_close(arm.joint_targets(), of_arm + offset)


def test_cameras_show_both_and_a_hand_has_its_own() -> None:
    wrist = Camera("left_wrist", width=16, height=16, mount="left/wrist")
    env = pool("lift_bar", 2, cameras=[CameraSpec.square("front", 16), wrist])
    seen = env.observe()
    assert seen["images.front"].shape == seen["images.left_wrist"].shape == (2, 16, 16, 3)
    assert seen["images.left_wrist"].float().std() > 5
    small = pool(
        "lift_bar", 1, cameras=[CameraSpec.square("front", 8)], config={"robots": dict.fromkeys(SIDES, "so101")}
    )
    bodies = [small.rig.model.body(body).name for body in small.rig.model.geom_bodyid]
    assert all(bodies.count(f"{side}/gripper") == 3 for side in SIDES)


@pytest.mark.parametrize(
    ("task", "config", "why"),
    [
        (
            "reach",
            {"robots": {"left": "panda", "right": "panda"}},
            "unknown key 'task.reach.robots'. Did you mean .*robot'",
        ),
        ("lift_bar", {"robot": "so101"}, r"robot: got so101, .* two robots: robots={left: so101, right: so101}"),
        ("lift_bar", {"robots": {"left": "panda"}}, "got left: panda, needed: left and right"),
        ("lift_bar", {"robots": {"left": "panda", "right": "so101"}}, "right: so101, needed: .*twice the same robot"),
        ("lift_bar", {"robots": {"left": "pand", "right": "pand"}}, "unknown robot 'pand'. Did you mean 'panda'"),
        ("lift_bar", {"handle_half_m": 0.05}, "handle_half_m: got 0.05, allowed: 0 to 0.04"),
        ("lift_bar", {"apart_m": 2.0}, "m out of reach of the robot bi_franka_panda"),
        ("lift_bar", {"held_starts": 0.3}, "held_starts: lift_bar has no object to hold"),
    ],
)
def test_what_does_not_fit_is_refused(task: str, config: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as error:
        pool(task, 1, config=config)
    assert "\n" not in str(error.value)


def test_a_camera_of_one_hand_has_its_side_in_its_name() -> None:
    with pytest.raises(UserError, match=r"no camera 'wrist'\. It has: left/wrist, right/wrist"):
        two(num_envs=1, cameras=[CameraSpec.square("wrist", 16)])


def test_gymnasium_has_it_with_both_kinds_of_robots() -> None:
    assert gymnasium.make("embodied/LiftBar-v0").action_space.shape == (8,)
    assert gymnasium.make("embodied/SO101LiftBar-v0").action_space.shape == (10,)


@kernels
def test_on_warp_they_lift_the_bar_too() -> None:
    warp, mujoco = make("lift_bar"), two()
    warp.reset(make_sampler(mujoco, 0))
    torch.testing.assert_close(warp.observe()["state"], mujoco.observe()["state"], rtol=0, atol=1e-5)
    for _ in range(warp.spec.max_episode_steps):
        step = warp.step(warp.task.expert())
    assert step.episodes.success_at_end_M.all()
