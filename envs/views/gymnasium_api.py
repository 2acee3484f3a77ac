"""The tasks as gymnasium environments ``embodied/Reach-v0``, ``embodied/PickPlace-v0``, ...; ``envs`` registers them.

    gymnasium.make(id)                   one env; the time limit is gymnasium's TimeLimit wrapper, as everywhere
    gymnasium.make_vec(id, num_envs=n)   the native pool, SAME_STEP autoreset

gymnasium 1.x has no plugin entry points: write ``import envs`` first, or name the module in the id, as in
``gymnasium.make("envs:embodied/Reach-v0")``.

Observations are ``{"state": float32 [S]}``. Their bounds are those beyond which the engine calls a state diverged.
``info`` describes the state that it is returned with:

    privileged           float32 [P], simulator state for critics that policies do not observe
    success, is_success  whether the task is solved; stable-baselines3 reads the second name
    instruction          text of the episode's instruction

With ``cameras=["front", "wrist"]``, names in ``envs.rendering.vision.CAMERAS``, observations also have the images
``images.<name>``, uint8 [h, w, 3], ``image_size`` pixels wide and high. ``state`` then has only the terms that the
robot measures; the others are in ``info["privileged"]``.

Keyword arguments of ``make`` and ``make_vec`` are the task's options (``cube_mass_kg=0.1``,
``control={"mode": "joint_delta"}``), ``sim`` (options of SimConfig), ``splits`` of the instructions that episodes come
from (by default those to train on), ``cameras``, ``image_size``, ``num_threads`` and ``render_mode``. An unknown one is
a ValueError that names the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from embodied.core.episodes import Ints
from embodied.core.spec import TRAIN
from envs.registry import TASKS
from envs.rendering.cameras import Camera
from envs.views.simulated import (
    METADATA,
    Observation,
    SimulatedTask,
    cameras_of,
    check_shape,
    policy_obs,
    spaces,
    take_row,
)

Info = dict[str, Any]

_NO_LIMIT = 2**31 - 1  # control steps; more than three years


class TaskEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """One env of a task. It terminates if the task fails and truncates if its simulation diverges.

    gymnasium's TimeLimit wrapper truncates at the time limit.

    task: name in the registry of tasks. cameras: names, ``image_size`` pixels wide and high, or Camera objects.
    UserError (a ValueError) for an unknown task, option, camera or render mode.
    """

    metadata = METADATA

    def __init__(
        self,
        task: str,
        *,
        num_threads: int = 1,
        sim: dict[str, Any] | None = None,
        splits: Sequence[str] = (TRAIN,),
        cameras: Sequence[str | Camera] = (),
        image_size: int = 64,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self._simulated = SimulatedTask(
            task, {"max_episode_steps": _NO_LIMIT, **options}, 1, num_threads, sim, render_mode, splits,
            cameras_of(cameras, image_size),
        )  # fmt: skip
        self.render_mode = render_mode
        self.metadata = self._simulated.metadata
        self.observation_space, self.action_space = spaces(self._simulated.pool.spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start the first episode of ``seed``, or the next episode if it is None. ValueError for any options."""
        super().reset(seed=seed)
        obs = self._simulated.reset(seed, options, self.np_random)
        pool = self._simulated.pool
        info = self._info(obs["privileged"], pool.task.success(), pool.plans.instruction_n)
        return take_row(policy_obs(obs), 0), info

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, Info]:
        """Make one control step; if action is not finite or not of shape [A], raise ValueError without stepping."""
        pool = self._simulated.pool
        step = pool.step(check_shape(action, self.action_space)[None])
        terminated, truncated = bool(step.terminated_N[0]), bool(step.truncated_N[0])
        ended = terminated or truncated
        obs = step.final_obs if ended else step.obs
        plans = step.episodes.plans if ended else pool.plans
        info = self._info(obs["privileged"], step.info["success"], plans.instruction_n)
        return take_row(policy_obs(obs), 0), float(step.reward_N[0]), terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        """Render an image [h, w, 3] if ``render_mode="rgb_array"``, with a green border while the task is solved."""
        return None if self.render_mode is None else self._simulated.frames()[0]

    def close(self) -> None:
        """Release the simulation."""
        self._simulated.close()

    def _info(self, privileged_1P: torch.Tensor, success_1: torch.Tensor, instruction_1: Ints) -> Info:
        """Return ``info`` of the only env."""
        success = bool(success_1[0])
        text = self._simulated.texts(instruction_1)[0]
        return {"privileged": privileged_1P[0].numpy(), "success": success, "is_success": success, "instruction": text}


