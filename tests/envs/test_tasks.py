"""The tasks: what they observe, what counts as solved, what pays, and that a scripted expert can solve them."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.tasks.base import near, progress
from tests.envs.helpers import TASK_NAMES, actions, pool, restart

WITHOUT_OBJECTS = ("reach", "detour")
WITH_CUBE = [name for name in TASK_NAMES if name not in WITHOUT_OBJECTS]


def settle(env: MujocoPool, pose: Tensor | None = None, name: str = "cube", steps: int = 1) -> None:
    """Put the cube of every env at pose [3] (m) and let some control steps pass without a command of the arm."""
    if pose is not None:
        env.view.body_qpos(name)[:, :3] = pose
        env.view.body_qvel(name)[:] = 0
    still = torch.zeros(env.num_envs, 4)
    still[:, -1] = 1
    env.step(still.unsqueeze(1).repeat(1, steps, 1))


def go(env: MujocoPool, target: Tensor, steps: int, gripper: float) -> None:
    """Drive the tool centre points towards target [N, 3]; the gripper closed (-1) or open (1)."""
    for _ in range(steps):
        move = ((target - env.view.tcp_pos) * 2 / env.arm.config.delta_m).clamp(-1, 1)
        env.step(torch.cat([move, torch.full((env.num_envs, 1), gripper, dtype=move.dtype)], 1))


# -- what is observed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASK_NAMES)
def test_observations_are_named(task: str) -> None:
    env = pool(task, 3)
    spec, obs = env.spec, restart(env)
    assert len(spec.state_names) == spec.state_dim == obs["state"].shape[1]
    assert len(set(spec.state_names)) == spec.state_dim
    assert obs["privileged"].shape[1] == spec.privileged_dim > 0
    assert spec.action_names == ("dx", "dy", "dz", "gripper")
    parts, hidden = {**env.arm.observe(), **env.task.observe()}, env.task.privileged()
    assert not set(parts) & set(hidden), "privileged parts are for the critic alone"
    sizes = {term.name: term.size for term in (*spec.state, *spec.privileged)}
    sizes |= {quantity.term.name: quantity.term.size for quantity in env.task.observed() if not quantity.observed}
    assert {name: value.shape for name, value in {**parts, **hidden}.items()} == {n: (3, sizes[n]) for n in sizes}
    at = [name.split("[")[0] for name in spec.state_names].index("tcp_pos")
    torch.testing.assert_close(obs["state"][:, at : at + 3], env.view.tcp_pos.float(), rtol=0, atol=0)


@pytest.mark.parametrize("task", WITH_CUBE)
def test_grasping_is_known_to_the_critic_alone(task: str) -> None:
    names = {name.split("[")[0] for name in pool(task, 1).spec.state_names}
    assert not [name for name in names if "grasped" in name or "touched" in name or name == "cube_vel"]


def test_rotation_is_two_columns_of_the_matrix() -> None:
    env = pool("lift", 4)
    quaternion = torch.nn.functional.normalize(torch.randn(4, 4, dtype=torch.float64), dim=-1)
    env.view.body_qpos("cube")[:, 3:] = quaternion
    env.batch.forward(stage=int(mujoco.mjtStage.mjSTAGE_POS))
    matrix = np.zeros((4, 9))
    for row, quat in zip(matrix, quaternion.numpy(), strict=True):
        mujoco.mju_quat2Mat(row, quat)
    columns = torch.from_numpy(matrix).view(4, 3, 3)[:, :, :2].transpose(1, 2).reshape(4, 6)
    torch.testing.assert_close(env.task.observe()["cube_rotation"], columns)


def test_shaping_functions() -> None:
    distance = torch.tensor([0.0, 0.1, 0.2, 0.4, 0.9], dtype=torch.float64)
    torch.testing.assert_close(progress(distance, 0.4), torch.tensor([1.0, 0.75, 0.5, 0, 0], dtype=torch.float64))
    values = near(distance, 0.2)
    assert values[0] == 1
    assert (values.diff() < 0).all()
    assert values[2].item() == pytest.approx(0.2384, abs=1e-4)


# -- initial states and rewards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASK_NAMES)
def test_no_episode_starts_solved(task: str) -> None:
    env = pool(task, 256)
    solved = env.task.success().float().mean()
    assert solved == 0 or (task == "reach" and solved < 0.02), "a goal of reach may happen to be at the gripper"
    step = env.step(torch.zeros(256, 4))
    assert torch.isfinite(step.obs["state"]).all()
    moved = (env.view.qvel[:, 9:].abs().amax() if task in WITH_CUBE else torch.zeros(1)).item()
    assert moved < 0.05, "objects should start at rest, outside of each other"


@pytest.mark.parametrize("task", TASK_NAMES)
def test_rewards_are_between_0_and_1(task: str) -> None:
    """Every term is positive, the sum of all of them at most 1, whether moves are random or skilled."""
    env = pool(task, 16)
    plan = actions(list(range(16)), 60, 4)
    for t in range(60):
        expert = env.task.expert()
        step = env.step(torch.where((torch.arange(16) < 8)[:, None], expert, plan[:, t]))
        terms = env.task.rewards(step.info["success"])
        total = torch.stack([value.double() for value in terms.values()]).sum(0)
        assert all((value >= 0).all() for value in terms.values())
        assert (total <= 1.005).all(), {name: value.max().item() for name, value in terms.items()}  # soft joint limits
        if not len(step.final_ids):
            torch.testing.assert_close(step.reward_NE[:, 0], total.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_being_solved_pays_more_than_anything_before(task: str) -> None:
    """Along the expert's way the reward after success is above whatever it was before the first success."""
    env = pool(task, 16)
    best_before, at_end = torch.zeros(16), torch.zeros(16)
    solved_once = torch.zeros(16, dtype=torch.bool)
    for _ in range(env.spec.max_episode_steps - 1):
        step = env.step(env.task.expert())
        solved = step.info["success"]
        solved_once |= solved
        best_before = torch.where(solved_once, best_before, best_before.maximum(step.reward_N))
        at_end = torch.where(solved, step.reward_N, at_end)
    assert solved_once.float().mean() > 0.9
    assert (at_end[solved_once] > best_before[solved_once]).all()


