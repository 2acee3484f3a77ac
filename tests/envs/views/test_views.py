"""Each view says of the same episodes what its library expects: ends, last observations, statistics."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ClosedEnvironmentError
from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode, VectorEnv

from embodied.core.errors import UserError
from embodied.envs.views import envpool, isaac_gym, lerobot
from embodied.envs.views.stepper import Stepper, open_task
from tests.envs.views.toy import ACTIONS, FAILED, FIRST, GO, INSTALL, LIMIT, SECOND, Toy, rows, toy

FRONT: dict[str, Any] = {"cameras": ["front"], "image_size": 8, "num_threads": 1}


# -- what all share ----------------------------------------------------------------------------------------------------
def test_an_episode_counts_from_its_beginning_and_next_ones_follow() -> None:
    stepper = toy()
    assert rows(stepper.reset()["state"]) == FIRST
    elapsed = []
    for action in ACTIONS:
        stepper.step(action)
        elapsed.append(rows(stepper.elapsed_N))
    assert elapsed == [[1, 1], [0, 2], [1, 0]]
    assert rows(stepper.reset()["state"]) == [[7, 2, 0], [8, 2, 0]]
    assert rows(stepper.reset(20)["state"]) == [[20, 0, 0], [21, 0, 0]]
    assert rows(stepper.reset([5, 3])["state"]) == [[5, 0, 0], [3, 0, 0]]


@pytest.mark.parametrize("name", ["rl_games", "envpool"])
def test_several_choices_are_refused_by_views_without_them(name: str) -> None:
    if name == "rl_games":
        pytest.importorskip("rl_games", reason=f"needs the trainers: {INSTALL}")
    view = importlib.import_module(f"embodied.envs.views.{name}")
    with pytest.raises(UserError, match=r"this view serves a Box or Discrete, got MultiDiscrete"):
        view.make("gym/tests.envs.toy_gym:Masked-v0", num_envs=2)


def test_an_episode_that_begins_late_ends_early() -> None:
    stepper = toy()
    stepper.reset(elapsed_N=torch.tensor([0, 2]))
    assert rows(stepper.elapsed_N) == [0, 2]
    assert rows(stepper.step([[GO], [GO]]).truncated_N) == [False, True]
    assert rows(stepper.elapsed_N) == [1, 0]
    stepper.reset()
    assert rows(stepper.step([[GO], [GO]]).truncated_N) == [False, False]


def test_one_camera_and_one_split_need_no_list() -> None:
    stepper = open_task("reach", 1, **FRONT | {"cameras": "front", "splits": "train"})
    assert stepper.reset()["images.front"].shape == (1, 8, 8, 3)
    stepper.close()
    with pytest.raises(UserError, match=r"unknown option 'camera'. Did you mean 'cameras'\?"):
        open_task("reach", 1, camera="front")


def test_a_simulator_stays_usable_after_steps_in_inference_mode() -> None:
    stepper = open_task("stack", 2, num_threads=1)
    with torch.inference_mode():
        stepper.reset()
        stepper.step(torch.zeros(2, stepper.spec.action_dim))
    stepper.step(torch.zeros(2, stepper.spec.action_dim, requires_grad=True))
    stepper.reset()


OF_TENSORS = ["isaac_gym", "rl_games", "rsl_rl"]  # begin their episodes when they are built
OF_ARRAYS = ["envpool", "lerobot", "sb3"]


def open_view(name: str, **options: Any) -> Any:
    """Two environments of tabletop in a view, with first episodes of different lengths."""
    packages = {"rl_games": "rl_games", "rsl_rl": "rsl_rl", "sb3": "stable_baselines3"}
    if name in packages:
        pytest.importorskip(packages[name], reason=f"needs the trainers: {INSTALL}")
    module = importlib.import_module(f"embodied.envs.views.{name}")
    view = module.make("tabletop", 2, num_threads=1, seed=4, stagger=True, max_episode_steps=4, **options)
    if name in OF_ARRAYS:
        view.reset()
    return view


@pytest.mark.parametrize("copied", [lambda view: pickle.loads(pickle.dumps(view)), deepcopy], ids=["pickle", "copy"])
@pytest.mark.parametrize("name", OF_TENSORS + OF_ARRAYS)
def test_a_copy_goes_on_as_the_original(name: str, copied: Callable[[Any], Any]) -> None:
    view, ended = open_view(name), 0
    count = 4 if name in ("envpool", "lerobot") else 3  # observations, rewards, and ends of one kind or of two
    for action in torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (5, 2, 4)).astype(np.float32)):
        twin = copied(view)
        ours, theirs = (each.step(action if name in OF_TENSORS else action.numpy()) for each in (twin, view))
        for mine, other in zip(ours[:count], theirs[:count], strict=True):
            np.testing.assert_equal(plain(mine), plain(other))
        ended += sum(int(each.sum()) for each in theirs[2:count])
    assert ended


def plain(values: Any) -> Any:
    """Return a dictionary of arrays, or an array."""
    return {key: plain(value) for key, value in values.items()} if hasattr(values, "items") else np.asarray(values)


@pytest.mark.parametrize("name", [*OF_TENSORS, "lerobot", "sb3"])  # the view of EnvPool has no images
def test_a_view_is_rendered_as_the_gymnasium_pool_is(name: str) -> None:
    """With its fast renderer, also where the first image is asked for within an episode."""
    pool = gymnasium.make_vec(
        "embodied.envs:embodied/Tabletop-v0", num_envs=2, num_threads=1, max_episode_steps=4, stagger=True,
        render_mode="rgb_array",
    )  # fmt: skip
    pool.reset(seed=[4, 5])
    view = open_view(name, **({"render_mode": "rgb_array"} if name in ("sb3", "lerobot") else {}))
    action = torch.zeros(2, 4)
    for _ in range(2):
        images = view.get_images() if name == "sb3" else view.render()
        np.testing.assert_array_equal(np.stack(images), np.stack(pool.render()))
        pool.step(action.numpy())
        view.step(action if name in OF_TENSORS else action.numpy())


def test_what_cannot_be_copied_says_so() -> None:
    with pytest.raises(UserError, match="the environments of 'toy' cannot be copied: they cannot restore a state"):
        deepcopy(toy())
    view = open_view("envpool")
    view.async_reset()
    with pytest.raises(UserError, match="call recv first"):
        pickle.dumps(view)


def test_bad_input_is_one_line() -> None:
    stepper = toy()
    with pytest.raises(ValueError, match="render before the first reset"):
        stepper.frames()
    with pytest.raises(ValueError, match="step before the first reset"):
        stepper.step(ACTIONS[0])
    stepper.reset()
    with pytest.raises(ValueError, match=r"action: got shape \(2, 3\), needed \(2, 1\)"):
        stepper.step(np.zeros((2, 3)))
    for seed in ([1, 2, 3], [1, 2.5], 1.5, 2**63, -1):
        with pytest.raises(UserError, match="seed: got"):
            stepper.reset(seed)
    stepper.close()
    stepper.close()
    with pytest.raises(ClosedEnvironmentError):
        stepper.reset()
    with pytest.raises(UserError, match=r"unknown task 'lft'\. Did you mean 'lift'"):
        isaac_gym.make("lft", num_envs=2)
    with pytest.raises(UserError, match=r"unknown option 'max_episode_step'\. Did you mean 'max_episode_steps'"):
        isaac_gym.make("lift", num_envs=2, max_episode_step=3)
    with pytest.raises(UserError, match="num_envs: got 0"):
        isaac_gym.make("lift", num_envs=0)
    for view, options in ((isaac_gym, {}), (envpool, {"batch_size": 2})):
        with pytest.raises(UserError, match="num_threads: got -1, allowed: at least 0"):
            view.make("gym/CartPole-v1", num_envs=4, num_threads=-1, **options)
    for view, options in ((isaac_gym, {}), (envpool, {"batch_size": 2})):
        for seed in (1.5, -1, 2**63, 2**63 - 2, None, "7"):
            with pytest.raises(UserError, match=r"^seed: got .*, allowed: an integer, at least 0 and at most \d{19}$"):
                view.make("reach", num_envs=4, seed=seed, **options)
        with pytest.raises(UserError, match="splits: got none, allowed: held_out, train, or None"):
            view.make("tabletop", num_envs=4, splits=(), **options)
    with pytest.raises(UserError, match="cameras: Isaac Gym's API has no images"):
        isaac_gym.make("reach", num_envs=1, **FRONT)
    with pytest.raises(UserError, match="render_mode"):
        lerobot.make("reach", num_envs=1, render_mode="human")


@pytest.mark.parametrize(
    ("view", "module", "package"),
    [
        ("sb3", "stable_baselines3.common.monitor", "stable-baselines3"),
        ("rsl_rl", "rsl_rl.env", "rsl-rl-lib"),
        ("rl_games", "rl_games.common", "rl-games"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_command(
    view: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"embodied.envs.views.{view}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    with pytest.raises(UserError, match=f"{package} is not installed: pip install -c constraints.txt"):
        importlib.import_module(f"embodied.envs.views.{view}")


# -- Isaac Gym ---------------------------------------------------------------------------------------------------------
def test_isaac_gym_buffers() -> None:
    env = isaac_gym.IsaacGymTask(toy())
    assert (env.num_envs, env.num_obs, env.num_states, env.num_acts, env.max_episode_length) == (2, 3, 4, 1, LIMIT)
    assert env.get_env_info()["state_space"].shape == (4,)
    env.step(torch.tensor(ACTIONS[0]))
    assert rows(env.states_buf) == [[7, 0, 1, 10], [8, 0, 1, 10]]
    obs, reward, reset, extras = env.step(torch.tensor(ACTIONS[1]))
    assert rows(obs["obs"]) == rows(env.obs_buf) == [SECOND, [8, 0, 2]]
    assert rows(reward) == [2, 2]
    assert rows(reset) == [1, 0]
    assert rows(env.progress_buf) == [0, 2]
    assert rows(extras["time_outs"]) == [False, False]
    assert rows(extras["final_obs"]) == [FAILED]
    assert extras["episode"] == {"return": 3, "length": 2, "success": 0}
    assert rows(env.reset_done()[1]) == [0]
    _, _, reset, extras = env.step(torch.tensor(ACTIONS[2]))
    assert rows(reset) == [0, 1]
    assert rows(extras["time_outs"]) == rows(env.timeout_buf) == [False, True]
    assert rows(extras["successes"]) == [False, True]
    assert rows(extras["final_states"]) == [[8, 0, 3, 30]]
    env.close()


# -- EnvPool -----------------------------------------------------------------------------------------------------------
def test_envpool_returns_the_last_observation_and_then_the_first() -> None:
    env = envpool.EnvPoolView([toy(autoreset=AutoresetMode.NEXT_STEP)])
    obs, info = env.reset()
    assert rows(obs) == FIRST
    env.step(np.array(ACTIONS[0]))
    obs, reward, terminated, truncated, info = env.step(np.array(ACTIONS[1]), env.all_env_ids)
    assert rows(obs) == [FAILED, [8, 0, 2]]
    assert (rows(terminated), rows(truncated), rows(info["elapsed_step"])) == ([True, False], [False, False], [2, 2])
    obs, reward, terminated, truncated, info = env.step({"action": np.array(ACTIONS[2]), "env_id": env.all_env_ids})
    assert rows(obs) == [SECOND, [8, 0, 3]]
    assert (rows(reward), rows(terminated), rows(truncated)) == ([0, 3], [False, False], [False, True])
    assert (rows(info["elapsed_step"]), rows(info["success"])) == ([0, 3], [False, True])
    obs, info = env.reset(np.array([1]))
    assert rows(obs) == [[8, 1, 0]]
    assert rows(info["env_id"]) == [1]
    obs, info = env.reset(np.array([1, 0]))
    assert [row[0] for row in rows(obs)] == [7, 8], "in the order of the ids that info has"
    assert rows(info["env_id"]) == [0, 1]
    env.close()


def test_envpool_batches_are_received_and_sent_as_they_come() -> None:
    env = envpool.EnvPoolView([Stepper(Toy(2), seed=2 * i, autoreset=AutoresetMode.NEXT_STEP) for i in range(3)])
    assert (len(env), env.is_async, env.config["batch_size"], env.spec.config.num_envs) == (6, True, 2, 6)
    with pytest.raises(ValueError, match="nothing was sent"):
        env.recv()
    env.async_reset()
    steps = dict.fromkeys(range(6), 0)
    for _ in range(9):
        obs, _, _, _, info = env.recv()
        ids = info["env_id"]
        assert rows(obs) == [[i, *divmod(steps[i], LIMIT + 1)] for i in ids]  # a batch may come more often than others
        for i in ids:
            steps[int(i)] += 1
        env.send(np.full((2, 1), GO), ids)
    with pytest.raises(ValueError, match="env_id: got"):
        env.send(np.zeros((2, 1)), np.array([0, 3]))
    with pytest.raises(ValueError, match="use async_reset"):
        env.reset()
    env.close()
    with pytest.raises(UserError, match="batch_size: got 3, allowed: divisors of num_envs, 4"):
        envpool.make("reach", 4, batch_size=3)


@pytest.mark.parametrize("ids", [[True, False], [1, 1], [2], [-1], [], [[0, 1]], [0.0]], ids=str)
def test_envpool_resets_only_envs_that_it_has(ids: list[Any]) -> None:
    env = envpool.EnvPoolView([toy(autoreset=AutoresetMode.NEXT_STEP)])
    with pytest.raises(ValueError, match="before the first reset"):
        env.reset(np.array([1]))
    env.reset()
    with pytest.raises(ValueError, match=r"^env_id: got \[.*, needed different integers from 0 to 1$"):
        env.reset(np.array(ids))
    assert rows(env.reset()[0]) == [[7, 1, 0], [8, 1, 0]], "none of them was reset"
    env.close()


def test_envpool_takes_one_action_of_a_batch_at_a_time() -> None:
    env = envpool.EnvPoolView([Stepper(Toy(2), seed=2 * i, autoreset=AutoresetMode.NEXT_STEP) for i in range(2)])
    env.async_reset()
    first, second = env.recv(), env.recv()
    env.send(np.full((2, 1), GO), first[-1]["env_id"])
    with pytest.raises(ValueError, match="under way"):
        env.send(np.full((2, 1), GO), first[-1]["env_id"])
    env.send(np.full((2, 1), GO), second[-1]["env_id"])
    assert [rows(env.recv()[-1]["elapsed_step"]) for _ in range(2)] == [[1, 1], [1, 1]]
    env.send(np.full((2, 1), GO), first[-1]["env_id"])
    env.close()


def test_an_error_of_a_batch_comes_out_of_recv() -> None:
    env = envpool.EnvPoolView([toy(autoreset=AutoresetMode.NEXT_STEP)])
    env.reset()
    env.send(np.full((2, 1), np.nan))
    with pytest.raises(ValueError, match="NaN"):
        env.recv()
    env.step(np.array(ACTIONS[0]))
    env.close()


def test_a_view_refuses_environments_that_are_not_stepped_together() -> None:
    pytest.importorskip("envpool", reason="pip install -c constraints.txt -e '.[envpool]'")
    with pytest.raises(UserError, match=r"sim\.batch_size: a view steps all its environments together"):
        open_task("envpool/CartPole-v1", 4, sim={"batch_size": 2})


def test_envpool_behaves_as_envpool_itself() -> None:
    real_envpool = pytest.importorskip("envpool", reason="pip install -c constraints.txt -e '.[envpool]'")
    real = real_envpool.make("HalfCheetah-v5", env_type="gymnasium", num_envs=2, max_episode_steps=LIMIT)
    ours = envpool.make("reach", 2, max_episode_steps=LIMIT, num_threads=1)
    seen = []
    for env in (real, ours):
        obs, info = env.reset()
        lines = [(obs.shape[0], info["env_id"].dtype, rows(info["elapsed_step"]))]
        for _ in range(2 * LIMIT + 2):
            action = np.zeros((2, *env.action_space.shape), env.action_space.dtype)
            _, reward, terminated, truncated, info = env.step(action, info["env_id"])
            lines.append((rows(info["elapsed_step"]), rows(reward == 0), rows(terminated), rows(truncated)))
            lines.append((reward.dtype, terminated.dtype, truncated.dtype, rows(info["env_id"])))
        seen.append(lines)
        assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        assert env.spec.observation_space.shape == env.observation_space.shape == obs.shape[1:]
        env.close()
    assert seen[0] == seen[1]


def test_envpool_observations_with_cameras_are_nested() -> None:
    env = envpool.make("reach", 2, **FRONT)
    obs, _ = env.reset()
    assert isinstance(env.observation_space, Dict)
    assert obs["images"]["front"].shape == (2, 8, 8, 3)
    env.close()


# -- LeRobot -----------------------------------------------------------------------------------------------------------
def test_lerobot_infos_of_ends() -> None:
    env = lerobot.LeRobotVectorEnv(toy())
    obs, info = env.reset(seed=[7, 8], options={"lerobot_new_rollout": True})
    assert rows(obs["agent_pos"]) == FIRST
    assert "final_info" not in env.step(np.array(ACTIONS[0]))[-1]
    obs, _, terminated, truncated, info = env.step(np.array(ACTIONS[1]))
    assert rows(obs["agent_pos"]) == [SECOND, [8, 0, 2]]
    assert (rows(terminated), rows(truncated)) == ([True, False], [False, False])
    assert rows(info["final_obs"][0]["agent_pos"]) == FAILED
    assert info["final_obs"][1] is None
    assert rows(info["final_info"]["is_success"]) == [False, False]
    info = env.step(np.array(ACTIONS[2]))[-1]
    assert rows(info["final_info"]["is_success"]) == [False, True]
    assert rows(info["_final_info"]) == [False, True]
    with pytest.raises(UserError, match="reset takes no options but"):
        env.reset(options={"x": 1})
    env.close()


def test_a_rollout_as_lerobot_makes_it() -> None:
    """The calls of ``rollout`` in lerobot/scripts/lerobot_eval.py, versions 0.4 and later."""
    env = lerobot.make("tabletop", num_envs=2, max_episode_steps=4, **FRONT)
    assert isinstance(env, VectorEnv)
    assert env.unwrapped.metadata["render_fps"] == 20
    observation, _ = env.reset(seed=[3, 4])
    assert env.observation_space.contains(observation)
    done, steps, successes = np.zeros(2, bool), 0, [False, False]
    assert env.call("_max_episode_steps")[0] == 4
    assert all(hasattr(env.envs[0], name) for name in ("task", "task_description"))
    with pytest.raises(AttributeError):
        env.get_attr("no_such_thing")
    while not done.all():
        task = list(env.call("task_description"))
        assert all(isinstance(text, str) and len(text.split()) > 3 for text in task)
        assert observation["pixels"]["front"].dtype == np.uint8
        assert observation["agent_pos"].dtype == np.float32
        observation, _, terminated, truncated, info = env.step(env.action_space.sample())
        if "final_info" in info:
            successes = info["final_info"]["is_success"].tolist()
        done = terminated | truncated | done
        steps += 1
    assert steps == 4
    assert successes == [False, False]
    assert list(env.call("task")) == ["tabletop", "tabletop"]
    assert env.call("render")[1].shape == (480, 640, 3)
    assert env.envs[0].render().shape == (480, 640, 3)
    env.close()