class TaskVectorEnv(VectorEnv[Observation, NDArray[np.float32], NDArray[Any]]):
    """N envs of a task in one batch of simulations, with arrays of N rows.

    ``infos`` have the form of gymnasium's own vector envs: every array has a mask of the same name with ``_`` in front.
    For rows that ended there are ``final_obs`` (an array of objects, None in other rows) and ``final_info``.

    num_threads: threads that step the simulations (0: all cores). stagger: first episodes are cut short by random
    times. cameras, image_size: as in TaskEnv.
    """

    metadata: dict[str, Any] = {**METADATA, "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (gymnasium's)

    def __init__(
        self,
        task: str,
        *,
        num_envs: int = 1,
        num_threads: int = 0,
        sim: dict[str, Any] | None = None,
        splits: Sequence[str] = (TRAIN,),
        stagger: bool = False,
        cameras: Sequence[str | Camera] = (),
        image_size: int = 64,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self._simulated = SimulatedTask(
            task, options, num_envs, num_threads, sim, render_mode, splits, cameras_of(cameras, image_size), stagger
        )
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.metadata = {**self._simulated.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = spaces(self._simulated.pool.spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start new episodes in all envs; env i has seed ``seed + i``. ValueError for any options."""
        super().reset(seed=seed)
        obs = self._simulated.reset(seed, options, self.np_random)
        pool = self._simulated.pool
        texts = self._simulated.texts(pool.plans.instruction_n)
        return policy_obs(obs), self._infos(obs["privileged"], pool.task.success(), texts)

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[Observation, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """Make one control step; if actions are not finite or not [N, A], raise ValueError without stepping."""
        pool = self._simulated.pool
        step = pool.step(check_shape(actions, self.action_space))
        success_N, ended = step.info["success"], step.final_ids
        texts_N = self._simulated.texts(pool.plans.instruction_n)
        if len(ended) == 0:
            infos = self._infos(step.obs["privileged"], success_N, texts_N)
        else:
            ended_N = step.terminated_N | step.truncated_N
            now_N = torch.where(ended_N, pool.task.success(), success_N)
            infos = self._infos(step.obs["privileged"], now_N, texts_N)
            mask_N = ended_N.numpy()
            final_obs, final_texts = (np.full(self.num_envs, None, dtype=object) for _ in range(2))
            final = policy_obs(step.final_obs)
            for i, row in enumerate(ended.tolist()):
                final_obs[row] = take_row(final, i)
            final_texts[ended.numpy()] = self._simulated.texts(step.episodes.plans.instruction_n)
            privileged_NP = torch.zeros_like(step.obs["privileged"])
            privileged_NP[ended] = step.final_obs["privileged"]
            final_info = self._infos(privileged_NP, success_N & ended_N, final_texts, mask_N)
            infos |= {"final_obs": final_obs, "_final_obs": mask_N, "final_info": final_info, "_final_info": mask_N}
        reward_N = step.reward_N.double().numpy()
        return policy_obs(step.obs), reward_N, step.terminated_N.numpy(), step.truncated_N.numpy(), infos

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Render an image [h, w, 3] of every env if ``render_mode="rgb_array"``."""
        return None if self.render_mode is None else tuple(self._simulated.frames())

    def close_extras(self, **kwargs: Any) -> None:
        """Release the simulations."""
        self._simulated.close()

    def _infos(
        self,
        privileged_NP: torch.Tensor,
        success_N: torch.Tensor,
        texts_N: NDArray[np.object_],
        mask_N: NDArray[np.bool_] | None = None,
    ) -> Info:
        """Return ``infos`` with their masks; ``mask_N``: rows that are valid (None: all)."""
        success = success_N.numpy()
        values = {
            "privileged": privileged_NP.numpy(), "success": success, "is_success": success, "instruction": texts_N,
        }  # fmt: skip
        masks = {f"_{key}": np.ones(self.num_envs, bool) if mask_N is None else mask_N.copy() for key in values}
        return {key: value.copy() for key, value in values.items()} | masks


def gymnasium_id(task: str) -> str:
    """Return the gymnasium id of a task: ``pick_place`` → ``embodied/PickPlace-v0``."""
    return f"embodied/{''.join(word.capitalize() for word in task.split('_'))}-v0"


def register_tasks() -> None:
    """Register every task with gymnasium. Called when ``envs`` is imported."""
    for task in TASKS.names():
        gymnasium.register(
            gymnasium_id(task),
            entry_point=f"{__name__}:{TaskEnv.__name__}",
            vector_entry_point=f"{__name__}:{TaskVectorEnv.__name__}",
            max_episode_steps=TASKS[task].config().max_episode_steps,
            kwargs={"task": task},
        )
