"""Our environments as an ``IVecEnv`` of rl_games, with torch tensors; ``register`` makes them known to it.

A Runner's configuration has ``env_name: embodied`` and ``env_config``, the options of ``stepper.open_task``; rl_games
adds ``seed``. Set ``value_bootstrap: True``, so that truncated episodes are bootstrapped. A central value network gets
the privileged observations. docs/use_with.md has an example.
"""

from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.views.isaac_gym import IsaacGymTask
from embodied.envs.views.spaces import box_or_discrete
from embodied.envs.views.stepper import Stepper, missing_package, open_task

try:
    import gym  # rl_games compares spaces with those of gym, the predecessor of gymnasium
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv
except ModuleNotFoundError as error:
    raise missing_package("rl-games") from error

NAME = "embodied"


def make(task: str, num_envs: int, **options: Any) -> "RlGamesVecEnv":
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``."""
    return RlGamesVecEnv(open_task(task, num_envs, **options))


def register(name: str = NAME) -> None:
    """Make ``env_name: <name>`` known to rl_games. ``env_config`` of a configuration names the task."""
    vecenv.register(name, lambda config_name, num_actors, **config: _make(num_actors, config))
    env_configurations.register(name, {"vecenv_type": name, "env_creator": lambda **config: _make(1, config)})


def _make(num_actors: int, config: dict[str, Any]) -> "RlGamesVecEnv":
    """Return ``num_actors`` environments, or ``num_envs`` of ``env_config``. UserError without a task."""
    if "task" not in config:
        raise UserError("env_config: task is missing: give env_config: {task: lift}")
    return make(**{"num_envs": num_actors, **config})


class RlGamesVecEnv(IsaacGymTask, IVecEnv):
    """N environments whose steps return {"obs", "states"}, rewards [N], ends [N] and infos. Spaces are gym's.

    infos: those of ``IsaacGymTask.extras``, and ``scores`` [N], 1.0 where the task is solved. UserError for cameras.
    """

    def __init__(self, stepper: Stepper) -> None:
        super().__init__(stepper)
        self.observation_space = _gym_space(self.observation_space)
        self.action_space = _gym_space(self.action_space)
        self.state_space = _gym_space(self.state_space)

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        obs, rewards, dones, extras = super().step(actions)
        return obs, rewards, dones, {**extras, "scores": extras["successes"].float()}


def _gym_space(space: gymnasium.Space[Any]) -> Any:
    """Return a Box or Discrete of gymnasium as gym's. UserError for several choices."""
    space = box_or_discrete(space)
    if isinstance(space, gymnasium.spaces.Discrete):
        return gym.spaces.Discrete(int(space.n))
    return gym.spaces.Box(space.low, space.high, dtype=np.float32)
