"""No length in a task is a bare number: a robot twice as large has the same rewards, success and expert."""

from __future__ import annotations

import re
from dataclasses import asdict, field, replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml

from embodied.core.options import PositiveInt, config_dataclass, from_mapping
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.tasks.config import LiftConfig, TabletopConfig
from embodied.envs.tasks.words import default_words
from tests.envs.helpers import TASK_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "robot.md"
TIMES = 2.0
LENGTHS = r'((?:pos|size|fromto|range|ctrlrange)=")([^"]*)(")'


def gantry(folder: Path, times: float) -> str:
    """Write the gantry of the page as large as ``times`` says."""
    mjcf, data = re.findall(r"```(?:xml|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]

    def scaled(found: re.Match[str]) -> str:
        return found[1] + " ".join(str(times * float(x)) for x in found[2].split()) + found[3]

    lines = [line if "yaw" in line else re.sub(LENGTHS, scaled, line) for line in mjcf.splitlines()]
    (folder / f"{times:g}.xml").write_text("\n".join(lines))
    robot = yaml.safe_load(data) | {"mjcf": f"{times:g}.xml", "spread": 0.0, "reach_m": 0.75 * times}
    robot["home"] = {name: value * times for name, value in robot["home"].items()}
    robot["gripper"] |= {"open": 0.04 * times, "closed": -0.01 * times}
    low, high = np.array([0.25, -0.35, 0.012]) * times, np.array([0.75, 0.35, 0.45]) * times
    robot["control"] = {"delta_m": 0.06 * times, "workspace_low_m": low.tolist(), "workspace_high_m": high.tolist()}
    (folder / f"{times:g}.yaml").write_text(yaml.safe_dump(robot))
    return str(folder / f"{times:g}.yaml")


def copy_larger(small: MujocoPool, large: MujocoPool) -> None:
    """Put the large simulations where the small ones are."""
    for joint in range(small.model.njnt):
        at, free = small.model.jnt_qposadr[joint], small.model.jnt_type[joint] == 0
        angle = not free and small.model.jnt_type[joint] == 3
        columns = slice(at, at + 3 if free else at + 1)
        large.view.qpos[:, columns] = small.view.qpos[:, columns] * (1.0 if angle else TIMES)
        if free:
            large.view.qpos[:, at + 3 : at + 7] = small.view.qpos[:, at + 3 : at + 7]
    for pool in (small, large):
        pool.view.qvel[:] = 0
        pool.batch.forward()
        pool.view.changed()
    fingers = ~np.isin(np.arange(small.model.nu), joint_servos(small))
    large.arm.ctrl[:, fingers] = small.arm.ctrl[:, fingers] * TIMES


def joint_servos(pool: MujocoPool) -> list[int]:
    return [servo for arm in pool.arm.arms or [pool.arm] for servo in arm.parts.arm.servos]


@pytest.mark.parametrize("task", [*TASK_NAMES, "lift_bar"])
def test_a_robot_twice_as_large_has_the_same_rewards_success_and_expert(tmp_path: Path, task: str) -> None:
    def build(times: float) -> MujocoPool:
        robot = gantry(tmp_path, times)
        options = {"robots": {"left": robot, "right": robot}} if task == "lift_bar" else {"robot": robot}
        return make_pool(task, options, num_envs=8, num_threads=1)

    small, large = build(1.0), build(TIMES)
    for pool in (small, large):
        pool.reset(make_sampler(pool, seed=0))
    assert large.model.opt.gravity[2] == small.model.opt.gravity[2]
    for _ in range(12):
        copy_larger(small, large)
        one, other = ({**pool.task.rewards(pool.task.success())} for pool in (small, large))
        for name in one:
            torch.testing.assert_close(
                one[name], other[name], atol=0.02, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
            )
        assert torch.equal(small.task.success(), large.task.success())
        torch.testing.assert_close(small.task.expert(), large.task.expert(), atol=0.02, rtol=0)
        for _ in range(3):
            small.step(small.task.expert())


def test_a_slow_tool_has_more_time_and_a_given_limit_wins() -> None:
    slow = {"delta_m": 0.01}
    assert LiftConfig(control=slow).max_episode_steps == 64
    assert LiftConfig(robot="so101").max_episode_steps == 64
    assert LiftConfig(robot="so101", control=slow).max_episode_steps == 174
    for given in (50, 64):  # 64 is the Panda's
        chosen = LiftConfig(robot="so101", control=slow, max_episode_steps=given)
        assert chosen.max_episode_steps == given
        assert from_mapping(LiftConfig, asdict(chosen)) == chosen


def test_a_task_of_a_user_has_the_time_that_its_robot_needs_unless_a_limit_is_given() -> None:
    @config_dataclass
    class Short(LiftConfig):
        max_episode_steps: PositiveInt = 40

    @config_dataclass
    class Same(Short):
        pass

    @config_dataclass
    class OfField(LiftConfig):
        max_episode_steps: PositiveInt = field(default=40)

    slow = {"delta_m": 0.01}
    for config in (Short, Same, OfField):
        assert config().max_episode_steps == 40
        assert config(robot="so101", control=slow).max_episode_steps == 109
        assert config(robot="so101", control=slow, max_episode_steps=40).max_episode_steps == 40
        assert type(config().max_episode_steps) is int


@pytest.mark.parametrize("limit", [None, 3, 64, 70])
def test_gymnasium_s_env_and_pool_have_the_same_time_limit(limit: int | None) -> None:
    options = {"control": {"delta_m": 0.01}} | ({} if limit is None else {"max_episode_steps": limit})
    one = gymnasium.make("embodied/SO101Lift-v0", **options)
    many = gymnasium.make_vec("embodied/SO101Lift-v0", num_envs=1, **options)
    one.reset(seed=0)
    many.reset(seed=0)
    for step in range(1, (limit or 64) + 1):
        alone, together = (env.step(np.zeros(env.action_space.shape, np.float32)) for env in (one, many))
        assert alone[3] == together[3][0] == (step == (limit or 64)), step


def test_words_of_a_user_leave_the_other_lengths_to_the_robot(tmp_path: Path) -> None:
    robot, words = gantry(tmp_path, TIMES), default_words()
    plain = TabletopConfig(robot=robot).words
    assert plain.shapes != words.shapes
    own = replace(words, colors=words.colors | {"purple": (0.5, 0.1, 0.6)}, trays=words.trays | {"left": (1.1, 0.4)})
    found = TabletopConfig(robot=robot, words=own).words
    assert found.shapes == plain.shapes
    assert found.trays == plain.trays | {"left": (1.1, 0.4)}
    assert TabletopConfig(robot=robot, words=found).words == found, "as read from a run"