@pytest.mark.parametrize("task", ["lift", "pick_place", "stack"])
def test_the_next_stage_pays_more(task: str) -> None:
    """Mean reward by stage of the expert's way: far, near without a grasp, grasped on the table, in the air, solved."""
    env = pool(task, 32)
    totals, counts, seen = torch.zeros(5), torch.zeros(5), torch.zeros(32, dtype=torch.bool)
    for _ in range(env.spec.max_episode_steps - 1):
        step = env.step(env.task.expert())
        cube, grasped, solved = env.view.body_qpos("cube")[:, :3], env.view.grasped("cube"), step.info["success"]
        close = (cube - env.view.tcp_pos).norm(dim=-1) < 0.03
        high = cube[:, 2] > 0.06
        on_table = cube[:, 2] < 0.025
        seen |= grasped
        free = ~seen & on_table
        stages = [free & ~close, free & close, grasped & on_table & ~solved, grasped & high & ~solved, solved]
        for i, rows in enumerate(stages):
            totals[i] += step.reward_N[rows].sum()
            counts[i] += rows.sum()
    assert (counts > 10).all(), counts
    means = totals / counts
    assert (means.diff() > 0.02).all(), means


# -- what counts as solved ---------------------------------------------------------------------------------------------


def test_reach_and_push_measure_distance() -> None:
    env = pool("reach", 2)
    env.task.goal[:] = env.view.tcp_pos + torch.tensor([[0.02, 0, 0], [0.03, 0, 0]])
    assert env.task.success().tolist() == [True, False]
    env = pool("push", 3)
    env.task.cube[:, :2] = env.task.goal[:, :2] + torch.tensor([[0.02, 0], [0.04, 0], [0.0, 0]])
    env.task.cube[2, 2] = 0.1
    assert env.task.success().tolist() == [True, False, False], "at the mark; beside it; in the air above it"


def test_lift_needs_the_cube_in_the_hand() -> None:
    env = pool("lift", 4)
    env.task.cube[:] = env.task.goal
    assert not env.task.success().any(), "thrown to the goal is not held there"


def test_pick_place_needs_rest_and_release() -> None:
    env = pool("pick_place", 4)
    inside = env.task.tray[0] + torch.tensor([0.0, 0.0, 0.03])
    env.task.tray[:] = env.task.tray[0].clone()
    settle(env, inside, steps=8)
    assert env.task.success().all()
    env.view.body_qvel("cube")[0, 0] = 0.2
    env.task.cube[1, 2] = env.task.config.wall_m + 0.01
    env.task.cube[2, 0] += 0.1
    env.view.changed()
    assert env.task.success().tolist() == [False, False, False, True]


@pytest.mark.parametrize("task", ["pick_place", "stack"])
def test_held_is_not_placed(task: str) -> None:
    """The expert without its letting go: the cube is over, even in its place, but in the hand: never a success."""
    env = pool(task, 16)
    grasped_once = torch.zeros(16, dtype=torch.bool)
    for _ in range(60):
        action = env.task.expert()
        grasped = env.view.grasped("cube")
        grasped_once |= grasped
        action[grasped_once, -1] = -1.0
        step = env.step(action)
        assert not step.info["success"][env.view.grasped("cube")].any()
    assert grasped_once.all()
    place = env.task.tray if task == "pick_place" else env.task.base
    over = (env.task.cube - place)[:, :2].norm(dim=-1) < 0.05
    assert over.float().mean() > 0.8, "the cubes should hang over where they belong"


