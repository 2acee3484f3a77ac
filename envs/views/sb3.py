"""Our environments as a ``VecEnv`` of stable-baselines3, in one batch of simulations (example: docs/use_with.md).

An observation is the state vector. With ``cameras=["front"]`` it is a dictionary for ``MultiInputPolicy``: ``state``,
``images_front`` and ``instruction`` (stable-baselines3 allows no dot in a key).
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.types import Obs
from embodied.envs.views.spaces import Form, Observation, action_space, success_of, take_row
from embodied.envs.views.stepper import Stepper, check_render_mode, missing_package, open_task

try:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv
except ModuleNotFoundError as error:
    raise missing_package("stable-baselines3") from error


def make(task: str, num_envs: int, *, render_mode: str | None = None, **options: Any) -> "Sb3VecEnv":
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``."""
    return Sb3VecEnv(open_task(task, num_envs, **options), render_mode)


class Sb3VecEnv(VecEnv):
    """N environments. An env that is done has begun its next episode.

    The infos of an env that is done have ``terminal_observation``, ``TimeLimit.truncated``, ``is_success`` and
    ``episode`` (as of a Monitor: return ``r``, length ``l`` and seconds ``t``); other infos are empty.
    """

    def __init__(self, stepper: Stepper, render_mode: str | None = None) -> None:
        self.stepper, self.render_mode = stepper, check_render_mode(render_mode)
        self._began = time.monotonic()
        self._masks = np.zeros((stepper.num_envs, 0), dtype=np.bool_)
        self._form = Form(stepper.spec, flat=not stepper.spec.cameras, instruction=True)
        super().__init__(stepper.num_envs, self._form.space, action_space(stepper.spec))

    def reset(self) -> Observation:
        """Start an episode in every env, with the seeds given to ``seed`` since the last reset."""
        seeds = [seed for seed in self._seeds if seed is not None]
        obs = self.stepper.reset(seeds or None)
        self._reset_seeds()
        self._reset_options()
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        return self._seen(obs)

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Raise UserError for options: an episode follows from its seed alone. None and empty ones change nothing."""
        super().set_options(options)
        if any(self._options):
            self._reset_options()
            raise UserError("set_options: got options of a reset, allowed: none; an episode follows from its seed")

    def step_async(self, actions: NDArray[Any]) -> None:
        self._actions = np.asarray(actions)

    def step_wait(self) -> tuple[Observation, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Make one control step; return observations, rewards [N], dones [N] and infos."""
        step = self.stepper.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        seconds = round(time.monotonic() - self._began, 6)
        success_N, episodes, final = success_of(step), step.episodes, self._form(step.final_obs)
        for i, env in enumerate(step.final_ids.tolist()):
            infos[env] = {
                "terminal_observation": take_row(final, i),
                "TimeLimit.truncated": bool(step.truncated_N[env]),
                "is_success": bool(success_N[env]),
                "episode": {"r": float(episodes.return_M[i]), "l": int(episodes.length_M[i]), "t": seconds},
            }
        done_N = (step.terminated_N | step.truncated_N).cpu().numpy()
        return self._seen(step.obs), step.reward_N.cpu().numpy(), done_N, infos

    def close(self) -> None:
        self.stepper.close()

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """Render every env, N images [480, 640, 3], if ``render_mode="rgb_array"``."""
        return [None] * self.num_envs if self.render_mode is None else list(self.stepper.frames())

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of this object for each of ``indices``; ``action_masks``, if any, for MaskablePPO."""
        if attr_name == "action_masks" and self.stepper.spec.action_mask:
            return self.env_method(attr_name, indices=indices)
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute for all envs. UserError for some of them: they share one batch of simulations."""
        if len([*self._get_indices(indices)]) != self.num_envs:
            raise UserError(f"set_attr('{attr_name}'): got some of the envs, allowed: all, which share one object")
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Return the allowed choices of each env for ``action_masks``, bool [choices]; AttributeError for others."""
        if method_name == "action_masks" and self.stepper.spec.action_mask:
            return [self._masks[env] for env in self._get_indices(indices)]
        raise AttributeError(f"env_method('{method_name}'): the envs of a pool are no objects")

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Return True for Monitor, whose statistics are in the infos, and False for other wrappers."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]

    def _seen(self, obs: Obs) -> Observation:
        """Return observations of all envs in the observation space, and keep their masks."""
        if self.stepper.spec.action_mask:
            self._masks = obs["action_mask"].cpu().numpy()
        return self._form(obs)
