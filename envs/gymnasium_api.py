"""The tasks as gymnasium environments ``embodied/Reach-v0``, ``embodied/PickPlace-v0``, ...; ``envs`` registers them.

    gymnasium.make(id)                   one env; the time limit is gymnasium's TimeLimit wrapper, as everywhere
    gymnasium.make_vec(id, num_envs=n)   the native pool, SAME_STEP autoreset

gymnasium 1.x has no plugin entry points: write ``import envs`` first, or name the module in the id, as in
``gymnasium.make("envs:embodied/Reach-v0")``.

Observations are ``{"state": float32 [S]}``, what a policy may see. What only a simulator knows is not among them: it
is ``info["privileged"]``, float32 [P], for critics. ``info["success"]``, also under the name ``is_success`` that
stable-baselines3 reads, tells whether the task is solved in the state that ``info`` belongs to. Bounds of observations
are those beyond which the engine itself calls a state diverged.

Keyword arguments of ``make`` and ``make_vec`` are the task's options (``cube_mass_kg=0.1``,
``control={"mode": "joint_delta"}``), ``sim`` (options of SimConfig), ``splits`` of the instructions that episodes come
from (by default those to train on), ``num_threads`` and ``render_mode``; a wrong one is a ValueError that names the
nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from embodied.core.config import from_mapping
from embodied.core.errors import UserError, unknown_name
from embodied.core.types import TRAIN, EnvSpec, Obs
from envs.appearance import Viewer
from envs.pool import MujocoPool, SimConfig
from envs.registry import TASKS

Observation = dict[str, NDArray[np.float32]]
Info = dict[str, Any]

METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}
_NO_LIMIT = 2**31 - 1  # control steps; more than three years


class PandaEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """One env of a task. Never terminates; truncated only if its simulation diverges (TimeLimit does the rest).

    task: name in the registry of tasks. UserError (a ValueError) for an unknown task, option or render mode.
    """

    metadata = METADATA

    def __init__(
        self,
        task: str,
        *,
        num_threads: int = 1,
        sim: dict[str, Any] | None = None,
        splits: Sequence[str] = (TRAIN,),
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self._simulated = _Simulated(
            task, {"max_episode_steps": _NO_LIMIT, **options}, 1, num_threads, sim, render_mode, splits
        )
        self.render_mode = render_mode
        self.metadata = self._simulated.metadata
        self.observation_space, self.action_space = _spaces(self._simulated.pool.spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """The first episode of ``seed``, or the one after the present one. There are no options: ValueError."""
        super().reset(seed=seed)
        obs = self._simulated.reset(seed, options, self.np_random)
        return {"state": obs["state"][0].numpy()}, self._info(obs["privileged"], self._simulated.pool.task.success())

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, Info]:
        """One control step. ValueError if action is not finite or not of shape [A]; nothing is executed then."""
        step = self._simulated.pool.step(_checked(action, self.action_space)[None])
        truncated = bool(step.truncated_N[0])
        obs = step.final_obs if truncated else step.obs
        info = self._info(obs["privileged"], step.info["success"])
        return {"state": obs["state"][0].numpy()}, float(step.reward_N[0]), False, truncated, info

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """A picture [h, w, 3] if ``render_mode="rgb_array"``, with a green frame while the task is solved."""
        return None if self.render_mode is None else self._simulated.frames()[0]

    def close(self) -> None:
        self._simulated.close()

    @staticmethod
    def _info(privileged_1P: torch.Tensor, success_1: torch.Tensor) -> Info:
        success = bool(success_1[0])
        return {"privileged": privileged_1P[0].numpy(), "success": success, "is_success": success}


class PandaVectorEnv(VectorEnv[Observation, NDArray[np.float32], NDArray[Any]]):
    """N envs of a task in one batch of simulations, with arrays of N rows.

    ``infos`` are those of gymnasium's own vector envs: arrays with a mask of the same name and ``_`` before it, and for
    rows that ended ``final_obs`` (an array of objects, None in other rows) and ``final_info``.
    num_threads: that step the simulations, 0 for all cores. stagger: first episodes start at different elapsed times.
    """

    metadata: ClassVar[dict[str, Any]] = {**METADATA, "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        task: str,
        *,
        num_envs: int = 1,
        num_threads: int = 0,
        sim: dict[str, Any] | None = None,
        splits: Sequence[str] = (TRAIN,),
        stagger: bool = False,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self._simulated = _Simulated(task, options, num_envs, num_threads, sim, render_mode, splits, stagger)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.metadata = {**self._simulated.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = _spaces(self._simulated.pool.spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """New episodes everywhere; env i starts from seed + i. There are no options: ValueError."""
        super().reset(seed=seed)
        obs = self._simulated.reset(seed, options, self.np_random)
        success_N = self._simulated.pool.task.success()
        return {"state": obs["state"].numpy()}, self._infos(obs["privileged"], success_N)

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[Observation, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """One control step of all envs. ValueError if actions are not finite or not [N, A]; then nothing happened."""
        pool = self._simulated.pool
        step = pool.step(_checked(actions, self.action_space))
        success_N, ended = step.info["success"], step.final_ids
        if len(ended) == 0:
            infos = self._infos(step.obs["privileged"], success_N)
        else:
            infos = self._infos(step.obs["privileged"], torch.where(step.truncated_N, pool.task.success(), success_N))
            mask_N = step.truncated_N.numpy()
            final_obs = np.full(self.num_envs, None, dtype=object)
            for row, state in zip(ended.tolist(), step.final_obs["state"].numpy(), strict=True):
                final_obs[row] = {"state": state}
            privileged_NP = torch.zeros_like(step.obs["privileged"])
            privileged_NP[ended] = step.final_obs["privileged"]
            final_info = self._infos(privileged_NP, success_N & step.truncated_N, mask_N)
            infos |= {"final_obs": final_obs, "_final_obs": mask_N, "final_info": final_info, "_final_info": mask_N}
        reward_N = step.reward_N.double().numpy()
        return (
            {"state": step.obs["state"].numpy()},
            reward_N,
            step.terminated_N.numpy(),
            step.truncated_N.numpy(),
            infos,
        )

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:  # type: ignore[override]
        """A picture [h, w, 3] of every env if ``render_mode="rgb_array"``."""
        return None if self.render_mode is None else tuple(self._simulated.frames())

    def close_extras(self, **kwargs: Any) -> None:
        self._simulated.close()

    def _infos(
        self, privileged_NP: torch.Tensor, success_N: torch.Tensor, mask_N: NDArray[np.bool_] | None = None
    ) -> Info:
        values = {"privileged": privileged_NP.numpy(), "success": success_N.numpy(), "is_success": success_N.numpy()}
        masks = {f"_{key}": np.ones(self.num_envs, bool) if mask_N is None else mask_N.copy() for key in values}
        return {key: value.copy() for key, value in values.items()} | masks


class _Simulated:
    """A pool that may be closed, and how it is reset and looked at."""

    def __init__(
        self,
        task: str,
        options: dict[str, Any],
        num_envs: int,
        num_threads: int,
        sim: dict[str, Any] | None,
        render_mode: str | None,
        splits: Sequence[str],
        stagger: bool = False,
    ) -> None:
        if render_mode is not None and render_mode not in METADATA["render_modes"]:
            raise unknown_name("render_mode", str(render_mode), METADATA["render_modes"])
        entry = TASKS[task]
        config = from_mapping(entry.config, options)
        self._pool: MujocoPool | None = MujocoPool(
            entry.build(config), num_envs=num_envs, num_threads=num_threads,
            sim=from_mapping(SimConfig, sim or {}, "sim"), stagger=stagger,
            held_starts=config.held_starts if "held_starts" in options else 0.0,  # the default is for training
            splits=splits,
        )  # fmt: skip
        self._viewer: Viewer | None = None
        self._seeded = False
        self.metadata = {**METADATA, "render_fps": round(1 / self._pool.spec.control_dt_s)}

    @property
    def pool(self) -> MujocoPool:
        if self._pool is None:
            raise ClosedEnvironmentError("the environment was closed")
        return self._pool

    def reset(self, seed: int | None, options: dict[str, Any] | None, random: np.random.Generator) -> Obs:
        """New episodes. Without any seed so far, one is drawn from ``random``."""
        if options:
            raise UserError(f"reset takes no options, got: {', '.join(map(str, options))}")
        if seed is None and not self._seeded:
            seed = int(random.integers(2**31))
        self._seeded = True
        return self.pool.reset(seed)

    def frames(self) -> NDArray[np.uint8]:
        """Pictures of all envs, [N, h, w, 3]."""
        if self._viewer is None:
            self._viewer = Viewer(self.pool)
        return self._viewer.render()

    def close(self) -> None:
        self._pool = self._viewer = None


def _spaces(spec: EnvSpec) -> tuple[Dict, Box]:
    """Spaces of one env: observation and action."""
    limit = np.full(spec.state_dim, mujoco.mjMAXVAL, np.float32)
    return Dict({"state": Box(-limit, limit)}), Box(-1.0, 1.0, (spec.action_dim,))


def _checked(action: ArrayLike, space: gymnasium.Space[Any]) -> torch.Tensor:
    """The action as a tensor of the space's shape; the pool checks its values."""
    array = np.asarray(action, dtype=np.float32)
    if array.shape != space.shape:
        raise ValueError(f"action: got shape {array.shape}, needed {space.shape}")
    return torch.from_numpy(array)


def gymnasium_id(task: str) -> str:
    """``pick_place`` → ``embodied/PickPlace-v0``"""
    return f"embodied/{''.join(word.capitalize() for word in task.split('_'))}-v0"


def register_tasks() -> None:
    """Give every registered task its gymnasium id. Called when ``envs`` is imported."""
    for task in TASKS.names():
        gymnasium.register(
            gymnasium_id(task),
            entry_point=f"{__name__}:{PandaEnv.__name__}",
            vector_entry_point=f"{__name__}:{PandaVectorEnv.__name__}",
            max_episode_steps=TASKS[task].config().max_episode_steps,
            kwargs={"task": task},
        )
