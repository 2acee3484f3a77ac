"""Views for libraries that may be missing, of the same episodes as in ``test_views``."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec
from tests.envs.views.toy import ACTIONS, FAILED, FIRST, INSTALL, LIMIT, SECOND, rows, toy


def test_stable_baselines3_infos_of_ends() -> None:
    pytest.importorskip("stable_baselines3", reason=INSTALL)
    from stable_baselines3.common.monitor import Monitor

    from embodied.envs.views import sb3

    env = sb3.Sb3VecEnv(toy())
    assert isinstance(env.observation_space, Box)
    assert rows(env.reset()) == FIRST
    assert env.step(np.array(ACTIONS[0]))[3] == [{}, {}]
    obs, reward, done, infos = env.step(np.array(ACTIONS[1]))
    assert (rows(obs), rows(reward), rows(done)) == ([SECOND, [8, 0, 2]], [2, 2], [True, False])
    assert rows(infos[0]["terminal_observation"]) == FAILED
    assert (infos[0]["TimeLimit.truncated"], infos[0]["is_success"], infos[1]) == (False, False, {})
    _, _, done, infos = env.step(np.array(ACTIONS[2]))
    assert (infos[1]["TimeLimit.truncated"], infos[1]["is_success"]) == (True, True)
    assert (infos[1]["episode"]["r"], infos[1]["episode"]["l"]) == (6, 3)
    env.seed(30)
    assert rows(env.reset()) == [[30, 0, 0], [31, 0, 0]]
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.get_attr("render_mode", [0]) == [None]
    with pytest.raises(AttributeError, match="no objects"):
        env.env_method("compute_reward")
    with pytest.raises(UserError, match="set_attr"):
        env.set_attr("x", 1, indices=[0])
    env.close()


def test_options_of_a_reset_are_refused_by_the_view_of_stable_baselines3() -> None:
    pytest.importorskip("stable_baselines3", reason=INSTALL)
    from embodied.envs.views import sb3

    env = sb3.Sb3VecEnv(toy())
    env.set_options()
    env.set_options({})
    with pytest.raises(UserError, match="set_options: got options of a reset, allowed: none"):
        env.set_options({"difficulty": 2})
    env.reset()


def test_stable_baselines3_masks() -> None:
    """They are what MaskablePPO of sb3-contrib asks for."""
    pytest.importorskip("stable_baselines3", reason=INSTALL)
    from embodied.envs.views import sb3

    with contextlib.closing(sb3.make("gym/tests.envs.toy_gym:Masked-v0", num_envs=2)) as env:
        assert env.has_attr("action_masks")
        env.reset()
        assert [row.tolist() for row in env.env_method("action_masks")] == [[True, False, True, True, False]] * 2
        env.step(np.array([[2, 0], [0, 0]]))
        (mask,) = env.env_method("action_masks", indices=[1])
        assert mask.tolist() == [True, True, True, True, False]
    with contextlib.closing(sb3.make("gym/CartPole-v1", num_envs=1)) as env:
        assert not env.has_attr("action_masks")


def test_stable_baselines3_learns_from_images_and_instructions() -> None:
    pytest.importorskip("stable_baselines3", reason=INSTALL)
    from stable_baselines3 import PPO

    from embodied.envs.views import sb3

    env = sb3.make("tabletop", num_envs=2, max_episode_steps=3, cameras=[CameraSpec.square("wrist", 36)], num_threads=1)
    model = PPO("MultiInputPolicy", env, n_steps=4, batch_size=8, n_epochs=1, device="cpu").learn(8)
    assert {"state", "images_wrist", "instruction"} == set(model.policy.observation_space.spaces)
    env.close()


def test_rsl_rl_extras_of_ends() -> None:
    pytest.importorskip("rsl_rl", reason=INSTALL)
    from embodied.envs.views import rsl_rl

    env = rsl_rl.RslRlVecEnv(toy())
    assert (env.num_envs, env.num_actions, env.max_episode_length) == (2, 1, LIMIT)
    assert rows(env.get_observations()["policy"]) == FIRST
    env.step(torch.tensor(ACTIONS[0]))
    obs, _, dones, extras = env.step(torch.tensor(ACTIONS[1]))
    assert (rows(obs["policy"]), rows(obs["privileged"])) == ([SECOND, [8, 0, 2]], [[0], [20]])
    assert (rows(dones), rows(extras["time_outs"]), rows(env.episode_length_buf)) == ([1, 0], [False, False], [0, 2])
    assert extras["log"] == {"/episode/return": 3, "/episode/length": 2, "/episode/success": 0}
    assert rows(env.step(torch.tensor(ACTIONS[2]))[3]["time_outs"]) == [False, True]
    env.episode_length_buf = torch.tensor([2, 0])
    assert rows(env.episode_length_buf) == [2, 0]
    assert rows(env.step(torch.tensor(ACTIONS[0]))[2]) == [1, 0]
    env.close()


def test_rsl_rl_observes_images_and_instructions() -> None:
    pytest.importorskip("rsl_rl", reason=INSTALL)
    from embodied.envs.views import rsl_rl

    env = rsl_rl.make("tabletop", num_envs=2, cameras=["front"], image_size=8, num_threads=1)
    obs = env.get_observations()
    assert obs["front"].shape == (2, 3, 8, 8)
    assert float(obs["front"].max()) <= 1
    assert rows(obs["instruction"].sum(-1)) == [1, 1]
    env.close()


def test_rl_games_finds_the_environments_by_name() -> None:
    pytest.importorskip("rl_games", reason=INSTALL)
    from rl_games.common import env_configurations, vecenv

    from embodied.envs.views import rl_games

    rl_games.register("toys")
    env = vecenv.create_vec_env("toys", 3, task="reach", seed=4, num_threads=1, max_episode_steps=2)
    info = env.get_env_info()
    assert type(info["action_space"]).__module__.startswith("gym.")  # not gymnasium's, which rl_games does not know
    assert info["observation_space"].shape == (29,)
    assert env.reset()["states"].shape == (3, 30)
    env.step(torch.zeros(3, 4))
    _, _, dones, infos = env.step(torch.zeros(3, 4))
    assert (rows(dones), rows(infos["time_outs"]), rows(infos["scores"])) == ([1, 1, 1], [True, True, True], [0, 0, 0])
    env.close()
    player = env_configurations.configurations["toys"]["env_creator"](task="reach", num_threads=1)
    assert player.reset()["obs"].shape == (1, 29)
    player.close()
    with pytest.raises(UserError, match="env_config: task is missing"):
        vecenv.create_vec_env("toys", 3)
