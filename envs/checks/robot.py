"""Whether a robot of ours can do a task: each check says what was measured and, if it fails, what to change."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.core.arm import Chain
from embodied.core.env import VecEnv
from embodied.core.errors import UserError, describe_error
from embodied.envs import make_sampler
from embodied.envs.checks.conformance import Result
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.randomization.randomizer import members
from embodied.envs.mujoco.robots.described import DescribedArm
from embodied.envs.mujoco.robots.gripper_description import GripperDescription
from embodied.envs.mujoco.robots.home import TILT_DEG
from embodied.envs.mujoco.robots.jaws import measure_jaws
from embodied.envs.tasks.base import Task, distance

EPISODES, SOLVED, HELD = 200, 0.95, 0.9  # HELD: chance that objects in the hand stay there
BEGUN = 0.5  # share of episodes that may be solved at their start
STILL_M, SUNK_M, MOVED_M = 0.002, 0.05, 0.05  # the last two: of an arm and of objects as large as the Panda's
SLIP_M_S = 0.004  # at which a held object of the Panda's size is lost within an episode
SERVOS = "servos with force and armature (0.1), whose stiffness and damping follow from the inertia"
Finding = tuple[bool, str, str]
"""Whether it is good, what was measured, and what to change if it is not."""


def check_robot(pool: VecEnv, note: Callable[[str], None] = print) -> Iterator[Result]:
    """Yield the results of all checks of the task's robot that apply. pool: ``EPISODES`` envs of a task of ours.

    note: called with what is odd but no fault: policies that cannot be exported, and objects that begin out of reach or
    move by themselves. No results if episodes cannot begin: ``run_checks`` then says why.
    """
    if not isinstance(pool, MujocoPool):
        return
    robots: Sequence[Any] = getattr(pool.task.robot, "robots", (pool.task.robot,))
    robot, task = robots[0], pool.task  # two robots are the same but for their places
    if not isinstance(robot, GripperDescription):
        return
    if robot.lacks:
        note(f"policies for robot {robot.name} cannot be exported: it lacks {robot.lacks}")
    try:
        _start(pool)
    except Exception:  # of a task in a user's file
        return
    with suppress(Exception):  # of such a task: a check below says it
        for line in _odd_starts(pool):
            note(line)
    checks: dict[str, Callable[[], Finding]] = {
        "ik": lambda: _ik(pool, robots), "fingers": lambda: _fingers(robot), "start": lambda: _started(pool),
    }  # fmt: skip
    if hasattr(task, "half_width_m"):
        checks["gap"] = lambda: _gap(pool, robot)
    if robot.config.mode == "ee_delta":
        checks |= {"still": lambda: _still(pool, robots)}
        checks |= {"hold": lambda: _hold(pool, robot)} if task.held_object else {}
        checks |= {"expert": lambda: _expert(pool, robot)} if type(task).expert is not Task.expert else {}
    for name, check in checks.items():
        try:
            good, measured, change = check()
        except UserError as error:
            good, measured, change = False, str(error), ""
        except Exception as error:  # of a task in a user's file
            good, measured, change = False, f"raised {describe_error(error)}", ""
        yield Result(name, bool(good), measured if good or not change else f"{measured}: {change}")


def _ik(pool: MujocoPool, robots: Sequence[GripperDescription]) -> Finding:
    points = np.array([corner for _, corner in pool.task.corners()])
    if not len(points):
        return True, "no areas to reach: no two options are called <name>_low_m and <name>_high_m", ""
    found = [each.reach_for(of) for each, of in zip(robots, np.split(points, len(robots), 1), strict=True)]
    robot, miss_n = robots[0], np.concatenate([miss_n for _, miss_n in found])
    down_n = -np.concatenate([Chain(robot.kinematics).tools(qpos_nJ.T)[1][2, 2] for qpos_nJ, _ in found])
    tilt_deg = float(np.degrees(np.arccos(down_n.clip(-1, 1))).max())
    measured = (
        f"corners of the areas are missed by up to {miss_n.max() * 1e3:.1f} mm, tool tilted by {tilt_deg:.0f} deg"
    )
    return robot.config.orientation == "free" or tilt_deg < TILT_DEG, measured, "a smaller reach_m, or another home"


def _fingers(robot: GripperDescription) -> Finding:
    closed, open = robot.finger_closed_m, robot.finger_open_m
    jaws = measure_jaws(robot.model, robot.parts, robot.fingers, closed, open, robot.home_qpos)
    beyond_m, low_m = jaws.reach_3[2], robot.workspace_m[0][2]
    measured = f"closed fingers reach {beyond_m * 1e3:.0f} mm beyond the tool, which stays {low_m * 1e3:.0f} mm high"
    return beyond_m < low_m + STILL_M, measured, "move tool towards the tips, or raise control.workspace_low_m"


def _gap(pool: MujocoPool, robot: GripperDescription) -> Finding:
    (closed_m, open_m), width_m = robot.gap_m, 2 * float(torch.as_tensor(pool.task.half_width_m).max())
    gaps = f"{closed_m * 1e3:.0f} to {open_m * 1e3:.0f} mm"
    measured = f"the gap between the fingers is {gaps}, the object {width_m * 1e3:.0f} mm wide"
    return closed_m < width_m < open_m, measured, "gripper.open, closed and bodies, or object_m"


def _started(pool: MujocoPool) -> Finding:
    _start(pool)
    solved = int(pool.task.success().sum()) / pool.num_envs
    measured = f"{solved:.0%} of {pool.num_envs} episodes are solved at their start"
    return solved < BEGUN, measured, "success, or reset, that leaves something to do"


def _odd_starts(pool: MujocoPool) -> Iterator[str]:
    """Yield lines about free bodies that begin out of reach, or move although the robot stands still."""
    names = [pool.model.body(body).name for body in members(pool.model, "body")["objects"]]
    start_BN3 = {name: pool.view.position(name).clone() for name in names}
    _step(pool, torch.zeros(pool.num_envs, pool.spec.action.size))
    robot = pool.task.robot
    low_2, high_2 = (pool.view.tensor(corner[:2]) for corner in robot.workspace_m)
    for name, start_N3 in start_BN3.items():
        beyond_m = float(torch.maximum(low_2 - start_N3[:, :2], start_N3[:, :2] - high_2).max())
        moved_m = float(distance(pool.view.position(name), start_N3).max())
        if beyond_m > 0:
            yield f"{name} begins up to {beyond_m:.2f} m outside of the workspace of robot {robot.name}"
        if moved_m > MOVED_M * pool.view.scale.reach:
            yield f"{name} moves by up to {moved_m:.2f} m while the robot stands still: does it begin inside something?"


def _still(pool: MujocoPool, robots: Sequence[GripperDescription]) -> Finding:
    _start(pool)
    zero, places = torch.zeros(pool.num_envs, pool.spec.action.size), [pool.arm.tcp_pos.reshape(-1, 3).clone()]
    for _ in range(3):
        _step(pool, zero)
        places.append(pool.arm.tcp_pos.reshape(-1, 3).clone())
    moved_KN = torch.stack([(places[-1] - places[k]).norm(dim=-1).view(pool.num_envs, -1).amax(1) for k in (0, 2)])
    whole_m, moved_m = moved_KN.amax(1).tolist()
    seconds = _steps(pool) * pool.spec.control_dt_s
    measured = f"zero actions move the tool by {whole_m * 1e3:.1f} mm, then by {moved_m * 1e3:.1f} mm in {seconds:g} s"
    if moved_m < STILL_M and whole_m < SUNK_M * pool.view.scale.reach:
        return True, measured, ""
    change = f"control.from_target, control.rotation (seven joints) or weightless: true, or {SERVOS}"
    low_R3, high_R3 = (pool.view.tensor([each.workspace_m[end] for each in robots]) for end in (0, 1))
    start_NR3 = places[0].view(pool.num_envs, len(robots), 3)
    if (beyond_m := float(torch.maximum(low_R3 - start_NR3, start_NR3 - high_R3).max())) > whole_m / 2:
        change = f"episodes begin with the tool up to {beyond_m * 1e3:.0f} mm outside of the workspace: "
        change += "move home inwards, lessen spread, or enlarge control.workspace_low_m and workspace_high_m"
    if names := _touching(pool, int(moved_KN.sum(0).argmax())):
        change = f"another start, since the robot begins in contact with {', '.join(names)}"
    return False, measured, change


def _touching(pool: MujocoPool, env_id: int) -> list[str]:
    """Return the names of bodies that touch the robot at the start of an env's first episode."""
    _start(pool)
    model, data = pool.model, mujoco.MjData(pool.model)
    for name in ("qpos", "mocap_pos", "mocap_quat"):
        getattr(data, name)[:] = pool.batch.bind(name)[env_id]
    mujoco.mj_forward(model, data)
    pairs = model.geom_bodyid[data.contact.geom[data.contact.dist < 0]]
    own = np.isin(model.body_rootid[pairs], model.body_rootid[members(model, "body")["arm"]])
    return sorted({model.body(body).name for body in pairs[~own & own.any(1, keepdims=True)]})


