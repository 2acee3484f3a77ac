"""The gymnasium ids: API conformance, and that the native pool is what gymnasium's own vector env would be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from embodied.core.errors import UserError
from envs import TASKS
from envs.gymnasium_api import PandaEnv, PandaVectorEnv, gymnasium_id

REACH = "embodied/Reach-v0"
IDS = ["embodied/Reach-v0", "embodied/Push-v0", "embodied/Lift-v0", "embodied/PickPlace-v0", "embodied/Stack-v0"]


@pytest.fixture
def pool() -> Iterator[PandaVectorEnv]:
    envs = gymnasium.make_vec(REACH, num_envs=3, max_episode_steps=4, num_threads=1)
    assert isinstance(envs, PandaVectorEnv)
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


def test_native_pool_equals_gymnasiums_vector_env(pool: PandaVectorEnv) -> None:
    """Same seeds and actions: the same arrays, infos, masks and final observations, across autoresets."""
    assert pool.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    singles = [lambda: gymnasium.make(REACH, max_episode_steps=4) for _ in range(3)]
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
def test_bad_actions_of_a_pool(pool: PandaVectorEnv, action: np.ndarray, message: str) -> None:
    before = pool.reset(seed=0)[0]["state"]
    with pytest.raises(ValueError, match=message):
        pool.step(action)
    np.testing.assert_array_equal(pool.reset(seed=0)[0]["state"], before)


def test_bad_actions_of_one_env() -> None:
    env = PandaEnv("reach")
    env.reset(seed=0)
    for action in (np.zeros(3), np.zeros((1, 4)), np.full(4, np.inf)):
        with pytest.raises(ValueError, match="action"):
            env.step(action)


def test_bad_arguments_name_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'success_m'"):
        gymnasium.make(REACH, sucess_m=0.1)
    with pytest.raises(UserError, match="Did you mean 'rgb_array'"):
        PandaEnv("reach", render_mode="rgb_aray")
    with pytest.raises(ValueError, match="num_envs"):
        gymnasium.make_vec(REACH, num_envs=0)
    with pytest.raises(UserError, match="reset_mask"):
        PandaEnv("reach").reset(options={"reset_mask": np.ones(1, bool)})


def test_a_closed_env_says_so(pool: PandaVectorEnv) -> None:
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
        assert {pool.spec.instruction_splits[i] for i in pool.task.instruction_N} == expected
        env.close()
    with pytest.raises(UserError, match="unknown split of the instructions 'test'"):
        gymnasium.make_vec("embodied/Tabletop-v0", num_envs=1, splits=("test",))
