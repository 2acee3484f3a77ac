"""stable-baselines3's PPO."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn

from embodied.benchmarks.peers.meter import Finished, MeteredEnv, PPOSettings
from embodied.core.spec import Box, Discrete


class SB3Env(VecEnv):
    """stable-baselines3's view of N envs: SAME_STEP resets, the last observation of an episode in its info."""

    def __init__(self, env: MeteredEnv) -> None:
        spec = env.spec
        observed = spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32)
        if isinstance(spec.action, Box):
            acts: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)
        else:
            assert isinstance(spec.action, Discrete)
            acts = spaces.Discrete(spec.action.n)
        super().__init__(env.num_envs, observed, acts)
        self.env = env

    def reset(self) -> NDArray[np.float32]:
        return self.env.reset()["state"].numpy()

    def step_async(self, actions: NDArray[Any]) -> None:
        self.actions = torch.from_numpy(actions.reshape(self.num_envs, -1))

    def step_wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        step = self.env.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row, state in zip(step.final_ids.tolist(), step.final_obs["state"].numpy(), strict=True):
            infos[row] = {"terminal_observation": state, "TimeLimit.truncated": bool(step.truncated_N[row])}
        done_N = (step.terminated_N | step.truncated_N).numpy()
        return step.obs["state"].numpy(), step.reward_N.numpy(), done_N, infos

    def close(self) -> None:
        """Nothing: who built the envs closes them."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs  # asked for render_mode alone

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> Sequence[bool]:
        return [False] * self.num_envs


def train(env: MeteredEnv, settings: PPOSettings) -> None:
    """Train until the meter ends it."""
    hidden = list(settings.hidden)
    network = {"net_arch": {"pi": hidden, "vf": hidden}, "activation_fn": nn.ReLU}
    if isinstance(env.spec.action, Box):
        network["log_std_init"] = math.log(settings.init_std)
    trainer = PPO(
        "MlpPolicy",
        VecNormalize(SB3Env(env), norm_reward=False),
        n_steps=settings.decisions,
        batch_size=settings.num_envs * settings.decisions // settings.num_minibatches,
        n_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        clip_range=settings.clip_range,
        vf_coef=settings.value_coef,
        ent_coef=settings.entropy_coef,
        max_grad_norm=settings.max_grad_norm,
        policy_kwargs=network,
        seed=settings.seed,
        device="cpu",
    )
    with contextlib.suppress(Finished):
        trainer.learn(10**12)
