"""The gymnasium ids: API conformance, and that the native pool is what gymnasium's own vector env would be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from embodied.core.errors import UserError
from envs import TASKS, make_pool, make_sampler
from envs.rendering.cameras import Camera
from envs.rendering.vision import find_camera
from envs.views.gymnasium_api import TaskEnv, TaskVectorEnv, gymnasium_id

REACH = "embodied/Reach-v0"
TABLETOP = "embodied/Tabletop-v0"
SEEN: dict[str, Any] = {"cameras": ["front", "wrist"], "image_size": 16}
IDS = ["embodied/Reach-v0", "embodied/Push-v0", "embodied/Lift-v0", "embodied/PickPlace-v0", "embodied/Stack-v0"]


@pytest.fixture
def pool() -> Iterator[TaskVectorEnv]:
    envs = gymnasium.make_vec(REACH, num_envs=3, max_episode_steps=4, num_threads=1)
    assert isinstance(envs, TaskVectorEnv)
    yield envs
    envs.close()


def test_every_task_has_an_id_and_its_time_limit() -> None:
    assert {gymnasium_id(task) for task in TASKS.names()} >= set(IDS)
    for task in TASKS.names():
        assert gymnasium.spec(gymnasium_id(task)).max_episode_steps == TASKS[task].config().max_episode_steps


@pytest.mark.parametrize("env_id", IDS)
def test_check_env_has_nothing_to_say(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(env_id)
        check_env(env.unwrapped, skip_render_check=env_id != REACH)  # rendering takes long and is the same for all
        env.close()


def test_an_episode_is_truncated_at_the_time_limit_and_tells_success() -> None:
    env = gymnasium.make(REACH, goal_low_m=[0.61, -0.01, 0.16], goal_high_m=[0.62, 0.01, 0.18], success_m=0.5)
    _, info = env.reset(seed=0)
    assert info["success"] is True  # the goal is where the gripper starts
    limit = gymnasium.spec(REACH).max_episode_steps
    for step in range(1, limit + 1):
        observation, reward, terminated, truncated, info = env.step(np.zeros(4, np.float32))
        assert (terminated, truncated) == (False, step == limit)
    assert info["success"] is info["is_success"] is True
    assert reward == pytest.approx(1.0, abs=0.5)
    assert observation["state"].dtype == np.float32
    assert info["privileged"].shape == (1,)
    env.close()


def test_a_longer_time_limit_can_be_asked_for() -> None:
    env = gymnasium.make(REACH, max_episode_steps=50)
    env.reset(seed=0)
    truncated = [env.step(np.zeros(4, np.float32))[3] for _ in range(50)]
    assert truncated == [False] * 49 + [True]


def test_seeds_decide_episodes() -> None:
    env = gymnasium.make(REACH)
    first, second, other = env.reset(seed=1)[0], env.reset()[0], env.reset(seed=2)[0]
    assert data_equivalence(first, env.reset(seed=1)[0], exact=True)
    assert data_equivalence(second, env.reset()[0], exact=True)
    assert not data_equivalence(first, other)
    unseeded = [gymnasium.make(REACH).reset()[0] for _ in range(2)]
    assert not data_equivalence(*unseeded)


def test_render_gives_a_picture() -> None:
    env = gymnasium.make(REACH, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (480, 640, 3)
    assert picture.std() > 10
    assert env.metadata["render_fps"] == 20
    assert gymnasium.make(REACH, control_dt_s=0.1).metadata["render_fps"] == 10


@pytest.mark.parametrize(("env_id", "options"), [(REACH, {}), (TABLETOP, {}), (TABLETOP, SEEN)])
def test_native_pool_equals_gymnasiums_vector_env(env_id: str, options: dict[str, Any]) -> None:
    """Same seeds and actions: the same arrays, infos, masks and final observations, across autoresets."""
    pool = gymnasium.make_vec(env_id, num_envs=3, max_episode_steps=4, num_threads=1, **options)
    assert pool.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    singles = [lambda: gymnasium.make(env_id, max_episode_steps=4, **options) for _ in range(3)]
    reference = SyncVectorEnv(singles, autoreset_mode=AutoresetMode.SAME_STEP)
    assert reference.observation_space == pool.observation_space
    assert reference.action_space == pool.action_space
    assert data_equivalence(pool.reset(seed=5), reference.reset(seed=5), exact=True)
    actions = np.random.default_rng(0).uniform(-1, 1, (9, 3, 4)).astype(np.float32)
    ends = 0
    for action in actions:
        ours, theirs = pool.step(action), reference.step(action)
        *arrays, infos = ours
        *expected, expected_infos = theirs
        np.testing.assert_allclose(arrays[1], expected[1], rtol=1e-6)
        assert data_equivalence((arrays[0], *arrays[2:]), (expected[0], *expected[2:]), exact=True)
        assert infos.keys() == expected_infos.keys()
        if "final_obs" in infos:
            ends += 1
            for mine, other in zip(infos.pop("final_obs"), expected_infos.pop("final_obs"), strict=True):
                assert data_equivalence(mine, other, exact=True)
        assert data_equivalence(infos, expected_infos, exact=True)
    assert ends == 2
    pool.close()
    reference.close()


def test_rows_that_go_on_have_no_final_obs() -> None:
    envs = gymnasium.make_vec(REACH, num_envs=6, num_threads=1, stagger=True)
    envs.reset(seed=0)
    seen = 0
    for _ in range(40):
        observations, _, terminated, truncated, infos = envs.step(np.zeros((6, 4), np.float32))
        assert not terminated.any()
        assert ("final_obs" in infos) == truncated.any()
        for row in np.flatnonzero(truncated):
            assert not np.array_equal(infos["final_obs"][row]["state"], observations["state"][row])
        if truncated.any() and not truncated.all():
            seen += 1
            np.testing.assert_array_equal(infos["_final_obs"], truncated)
            np.testing.assert_array_equal(infos["final_info"]["_success"], truncated)
            assert all(infos["final_obs"][row] is None for row in np.flatnonzero(~truncated))
    assert seen > 0


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((3, 5)), r"got shape \(3, 5\), needed \(3, 4\)"),
        (np.zeros((3, 2, 4)), "needed"),
        (np.full((3, 4), np.nan), "NaN"),
    ],
)
def test_bad_actions_of_a_pool(pool: TaskVectorEnv, action: np.ndarray, message: str) -> None:
    before = pool.reset(seed=0)[0]["state"]
    with pytest.raises(ValueError, match=message):
        pool.step(action)
    np.testing.assert_array_equal(pool.reset(seed=0)[0]["state"], before)


def test_bad_actions_of_one_env() -> None:
    env = TaskEnv("reach")
    env.reset(seed=0)
    for action in (np.zeros(3), np.zeros((1, 4)), np.full(4, np.inf)):
        with pytest.raises(ValueError, match="action"):
            env.step(action)


def test_bad_arguments_name_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'success_m'"):
        gymnasium.make(REACH, sucess_m=0.1)
    with pytest.raises(UserError, match="Did you mean 'rgb_array'"):
        TaskEnv("reach", render_mode="rgb_aray")
    with pytest.raises(ValueError, match="num_envs"):
        gymnasium.make_vec(REACH, num_envs=0)
    with pytest.raises(UserError, match="reset_mask"):
        TaskEnv("reach").reset(options={"reset_mask": np.ones(1, bool)})


def test_a_closed_env_says_so(pool: TaskVectorEnv) -> None:
    pool.close()
    pool.close()
    with pytest.raises(ClosedEnvironmentError):
        pool.reset()


def test_episodes_start_with_the_cube_held_only_where_that_is_asked_for() -> None:
    for options, held in (({}, False), ({"held_starts": 1.0}, True)):
        pool = gymnasium.make_vec("embodied/Lift-v0", num_envs=16, num_threads=1, **options)
        observations, _ = pool.reset(seed=0)
        names = [name.partition("[")[0] for name in pool.unwrapped._simulated.pool.spec.state_names]
        at = names.index("cube_from_tcp")
        near = (abs(observations["state"][:, at : at + 3]) < 0.02).all(1)
        assert near.all() if held else not near.any()
        pool.close()


def test_instructions_are_those_to_train_on_unless_told_otherwise() -> None:
    for options, expected in (({}, {"train"}), ({"splits": ("held_out",)}, {"held_out"})):
        env = gymnasium.make_vec("embodied/Tabletop-v0", num_envs=8, num_threads=1, **options)
        pool = env.unwrapped._simulated.pool
        env.reset(seed=0)
        assert {pool.spec.splits[i] for i in pool.plans.instruction_n} == expected
        env.close()
    with pytest.raises(UserError, match="unknown split of the instructions 'test'"):
        gymnasium.make_vec("embodied/Tabletop-v0", num_envs=1, splits=("test",))


def test_check_env_has_nothing_to_say_of_pictures() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(TABLETOP, cameras=["front", "wrist"])
        check_env(env.unwrapped, skip_render_check=True)
        assert env.observation_space["images.wrist"] == gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        env.close()


def test_cameras_by_name_are_square_and_others_as_they_are() -> None:
    above = Camera("above", width=12, height=8, pos=(0.5, 0.0, 1.2), lookat=(0.5, 0.01, 0.0))
    env = gymnasium.make(REACH, cameras=["front", above], image_size=16)
    observation, _ = env.reset(seed=0)
    assert {name: picture.shape for name, picture in observation.items() if name != "state"} == {
        "images.front": (16, 16, 3),
        "images.above": (8, 12, 3),
    }
    assert observation in env.observation_space
    env.close()


def test_pictures_and_words_are_those_of_the_pool() -> None:
    """Also in ``final_obs`` and ``final_info``, which belong to the episode that ended."""
    cameras = [replace(find_camera(name), width=16, height=16) for name in SEEN["cameras"]]
    pool = make_pool("tabletop", {"max_episode_steps": 3}, num_envs=4, num_threads=1, cameras=cameras)
    sampler = make_sampler(pool, 1, stagger=True, splits=("train",))
    envs = gymnasium.make_vec(TABLETOP, num_envs=4, num_threads=1, max_episode_steps=3, stagger=True, **SEEN)
    expected, (observations, infos) = pool.reset(sampler), envs.reset(seed=1)
    names = ["images.front", "images.wrist"]
    ends, changed = 0, 0
    for action in np.random.default_rng(0).uniform(-1, 1, (4, 4, 4)).astype(np.float32):
        told = [pool.spec.texts[i] for i in expected["instruction"]]
        assert infos["instruction"].tolist() == told
        assert infos["_instruction"].all()
        for name in names:
            assert observations[name].std() > 10
            np.testing.assert_array_equal(observations[name], expected[name])
        step = pool.step(torch.from_numpy(action))
        expected, (observations, _, _, truncated, infos) = step.obs, envs.step(action)
        for i, row in enumerate(step.final_ids.tolist()):
            ends, changed = ends + 1, changed + (infos["instruction"][row] != told[row])
            assert infos["final_info"]["instruction"][row] == told[row]
            assert np.any(infos["final_obs"][row]["images.wrist"] != observations["images.wrist"][row])
            for name in names:
                np.testing.assert_array_equal(infos["final_obs"][row][name], step.final_obs[name][i])
        if truncated.any():
            np.testing.assert_array_equal(infos["final_info"]["_instruction"], truncated)
            assert all(infos["final_info"]["instruction"][row] is None for row in np.flatnonzero(~truncated))
    assert ends > 4
    assert changed > 0
    envs.close()


def test_an_env_that_diverged_gives_the_pictures_and_words_of_that_episode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env = TaskEnv("tabletop", sim={"dump_dir": str(tmp_path)}, **SEEN)
    told = env.reset(seed=0)[1]["instruction"]
    monkeypatch.setattr(env._simulated.pool.guard, "check", lambda raised: torch.tensor([0]))
    observation, _, _, truncated, info = env.step(np.zeros(4, np.float32))
    next_episode = env._simulated.pool.observe()
    assert truncated
    assert info["instruction"] == told != env._simulated.texts(next_episode["instruction"].numpy())[0]
    assert np.any(observation["images.front"] != next_episode["images.front"][0].numpy())
    env.close()


@pytest.mark.parametrize("vector", [False, True])
def test_what_was_handed_out_is_not_overwritten(vector: bool) -> None:
    make = gymnasium.make_vec if vector else gymnasium.make
    env = make(TABLETOP, max_episode_steps=2, **SEEN)
    handed_out: list[Any] = [env.reset(seed=0)]
    copies = deepcopy(handed_out)
    for action in np.random.default_rng(0).uniform(-1, 1, (2, *env.action_space.shape)).astype(np.float32):
        handed_out.append(env.step(action))
        copies.append(deepcopy(handed_out[-1]))
    env.reset()
    assert data_equivalence(handed_out, copies, exact=True)
    env.close()


def test_an_env_without_cameras_has_words_and_no_pictures() -> None:
    env = gymnasium.make(TABLETOP)
    observation, info = env.reset(seed=0)
    assert set(observation) == {"state"}
    instruction = info["instruction"]
    assert isinstance(instruction, str)
    assert instruction in env.unwrapped._simulated.pool.spec.texts
    assert env.step(np.zeros(4, np.float32))[4]["instruction"] == instruction
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": ["frnt"]}, r"unknown camera 'frnt'\. Did you mean 'front'\? Allowed: front, wrist"),
        ({"cameras": ["front"], "image_size": 0}, "image_size: got 0"),
    ],
)
def test_bad_cameras(options: dict[str, Any], message: str) -> None:
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(UserError, match=message):
            make(REACH, **options)