def _hold(pool: MujocoPool, robot: GripperDescription) -> Finding:
    _start(pool)
    ids, name = torch.arange(pool.num_envs), pool.task.held_object
    assert name is not None
    rng = EpisodeRng(ids.numpy(), np.zeros(len(ids), np.int64))
    pool.arm.reset(ids.numpy(), robot.start_qpos(rng, np.ones(len(ids), np.bool_)))
    pool.batch.forward()
    pool.task.put_in_hand(ids)
    pool.view.body_qvel(name)[:] = 0
    pool.batch.forward()
    pool.view.changed()

    def rise(by_m: float) -> Tensor:
        """Close the gripper while the tool rises; return where the objects then are in it, [N, 3]."""
        up_N3 = torch.tensor([0.0, 0.0, by_m]).double().expand(len(ids), 3)
        action = pool.arm.move_tool(up_N3, up_N3[:, 0], -torch.ones(len(ids)), torch.full((len(ids), 1), 0.5).double())
        _step(pool, action)
        return pool.view.position(name) - pool.view.tcp_pos

    rise(0.0)
    raised_N3 = rise(robot.config.delta_m)
    held = int(pool.view.grasped(name).sum()) / pool.num_envs
    slip_m_s = float(distance(rise(0.0), raised_N3).median()) / (_steps(pool) * pool.spec.control_dt_s)
    drag = max(joint.damping for joint in robot.kinematics.joints)
    measured = f"{held:.0%} of the objects that start in the hand are held while it closes and rises"
    measured += f"; then they slip by {slip_m_s * 1e3:.1f} mm/s"
    change = (
        f"tool at the object's centre, gripper force, friction and links, or less damping of servos (up to {drag:g})"
    )
    slips = held >= HELD and slip_m_s > SLIP_M_S * pool.view.scale.size
    return held >= HELD and not slips, measured, "impratio: 10, or timestep_s: 0.005" if slips else change


def _expert(pool: MujocoPool, robot: GripperDescription) -> Finding:
    _start(pool)
    for _ in range(pool.spec.max_episode_steps):
        step = pool.step(pool.task.expert())
    solved = int(step.episodes.success_at_end_M.sum()) / pool.num_envs
    measured = f"the scripted expert solves {solved:.1%} of {pool.num_envs} episodes, needed: {SOLVED:.0%}"
    change = "see the picture (picture=<file>.png)"
    if isinstance(robot, DescribedArm):
        change += f"; if the arm swings, {SERVOS}"
    return solved >= SOLVED, measured, change


def _start(pool: MujocoPool) -> None:
    pool.reset(make_sampler(pool))


def _steps(pool: MujocoPool) -> int:
    """Return the control steps of each part of a check; three parts fit into an episode."""
    return min(20, (pool.spec.max_episode_steps - 1) // 3)


def _step(pool: MujocoPool, action_NA: Tensor) -> None:
    for _ in range(_steps(pool)):
        pool.step(action_NA)
