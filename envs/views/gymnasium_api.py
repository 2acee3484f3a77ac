"""The tasks as gymnasium environments ``embodied/Reach-v0``, ``embodied/PickPlace-v0``, ..., which ``embodied.envs``
registers.

    gymnasium.make(id)                   one env; the time limit is gymnasium's TimeLimit wrapper, as everywhere
    gymnasium.make_vec(id, num_envs=n)   the native pool; ``autoreset_mode`` is SAME_STEP unless chosen otherwise

gymnasium 1.x has no plugin entry points: write ``import embodied.envs`` first, or name the module in the id, as in
``gymnasium.make("embodied.envs:embodied/Reach-v0")``.

Observations are the state, float32 [S], so that ``PPO("MlpPolicy", id)`` works. Their bounds are those beyond which the
engine calls a state diverged. With ``cameras=["front", "wrist"]``, names in ``embodied.envs.rendering.vision.CAMERAS``,
they are ``{"state": ..., "images_front": uint8 [h, w, 3], ...}``, with ``image_size`` pixels in width and height.
``state`` then has only the terms that the robot measures; the others are in ``info["privileged"]``. ``flat=False``
gives a dictionary without cameras too.

``info`` describes the state that it is returned with:

    privileged           float32 [P], simulator state for critics that policies do not observe
    success, is_success  whether the task is solved; stable-baselines3 reads the second name
    instruction          text of the episode's instruction, in tasks with more than one goal

``render_mode="rgb_array"`` renders ``camera`` (``overview``, the name of a policy's camera, or a Camera), ``width`` and
``height`` pixels, with a green border while the task is solved.

Keyword arguments of ``make`` and ``make_vec`` are the task's options (``cube_mass_kg=0.1``,
``control={"mode": "joint_delta"}``), ``sim`` (options of SimConfig), ``splits`` of the instructions that episodes come
from (by default those to train on), and those of the constructors below. An unknown one is a TypeError that names the
nearest. ``pickle`` and ``copy.deepcopy`` copy an env with its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.episodes import Ints
from embodied.core.errors import UserError
from embodied.core.spec import TRAIN
from embodied.envs.registry import TASKS
from embodied.envs.rendering.cameras import Camera
from embodied.envs.views.gymnasium_base import (
    METADATA,
    OVERVIEW,
    PoolView,
    Rendering,
    cameras_of,
    check_options,
    form_of,
    metadata_of,
    open_pool,
)
from embodied.envs.views.gymnasium_pool import TaskVectorEnv
from embodied.envs.views.spaces import Observation, action_space, take_row

__all__ = ["TaskEnv", "TaskVectorEnv", "gymnasium_id", "register_tasks"]

Info = dict[str, Any]

_NO_LIMIT = 2**31 - 1  # control steps; more than three years


class TaskEnv(PoolView, gymnasium.Env[Observation, NDArray[np.float32]]):
    """One env of a task. It terminates if the task fails and truncates if its simulation diverges.

    gymnasium's TimeLimit wrapper truncates at the time limit.

    task: name in the registry of tasks. cameras: names, ``image_size`` pixels wide and high, or Camera objects. flat:
    whether observations are the state vector alone (None: if there are no cameras). render_mode, width, height, camera:
    what ``render`` shows. UserError (a ValueError) for an unknown task, camera or render mode, and one that is a
    TypeError too for an unknown option.
    """

    metadata = METADATA

    def __init__(
        self,
        task: str,
        *,
        num_threads: int = 1,
        sim: dict[str, Any] | None = None,
        splits: str | Sequence[str] = (TRAIN,),
        cameras: str | Camera | Sequence[str | Camera] = (),
        image_size: int = 64,
        flat: bool | None = None,
        render_mode: str | None = None,
        width: int = 640,
        height: int = 480,
        camera: str | Camera = OVERVIEW,
        **options: Any,
    ) -> None:
        check_options(type(self), task, options)
        stepper = open_pool(
            task, {"max_episode_steps": _NO_LIMIT, **options}, 1, num_threads, sim,
            Rendering(render_mode, camera, width, height), splits, cameras_of(cameras, image_size),
        )  # fmt: skip
        super().__init__(stepper)
        self.render_mode = render_mode
        self.metadata = metadata_of(stepper)
        self._form = form_of(stepper, flat)
        self.observation_space, self.action_space = self._form.space, action_space(stepper.spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start the first episode of ``seed``, or the next episode if it is None. UserError for any options."""
        if options:
            raise UserError(f"reset takes no options, got: {', '.join(map(str, options))}")
        super().reset(seed=seed)
        obs = self._reset([seed], self.np_random, None)
        info = self._info(obs["privileged"], self.pool.task.success(), self.pool.plans.instruction_n)
        return take_row(self._form(obs), 0), info

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, Info]:
        """Make one control step; if action is not finite or not of shape [A], raise ValueError without stepping.

        ResetNeeded before ``reset`` and after an episode that ended.
        """
        action_A = np.asarray(action, dtype=np.float32)
        if action_A.shape != self.action_space.shape:
            raise ValueError(f"action: got shape {action_A.shape}, needed {self.action_space.shape}")
        step = self._stepper.step(action_A[None])
        info = self._info(step.obs["privileged"], step.info["success"], self.pool.plans.instruction_n)
        terminated, truncated = bool(step.terminated_N[0]), bool(step.truncated_N[0])
        return take_row(self._form(step.obs), 0), float(step.reward_N[0]), terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        """Render an image [h, w, 3] if ``render_mode="rgb_array"``, with a green border while the task is solved."""
        self._stepper.check_running("render")
        return None if self.render_mode is None else self._stepper.frames()[0]

    def close(self) -> None:
        """Release the simulation."""
        self._stepper.close()

    def _info(self, privileged_1P: torch.Tensor, success_1: torch.Tensor, instruction_1: Ints) -> Info:
        """Return ``info`` of the only env."""
        success = bool(success_1[0])
        info = {"privileged": privileged_1P[0].numpy(), "success": success, "is_success": success}
        if self._has_goals:
            info["instruction"] = self._instructions(instruction_1)[0]
        return info


def gymnasium_id(task: str) -> str:
    """Return the gymnasium id of a task: ``pick_place`` → ``embodied/PickPlace-v0``."""
    return f"embodied/{''.join(word.capitalize() for word in task.split('_'))}-v0"


def register_tasks() -> None:
    """Register every task of ours with gymnasium. Called when ``embodied.envs`` is imported."""
    for task in TASKS.registered():
        gymnasium.register(
            gymnasium_id(task),
            entry_point=f"{__name__}:{TaskEnv.__name__}",
            vector_entry_point=f"{__name__}:{TaskVectorEnv.__name__}",
            max_episode_steps=TASKS[task].config().max_episode_steps,
            kwargs={"task": task},
        )
