"""rsl_rl's PPO."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from embodied.benchmarks.peers.meter import Finished, MeteredEnv, PPOSettings


class RslRlEnv(VecEnv):
    """rsl_rl's view of N envs. It has no last observations: it bootstraps a truncation with the value before it."""

    def __init__(self, env: MeteredEnv) -> None:
        self.env, self.device = env, "cpu"
        self.cfg: dict[str, Any] = {}
        self.num_envs, self.num_actions = env.num_envs, env.spec.action_dim
        self.max_episode_length = env.spec.max_episode_steps
        self.episode_length_buf = torch.zeros(env.num_envs, dtype=torch.long)
        self._observed = self._observations(env.reset()["state"])

    def get_observations(self) -> TensorDict:
        return self._observed

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        step = self.env.step(actions)
        self._observed = self._observations(step.obs["state"])
        done_N = step.terminated_N | step.truncated_N
        return self._observed, step.reward_N, done_N.long(), {"time_outs": step.truncated_N}

    def _observations(self, state: Tensor) -> TensorDict:
        return TensorDict({"policy": state}, batch_size=[self.num_envs])


def train(env: MeteredEnv, settings: PPOSettings) -> None:
    """Train until the meter ends it. Not for discrete actions, which rsl_rl does not have."""
    torch.manual_seed(settings.seed)
    network = {
        "class_name": "MLPModel", "hidden_dims": list(settings.hidden), "activation": "relu", "obs_normalization": True,
    }  # fmt: skip
    distribution = {"class_name": "GaussianDistribution", "init_std": settings.init_std}
    config = {
        "num_steps_per_env": settings.decisions,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": network | {"distribution_cfg": distribution},
        "critic": dict(network),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": settings.epochs,
            "num_mini_batches": settings.num_minibatches,
            "learning_rate": settings.learning_rate,
            "schedule": "fixed",
            "gamma": settings.gamma,
            "lam": settings.gae_lambda,
            "clip_param": settings.clip_range,
            "value_loss_coef": settings.value_coef,
            "use_clipped_value_loss": False,
            "entropy_coef": settings.entropy_coef,
            "max_grad_norm": settings.max_grad_norm,
        },
    }
    runner = OnPolicyRunner(RslRlEnv(env), config)
    with contextlib.suppress(Finished):
        runner.learn(10**9)
