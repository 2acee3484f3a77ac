"""The tasks as gymnasium environments ``embodied/Reach-v0``, ..., which ``embodied.envs`` registers.

``gymnasium.make(id)`` gives one env, ``make_vec(id, num_envs=n)`` the native pool, both with the keyword arguments of
``TaskVectorEnv``. gymnasium 1.x has no plugin entry points: write ``import embodied.envs`` first, or name the module in
the id, as in ``gymnasium.make("embodied.envs:embodied/Reach-v0")``.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.views.gymnasium_pool import Info, TaskVectorEnv
from embodied.envs.views.spaces import Observation, take_row
from embodied.envs.views.stepper import RENDER_MODES

_NO_LIMIT = 10**9  # control steps


class TaskEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """One env of a task, a ``TaskVectorEnv`` of one row and with its options. It terminates if the task fails and
    truncates if its simulation diverges. gymnasium's TimeLimit wrapper truncates at the time limit.
    """

    metadata: dict[str, Any] = {"render_modes": [*RENDER_MODES]}  # noqa: RUF012 (gymnasium's)

    def __init__(self, task: str, *, num_threads: int = 1, **options: Any) -> None:
        options = {"max_episode_steps": _NO_LIMIT, **options}
        self._envs = TaskVectorEnv(task, num_threads=num_threads, autoreset_mode=AutoresetMode.DISABLED, **options)
        self.render_mode, rate = self._envs.render_mode, self._envs.metadata["render_fps"]
        self.metadata = {**type(self).metadata, "render_fps": rate}
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space

    @property
    def pool(self) -> MujocoPool:
        """The pool of one env; ClosedEnvironmentError after ``close``."""
        return self._envs.pool

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start the first episode of ``seed``, or the next episode if it is None. UserError for any options."""
        if options:
            raise UserError(f"reset takes no options, got: {', '.join(map(str, options))}")
        super().reset(seed=seed)
        observation, infos = self._envs.reset(seed=[seed])
        return take_row(observation, 0), _of_one(infos)

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, Info]:
        """Make one control step; if action is not finite or not of shape [A], raise ValueError without stepping.

        ResetNeeded before ``reset`` and after an episode that ended.
        """
        observation, reward, terminated, truncated, infos = self._envs.step(np.asarray(action)[None])
        ends = bool(terminated[0]), bool(truncated[0])
        return take_row(observation, 0), float(reward[0]), *ends, _of_one(infos)

    def render(self) -> NDArray[np.uint8] | None:
        """Render an image [h, w, 3] if ``render_mode="rgb_array"``, with a green border while the task is solved."""
        images = self._envs.render()
        return None if images is None else images[0]

    def close(self) -> None:
        self._envs.close()


def _of_one(infos: Info) -> Info:
    """Return the infos of the only env, without masks."""
    own = {key: value for key, value in infos.items() if not key.startswith("_")}
    return {key: value[0] if value.ndim > 1 else value.tolist()[0] for key, value in own.items()}