def test_stack_needs_the_red_cube_on_the_blue_one() -> None:
    env = pool("stack", 4)
    base = env.task.base.clone()
    env.view.body_qpos("cube")[:, 3:] = torch.tensor([1.0, 0, 0, 0])
    env.view.body_qvel("cube")[:] = 0
    env.task.cube[:] = base + torch.tensor([0.0, 0.0, 0.045])
    env.task.cube[1, 0] += 0.05  # beside it in the air
    env.task.cube[2, 2] = 0.02  # as if inside
    assert env.task.success().tolist() == [True, False, False, True]
    env = pool("stack", 4)
    settle(env, None)
    swapped = env.task.base.clone()
    env.task.base[:] = env.task.cube + torch.tensor([0.0, 0.0, 0.045])
    env.task.cube[:] = swapped * torch.tensor([1.0, 1.0, 0.8])
    assert not env.task.success().any(), "blue on red"


@pytest.mark.parametrize("factor", [0.55, 1.45])
def test_cubes_of_another_size_are_stacked_and_pushed_too(factor: float) -> None:
    sim = {"randomization": {"size": {"field": "object_size", "range": [factor, factor]}}}
    env = pool("stack", 2, sim=sim)
    env.view.body_qpos("cube")[:, 3:] = torch.tensor([1.0, 0, 0, 0])
    env.task.cube[:] = env.task.base + torch.tensor([0.0, 0.0, 0.045 * factor])
    env.task.cube[1, 2] += 0.02  # above it in the air
    assert env.task.success().tolist() == [True, False]
    env = pool("push", 2, sim=sim)
    env.task.cube[:, :2] = env.task.goal[:, :2]
    env.task.cube[1, 2] += 0.02
    assert env.task.success().tolist() == [True, False]


@pytest.mark.parametrize("rise_m", [0.0, 0.03, 0.08])
def test_a_cube_cannot_be_pushed_into_the_tray(rise_m: float) -> None:
    """The closed gripper pushes the cube to the tray from several sides, at several heights; then it rises as well."""
    n = 48
    env = pool("pick_place", n, 120, seed=500)
    cube, tray = env.task.cube, env.task.tray
    angle = torch.linspace(-0.5, 0.5, n // 3, dtype=torch.float64).repeat(3)
    height = torch.tensor([[0.014], [0.025], [0.04]], dtype=torch.float64).repeat_interleave(n // 3, 0)
    x, y = torch.nn.functional.normalize((tray - cube)[:, :2]).unbind(-1)
    heading = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], -1)
    behind = torch.cat([cube[:, :2] - 0.07 * heading, height], -1)
    go(env, behind + torch.tensor([0, 0, 0.1]), 14, -1.0)
    go(env, behind, 12, -1.0)
    first, nearest = cube.clone(), torch.full((n,), torch.inf, dtype=torch.float64)
    for t in range(60):
        line = torch.nn.functional.normalize((tray - cube)[:, :2])
        offset = (env.view.tcp_pos - cube)[:, :2]
        across = offset - (offset * line).sum(-1, keepdim=True) * line
        push = env.view.tcp_pos[:, :2] + 0.02 * line - 0.5 * across
        go(env, torch.cat([push, height + rise_m * (t > 30)], -1), 1, -1.0)
        nearest = torch.minimum(nearest, (cube - tray)[:, :2].abs().amax(-1))
        assert not env.task.success().any()
    assert ((cube - first)[:, :2].norm(dim=-1) > 0.03).float().mean() > 0.7, "most cubes should have been pushed"
    assert (nearest < env.task.config.tray_half_m + 0.04).float().mean() > 0.15, "and some of them up to the wall"


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_expert_solves_its_task(task: str) -> None:
    env = pool(task, 200, seed=0)
    restart(env, 0)
    for _ in range(env.spec.max_episode_steps):
        step = env.step(env.task.expert())
    assert len(step.final_ids) == 200
    assert step.episodes.success_at_end_M.float().mean() >= 0.95


@pytest.mark.parametrize("robot", ["panda", "so101"])
@pytest.mark.parametrize("task", ["push", "stack"])
def test_experts_solve_it_by_displacing_joints(task: str, robot: str) -> None:
    env = pool(task, 100, seed=0, config={"robot": robot, "control": {"mode": "joint_delta"}})
    restart(env, 0)
    for _ in range(env.spec.max_episode_steps):
        action = env.task.expert()
        assert action.shape == (100, env.spec.action_dim)
        assert action.abs().max() <= 1
        step = env.step(action)
    assert step.episodes.success_at_end_M.float().mean() >= 0.9


@pytest.mark.parametrize("rotation", [False, True])
def test_expert_actions_fit_the_action_space(rotation: bool) -> None:
    env = pool("lift", 5, config={"control": {"rotation": rotation}})
    action = env.task.expert()
    assert action.shape == (5, env.spec.action_dim)
    assert action.abs().max() <= 1
    env.step(action)
