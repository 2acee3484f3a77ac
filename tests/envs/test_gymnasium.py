"""The gymnasium ids: one env. Pools: test_gymnasium_pool.py."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence

from embodied.core.errors import UserError
from embodied.envs import TASKS, gymnasium_id
from embodied.envs.mujoco.viewer import SOLVED
from embodied.envs.rendering.cameras import Camera
from embodied.envs.views.gymnasium_api import TaskEnv

REACH = "embodied/Reach-v0"
TABLETOP = "embodied/Tabletop-v0"
SEEN: dict[str, Any] = {"cameras": ["front", "wrist"], "image_size": 16}
IDS = ["embodied/Reach-v0", "embodied/Push-v0", "embodied/Lift-v0", "embodied/PickPlace-v0", "embodied/Stack-v0"]


def test_every_task_has_an_id_and_its_time_limit() -> None:
    assert {gymnasium_id(task) for task in TASKS.names()} >= set(IDS)
    for task in TASKS.names():
        assert gymnasium.spec(gymnasium_id(task)).max_episode_steps == TASKS[task].config().max_episode_steps


@pytest.mark.parametrize("env_id", IDS)
def test_check_env_has_nothing_to_say(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(env_id)
        check_env(env.unwrapped)
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
    assert observation.dtype == np.float32
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


def test_render_shows_the_present_state_at_the_size_that_was_asked_for() -> None:
    env = gymnasium.make(REACH, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (480, 640, 3)
    assert picture.std() > 10
    env.step(np.ones(4, np.float32))
    moved = env.render()
    assert np.any(moved != picture)
    env.reset(seed=0)
    np.testing.assert_array_equal(env.render(), picture)
    assert env.metadata["render_fps"] == 20
    assert gymnasium.make(REACH, control_dt_s=0.1).metadata["render_fps"] == 10


@pytest.mark.parametrize("camera", ["front", "wrist"])
def test_render_shows_what_a_policy_sees(camera: str) -> None:
    size = {"width": 24, "height": 24, "image_size": 24}
    env = gymnasium.make(TABLETOP, cameras=[camera], camera=camera, render_mode="rgb_array", **size)
    for seed in range(3):  # objects of other shapes and colours
        observation, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(env.render(), observation[f"images_{camera}"])
        observation = env.step(env.action_space.sample())[0]
        np.testing.assert_array_equal(env.render(), observation[f"images_{camera}"])


def test_a_solved_task_has_a_green_border() -> None:
    env = gymnasium.make(REACH, success_m=9.0, render_mode="rgb_array", width=32, height=32)
    env.reset(seed=0)
    assert (env.render()[0] == SOLVED).all()


def test_bad_actions_of_one_env() -> None:
    env = TaskEnv("reach")
    env.reset(seed=0)
    for action in (np.zeros(3), np.zeros((1, 4)), np.full(4, np.inf)):
        with pytest.raises(ValueError, match="action"):
            env.step(action)


def test_bad_arguments_name_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'rgb_array'"):
        TaskEnv("reach", render_mode="rgb_aray")
    with pytest.raises(UserError, match="Did you mean 'overview'"):
        TaskEnv("reach", render_mode="rgb_array", camera="overvew")
    with pytest.raises(ValueError, match="num_envs"):
        gymnasium.make_vec(REACH, num_envs=0)
    with pytest.raises(UserError, match="num_threads: got -1, allowed: at least 0"):
        gymnasium.make_vec(REACH, num_threads=-1)
    with pytest.raises(UserError, match="reset_mask"):
        TaskEnv("reach").reset(options={"reset_mask": np.ones(1, bool)})
    with pytest.raises(UserError, match="flat: got True with the cameras front"):
        gymnasium.make(REACH, flat=True, cameras=["front"])


@pytest.mark.parametrize("make", [gymnasium.make, gymnasium.make_vec])
@pytest.mark.parametrize(("got", "meant"), [("sucess_m", "success_m"), ("imagesize", "image_size")])
def test_an_unknown_argument_is_an_error_in_pythons_words_too(make: Any, got: str, meant: str) -> None:
    for kind in (TypeError, UserError):
        message = rf"Env\(\) got an unexpected keyword argument '{got}': unknown option '{got}'. Did you mean '{meant}'"
        with pytest.raises(kind, match=message):
            make(REACH, **{got: 0.1})


def test_observations_are_a_vector_or_a_dictionary() -> None:
    vector, _ = gymnasium.make(REACH).reset(seed=0)
    named, _ = gymnasium.make(REACH, flat=False).reset(seed=0)
    assert vector.shape == (29,)
    assert set(named) == {"state"}
    np.testing.assert_array_equal(vector, named["state"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(REACH, flat=False).unwrapped, skip_render_check=True)


def test_stepping_before_reset_is_an_error() -> None:
    for env in (gymnasium.make(REACH), TaskEnv("reach"), TaskEnv("reach", render_mode="rgb_array")):
        with pytest.raises(ResetNeeded, match="reset"):
            env.step(np.zeros(4, np.float32))
        with pytest.raises(ResetNeeded, match="reset"):
            env.render()


def test_a_failed_episode_stays_as_it_ended_until_reset() -> None:
    env = gymnasium.make("embodied/Detour-v0", keep_out_m=0.4, render_mode="rgb_array", width=32, height=32)
    env.reset(seed=0)
    terminated = False
    while not terminated:
        before = env.render()
        terminated, truncated = env.step(np.array([1, 0, 0, 0], np.float32))[2:4]
        assert not truncated
    assert np.any(env.render() != before)
    np.testing.assert_array_equal(env.render(), env.render())
    with pytest.raises(ResetNeeded, match="the episode has ended in env 0"):
        env.step(np.zeros(4, np.float32))
    second, _ = env.reset()
    env.reset(seed=0)
    np.testing.assert_array_equal(env.reset()[0], second)  # the end of an episode skips none


@pytest.mark.parametrize("copied", [lambda env: pickle.loads(pickle.dumps(env)), deepcopy])
@pytest.mark.parametrize("options", [SEEN, {"render_mode": "rgb_array", "width": 16, "height": 16}])
def test_a_copy_goes_on_as_the_original(copied: Callable[[Any], Any], options: dict[str, Any]) -> None:
    env = gymnasium.make(TABLETOP, max_episode_steps=3, **options)
    fresh = copied(env)
    assert data_equivalence(fresh.reset(seed=1), env.reset(seed=1), exact=True)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 4)).astype(np.float32)
    env.step(actions[0])
    twin = copied(env)
    assert twin.spec == env.spec
    if "render_mode" in options:
        np.testing.assert_array_equal(twin.render(), env.render())
    for _ in range(2):
        for action in actions:
            assert data_equivalence(twin.step(action), env.step(action), exact=True)
        assert data_equivalence(twin.reset(), env.reset(), exact=True)
    env.close()
    twin.step(actions[0])  # has a simulation of its own
    with pytest.raises(ClosedEnvironmentError):
        copied(env).reset()


def test_episodes_start_with_the_cube_held_only_where_that_is_asked_for() -> None:
    for options, held in (({}, False), ({"held_starts": 1.0}, True)):
        pool = gymnasium.make_vec("embodied/Lift-v0", num_envs=16, num_threads=1, **options)
        observations, _ = pool.reset(seed=0)
        names = [name.partition("[")[0] for name in pool.unwrapped.pool.spec.state_names]
        at = names.index("cube_from_tcp")
        near = (abs(observations[:, at : at + 3]) < 0.02).all(1)
        assert near.all() if held else not near.any()
        pool.close()


def test_instructions_are_those_to_train_on_unless_told_otherwise() -> None:
    for options, expected in (({}, {"train"}), ({"splits": ("held_out",)}, {"held_out"})):
        env = gymnasium.make_vec("embodied/Tabletop-v0", num_envs=8, num_threads=1, **options)
        pool = env.unwrapped.pool
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
        assert env.observation_space["images_wrist"] == gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        env.close()


def test_cameras_by_name_are_square_and_others_as_they_are() -> None:
    above = Camera("above", width=12, height=8, pos=(0.5, 0.0, 1.2), lookat=(0.5, 0.01, 0.0))
    env = gymnasium.make(REACH, cameras=["front", above], image_size=16)
    observation, _ = env.reset(seed=0)
    assert {name: picture.shape for name, picture in observation.items() if name != "state"} == {
        "images_front": (16, 16, 3),
        "images_above": (8, 12, 3),
    }
    assert observation in env.observation_space
    env.close()


def test_one_camera_and_one_split_need_no_list() -> None:
    for make in (gymnasium.make, gymnasium.make_vec):
        env = make(REACH, cameras="front", splits="train", image_size=16)
        assert set(env.reset(seed=0)[0]) == {"state", "images_front"}
        env.close()


def test_an_env_that_diverged_gives_the_pictures_and_words_of_that_episode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env = TaskEnv("tabletop", sim={"dump_dir": str(tmp_path)}, **SEEN)
    told = env.reset(seed=0)[1]["instruction"]
    monkeypatch.setattr(env.pool.guard, "check", lambda raised: torch.tensor([True]))
    observation, _, _, truncated, info = env.step(np.zeros(4, np.float32))
    next_observation, next_info = env.reset()
    assert truncated
    assert info["instruction"] == told != next_info["instruction"]
    assert np.any(observation["images_front"] != next_observation["images_front"])
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


def test_an_env_has_words_where_there_is_more_than_one_goal() -> None:
    assert "instruction" not in gymnasium.make(REACH).reset(seed=0)[1]
    env = gymnasium.make(TABLETOP)
    _, info = env.reset(seed=0)
    instruction = info["instruction"]
    assert isinstance(instruction, str)
    assert instruction in env.unwrapped.pool.spec.texts
    assert env.step(np.zeros(4, np.float32))[4]["instruction"] == instruction
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": ["frnt"]}, r"unknown camera 'frnt'\. Did you mean 'front'\? Allowed: front, wrist"),
        ({"cameras": ["front"], "image_size": 0}, "image_size: got 0"),
        ({"camera": ["front"]}, r"camera: got \['front'\], allowed: a name or a Camera; what a policy sees is"),
    ],
)
def test_bad_cameras(options: dict[str, Any], message: str) -> None:
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(UserError, match=message):
            make(REACH, **options)
