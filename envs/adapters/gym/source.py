"""How environments of gymnasium are built: single ones, or the vector environment that a registration names.

Imports neither torch nor other modules of ``envs``, because the processes of ``processes`` need it.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from gymnasium.wrappers import TimeLimit

from embodied.core.errors import UserError, describe_error, one_line
from embodied.envs.adapters.gym.results import advice

Vector = VectorEnv[Any, Any, Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """How environments are built, and what is read from them."""

    name: str
    registration: Registration
    module: str | None
    """Module that registers it; None: gymnasium itself."""
    kwargs: dict[str, Any]
    max_episode_steps: int
    success: str | None = None
    """Key of ``info`` that says whether the episode succeeded; None: nothing does."""
    has_mask: bool = False
    """Whether it says which choices are allowed."""

    def build(self, render: bool) -> gymnasium.Env[Any, Any]:
        """Build one that can give pixels if ``render``. UserError if that fails.

        It has the time limit only below wrappers of its registration, which may read it; plans keep that limit anyway.
        """
        if self.registration.entry_point is None:
            return SingleEnvView(self.build_vector(1, render))
        with self.building():
            options = self.kwargs | ({"render_mode": "rgb_array"} if render else {})
            limit = self.max_episode_steps
            env = gymnasium.make(self.registration, max_episode_steps=limit, disable_env_checker=True, **options)
            return env.env if isinstance(env, TimeLimit) else env

    def build_vector(self, num_envs: int, render: bool) -> Vector:
        """Build the vector environment, one that leaves resets to us if it can. UserError if that fails."""
        with self.building():
            creator: Any = self.registration.vector_entry_point
            creator = load_env_creator(creator) if isinstance(creator, str) else creator
            options = self.kwargs | ({"render_mode": "rgb_array"} if render else {})
            if self.registration.max_episode_steps is not None:
                options["max_episode_steps"] = self.max_episode_steps
            options["vectorization_mode"] = "vector_entry_point"
            build = functools.partial(gymnasium.make_vec, self.registration, num_envs, **options)
            if "autoreset_mode" in inspect.signature(creator).parameters:
                try:
                    return build(autoreset_mode=AutoresetMode.DISABLED)
                except Exception as error:  # it may refuse the mode by any exception
                    log.info("task %s does not leave resets to us: %s", self.name, describe_error(error))
            return build()

    @property
    def takes_render_mode(self) -> bool:
        """Whether what builds a single one, if anything does, has the argument ``render_mode``."""
        creator: Any = self.registration.entry_point
        if creator is None:
            return True
        try:
            parameters = inspect.signature(
                load_env_creator(creator) if isinstance(creator, str) else creator
            ).parameters
        except ValueError:  # compiled code has none
            return True
        return "render_mode" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @contextmanager
    def building(self) -> Iterator[None]:
        """Import what registers them, and turn whatever is raised in the block into UserError.

        Warnings of MuJoCo are logged once: its compiler repeats them for every environment that is built.
        """
        is_ours = False
        try:
            if self.module is not None:
                import_module(self.module)
            mujoco = sys.modules.get("mujoco")
            if is_ours := mujoco is not None and mujoco.get_mju_user_warning() is None:
                mujoco.set_mju_user_warning(_warn_once)
            yield
        except gymnasium.error.DependencyNotInstalled as error:
            raise UserError(f"task {self.name} cannot be built: {one_line(error)}") from error
        except (Exception, SystemExit) as error:  # an environment of others may raise anything
            raise UserError(f"task {self.name} cannot be built: {describe_error(error)}{advice(error)}") from error
        finally:
            if is_ours:
                sys.modules["mujoco"].set_mju_user_warning(None)


def close(env: Any) -> None:
    """Close an environment. What it raises is logged, because nothing depends on it any more."""
    try:
        env.close()
    except (Exception, SystemExit) as error:  # an environment of others may raise anything
        log.warning("%s raised %s when it was closed", class_of(env), describe_error(error))


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("MuJoCo: %s", message)


class SingleEnvView(gymnasium.Env[Any, Any]):
    """The only environment of a vector environment as a single one, whatever the mode of its resets.

    SAME_STEP: the last observation and info are those that it has kept, and ``reset`` begins yet another episode. It
    gives no pictures then, because the one after the last step would show the wrong episode.
    """

    def __init__(self, env: Vector) -> None:
        self.vector, self.metadata = env, dict(env.metadata)
        self.mode = env.metadata.get("autoreset_mode")
        if self.mode == AutoresetMode.SAME_STEP:
            self.metadata["render_modes"] = []
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.vector.reset(seed=seed)
        return next(iterate(self.vector.observation_space, observations)), _first_info(infos)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, reward, terminated, truncated, infos = self.vector.step(np.stack([action]))
        if self.mode == AutoresetMode.SAME_STEP and (terminated[0] or truncated[0]):
            observation, infos = infos["final_obs"][0], infos.get("final_info", {})
        else:
            observation = next(iterate(self.vector.observation_space, observations))
        return observation, reward[0], terminated[0], truncated[0], _first_info(infos)

    def render(self) -> Any:
        frames = self.vector.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self.vector.close()


def class_of(env: gymnasium.Env[Any, Any]) -> str:
    """Return the name of an environment's class, with its module."""
    kind = type(env.vector.unwrapped if isinstance(env, SingleEnvView) else env.unwrapped)
    return f"{kind.__module__}.{kind.__qualname__}"


def _first_info(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the infos of a vector environment say of its first one (``_<key>`` says whether they do)."""
    return {
        key: values[0]
        for key, values in infos.items()
        if not key.startswith("_") and np.ndim(values) and bool(infos.get(f"_{key}", [True])[0])
    }
