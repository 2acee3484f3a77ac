"""N envs of a task as one of gymnasium's vector environments.

    SAME_STEP   an env that ended is reset in the same step; its last observation is in ``infos["final_obs"]``
    NEXT_STEP   the last observation is returned; the next step ignores the env's action and returns a first one
    DISABLED    the user resets envs that ended: ``reset(options={"reset_mask": terminated | truncated})``

Results are those of gymnasium's SyncVectorEnv in the same mode (tests/envs/test_gymnasium_pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from embodied.core.errors import UserError, unknown_name
from embodied.core.spec import TRAIN
from embodied.core.types import Timestep
from embodied.envs.rendering.cameras import Camera
from embodied.envs.views.gymnasium_base import (
    METADATA,
    OVERVIEW,
    Bools,
    PoolView,
    Rendering,
    cameras_of,
    check_options,
    form_of,
    metadata_of,
    open_pool,
    reset_mask,
)
from embodied.envs.views.spaces import Observation, action_space, take_row
from embodied.envs.views.stepper import seeds_of

Info = dict[str, Any]


class TaskVectorEnv(PoolView, VectorEnv[Observation, NDArray[np.float32], NDArray[Any]]):
    """N envs of a task in one batch of simulations, with arrays of N rows.

    ``infos`` have the form of gymnasium's own vector envs: every array has a mask of the same name with ``_`` in front.
    With SAME_STEP, rows that ended have ``final_obs`` (an array of objects, None in other rows) and ``final_info``.

    num_threads: threads that step the simulations (0: all cores). stagger: first episodes are cut short by random
    times. autoreset_mode: a mode, its name or its value. Other arguments: as in TaskEnv.
    """

    metadata: dict[str, Any] = {**METADATA, "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (gymnasium's)

    def __init__(
        self,
        task: str,
        *,
        num_envs: int = 1,
        num_threads: int = 0,
        sim: dict[str, Any] | None = None,
        splits: str | Sequence[str] = (TRAIN,),
        stagger: bool = False,
        autoreset_mode: str | AutoresetMode = AutoresetMode.SAME_STEP,
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
        self.autoreset_mode = _mode(autoreset_mode)
        stepper = open_pool(
            task, options, num_envs, num_threads, sim, Rendering(render_mode, camera, width, height), splits,
            cameras_of(cameras, image_size), stagger, autoreset=self.autoreset_mode == AutoresetMode.SAME_STEP,
        )  # fmt: skip
        super().__init__(stepper)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.metadata = {**metadata_of(stepper), "autoreset_mode": self.autoreset_mode}
        self._form = form_of(stepper, flat)
        self.single_observation_space = self._form.space
        self.single_action_space = action_space(stepper.spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._set: dict[str, tuple[Any, ...]] = {}  # by ``set_attr``

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start new episodes in all envs, or in those of ``options["reset_mask"]``, bool [N].

        seed: env i has seed ``seed + i``, or ``seed[i]``; an env whose seed is None goes on with its next episode.
        UserError (a ValueError) for other options, a bad mask or bad seeds.
        """
        seeds, mask_N = seeds_of(seed, self.num_envs), reset_mask(options, self.num_envs)
        super().reset(seed=int(seed) if isinstance(seed, int | np.integer) else None)
        obs = self._reset(seeds, self.np_random, mask_N)
        texts = self._instructions(self.pool.plans.instruction_n)
        return self._form(obs), self._infos(obs["privileged"], self.pool.task.success(), texts, mask_N)

    def step(self, actions: NDArray[np.float32]) -> tuple[Observation, NDArray[np.float64], Bools, Bools, Info]:
        """Make one control step; if actions are not finite or not [N, A], raise ValueError without stepping.

        ResetNeeded before ``reset`` and, if autoreset is disabled, while an episode that ended was not reset.
        """
        pool, action_NA = self.pool, np.asarray(actions, dtype=np.float32)
        waiting_N = pool.waiting_N.clone()
        is_next_step = self.autoreset_mode == AutoresetMode.NEXT_STEP
        step = self._stepper.step_or_begin(action_NA) if is_next_step else self._stepper.step(action_NA)
        ended_N = step.terminated_N | step.truncated_N
        begun_N = ended_N if pool.autoreset else waiting_N
        success_N = step.info["success"]
        if bool(begun_N.any()):
            success_N = torch.where(begun_N, pool.task.success(), success_N)
        infos = self._infos(step.obs["privileged"], success_N, self._instructions(pool.plans.instruction_n))
        if pool.autoreset and len(step.final_ids):
            infos |= self._final(step, ended_N.numpy())
        reward_N = step.reward_N.double().numpy()
        return self._form(step.obs), reward_N, step.terminated_N.numpy(), step.truncated_N.numpy(), infos

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Render an image [h, w, 3] of every env if ``render_mode="rgb_array"``."""
        self._stepper.check_running("render")
        return None if self.render_mode is None else tuple(self._stepper.frames())

    def close_extras(self, **kwargs: Any) -> None:
        """Release the simulations."""
        self._stepper.close()

    # -- one env's attributes, as of gymnasium's vector envs -----------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the attribute of each env, or what its method returns: ``call("render")``, ``call("render_mode")``.

        Options of the task are attributes too, and spaces are those of one env. AttributeError for an unknown name, and
        for a method that steps or resets: envs of a pool are stepped together.
        """
        if name in self._set:
            return self._set[name]
        if name in ("step", "reset", "close"):
            raise AttributeError(f"'{name}' is a method of the whole pool: the envs of a pool have none of their own")
        config = self.pool.task.config
        of_one = f"single_{name}" if hasattr(self, f"single_{name}") else name
        found = getattr(config, name) if hasattr(config, name) else getattr(self, of_one)
        if callable(found) and name == "render":
            return tuple(found(*args, **kwargs) or (None,) * self.num_envs)
        return (found(*args, **kwargs) if callable(found) else found,) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute of each env; AttributeError for an unknown name."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each env to its value of a list or tuple, or of all to the same value.

        UserError for another number of values, and for an attribute that the pool has for all envs together.
        """
        listed = tuple(values) if isinstance(values, list | tuple) else (values,) * self.num_envs
        if len(listed) != self.num_envs:
            raise UserError(f"set_attr('{name}'): got {len(listed)} values, needed one for each of {self.num_envs}")
        if hasattr(self, name) or hasattr(self.pool.task.config, name):
            raise UserError(f"set_attr('{name}'): the pool has one for all envs; give it to make_vec")
        self._set[name] = listed

    # -- infos ---------------------------------------------------------------------------------------------------------

    def _final(self, step: Timestep, mask_N: Bools) -> Info:
        """Return ``final_obs`` and ``final_info`` of a step in which envs of the mask ended."""
        final_obs, texts_N = (np.full(self.num_envs, None, dtype=object) for _ in range(2))
        last = self._form(step.final_obs)
        for i, row in enumerate(step.final_ids.tolist()):
            final_obs[row] = take_row(last, i)
        texts_N[mask_N] = self._instructions(step.episodes.plans.instruction_n)
        privileged_NP = torch.zeros_like(step.obs["privileged"])
        privileged_NP[step.final_ids] = step.final_obs["privileged"]
        final_info = self._infos(privileged_NP, step.info["success"], texts_N, mask_N)
        return {"final_obs": final_obs, "_final_obs": mask_N, "final_info": final_info, "_final_info": mask_N.copy()}

    def _infos(
        self,
        privileged_NP: torch.Tensor,
        success_N: torch.Tensor,
        texts_N: NDArray[np.object_],
        mask_N: Bools | None = None,
    ) -> Info:
        """Return ``infos`` with their masks; ``mask_N``: rows that are valid (None: all), others are 0 or None."""
        mask_N = np.ones(self.num_envs, np.bool_) if mask_N is None else mask_N
        success = success_N.numpy()
        infos: Info = {"privileged": privileged_NP.numpy(), "success": success, "is_success": success}
        if self._has_goals:
            infos["instruction"] = texts_N
        for key, value in list(infos.items()):
            infos[key] = value.copy()
            infos[key][~mask_N] = None if value.dtype == object else 0
            infos[f"_{key}"] = mask_N.copy()
        return infos


def _mode(mode: str | AutoresetMode) -> AutoresetMode:
    """Return the mode of that name (``NEXT_STEP``) or value (``NextStep``); UserError for another one."""
    by_name = {**AutoresetMode.__members__, **{one.value: one for one in AutoresetMode}}
    if isinstance(mode, AutoresetMode):
        return mode
    if mode not in by_name:
        raise unknown_name("autoreset_mode", str(mode), AutoresetMode.__members__)
    return by_name[mode]
