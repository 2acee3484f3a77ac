"""N envs as one of gymnasium's vector environments: any stepper, and the tasks of ours with gymnasium's ids.

SAME_STEP   an env that ended is reset in the same step; its last observation is in ``infos["final_obs"]``
NEXT_STEP   the last observation is returned; the next step ignores the env's action and returns a first one
DISABLED    the user resets envs that ended: ``reset(options={"reset_mask": terminated | truncated})``
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mujoco
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from embodied.core.episodes import Ints
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import from_mapping
from embodied.core.spec import TRAIN
from embodied.core.types import Timestep
from embodied.envs.mujoco.config import SimConfig
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.viewer import FRONT
from embodied.envs.registry import TASKS
from embodied.envs.rendering.cameras import Camera
from embodied.envs.rendering.vision import CAMERAS
from embodied.envs.views.spaces import Form, Observation, action_space, seeds_of, take_row
from embodied.envs.views.stepper import RENDER_MODES, Stepper, check_options, check_render_mode, open_task

Bools = NDArray[np.bool_]
Info = dict[str, Any]
OVERVIEW = "overview"  # name of the view of ``render`` that shows the whole arm


class StepperVectorEnv(VectorEnv[Observation, NDArray[Any], NDArray[Any]]):
    """The envs of a stepper with observations of one form. A subclass has ``reset`` and the infos."""

    metadata: dict[str, Any] = {"render_modes": [*RENDER_MODES], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, stepper: Stepper, form: Form, render_mode: str | None) -> None:
        self.stepper, self._form, self.render_mode = stepper, form, check_render_mode(render_mode)
        self.num_envs = stepper.num_envs
        rate = round(1 / stepper.spec.control_dt_s)
        self.metadata = {**type(self).metadata, "render_fps": rate, "autoreset_mode": stepper.autoreset}
        self.single_observation_space, self.single_action_space = form.space, action_space(stepper.spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the attribute of each env, or what its method returns. AttributeError for an unknown name."""
        if name == "render":
            return self.render() or (None,) * self.num_envs
        return tuple(value(*args, **kwargs) if callable(value) else value for value in self.get_attr(name))

    @abstractmethod
    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env. AttributeError if there is none."""

    @abstractmethod
    def _step_infos(self, step: Timestep, ended_N: Bools, renewed: bool) -> Info:
        """Return the infos of a step. renewed: whether any env is now in an episode that begins."""

    @abstractmethod
    def _final_infos(self, step: Timestep, ended_N: Bools) -> Info:
        """Return the infos of the last states of envs that ended."""

    def step(self, actions: NDArray[Any]) -> tuple[Observation, NDArray[np.float64], Bools, Bools, Info]:
        """Make one control step. For errors see ``Stepper.step``."""
        renewed = len(self.stepper.waiting_ids()) > 0
        step = self.stepper.step(np.asarray(actions))
        terminated_N, truncated_N = step.terminated_N.cpu().numpy(), step.truncated_N.cpu().numpy()
        ended_N = terminated_N | truncated_N
        at_once = bool(ended_N.any()) and self.stepper.autoreset is AutoresetMode.SAME_STEP
        infos = self._step_infos(step, ended_N, renewed or at_once)
        if at_once:
            final_obs, last = np.full(self.num_envs, None, dtype=object), self._form(step.final_obs)
            for i, row in enumerate(step.final_ids.tolist()):
                final_obs[row] = take_row(last, i)
            infos |= {"final_obs": final_obs, "_final_obs": ended_N}
            infos |= {"final_info": self._final_infos(step, ended_N), "_final_info": ended_N.copy()}
        return self._form(step.obs), step.reward_N.double().cpu().numpy(), terminated_N, truncated_N, infos

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Render an image [480, 640, 3] of every env if ``render_mode="rgb_array"``."""
        return None if self.render_mode is None else tuple(self.stepper.frames())

    def close_extras(self, **kwargs: Any) -> None:
        self.stepper.close()


class TaskVectorEnv(StepperVectorEnv, VectorEnv[Observation, NDArray[Any], NDArray[Any]]):  # skrl looks at the bases
    """N envs of a task in one batch of simulations, with arrays of N rows. ``pickle`` and ``copy.deepcopy`` copy it.

    Observations are the state, float32 [N, S], bounded where the engine calls a state diverged, or with cameras
    ``{"state": ..., "images_front": uint8 [N, h, w, 3], ...}``, whose state has only the terms that the robot measures.
    ``infos`` describe the returned state in the form of gymnasium's own vector envs: every array has a mask of the same
    name with ``_`` in front. They are ``privileged`` (float32 [N, P], for critics), ``success`` and ``is_success``,
    and, in tasks with more than one goal, ``instruction``, a text. With SAME_STEP, rows that ended have ``final_obs``
    (an array of objects, None in other rows) and ``final_info``.

    options: of the task. sim: options of SimConfig. splits: of the instructions that episodes come from. num_threads:
    threads that step the simulations (0: all cores). stagger: cut first episodes short by random times. autoreset_mode:
    a mode, its name or its value. cameras: names, ``image_size`` pixels wide and high, or Camera objects. flat: whether
    observations are the state vector alone (None: if there are no cameras). camera: what ``render`` shows: overview, a
    name, ``width`` x ``height`` pixels, or a Camera. UserError (a ValueError) for an unknown task, camera or render
    mode, and one that is a TypeError too for an unknown option.
    """

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
        check_options(TaskVectorEnv, TASKS[task].config, options)
        from_mapping(SimConfig, sim or {}, "sim")  # no other simulator
        modes = {key: mode for mode in AutoresetMode for key in (mode, mode.name, mode.value)}
        if autoreset_mode not in modes:
            raise unknown_name("autoreset_mode", str(autoreset_mode), AutoresetMode.__members__)
        self.autoreset_mode = modes[autoreset_mode]
        self._camera = _camera_of(camera, width, height)
        stepper = open_task(
            task, num_envs, num_threads=num_threads, sim=sim, splits=splits, cameras=cameras, image_size=image_size,
            stagger=stagger, stages="held_starts" in options,  # the default share is for training only
            autoreset=self.autoreset_mode, **options,
        )  # fmt: skip
        names = [each.name for each in stepper.spec.cameras]
        if flat and names:
            raise UserError(f"flat: got True with the cameras {', '.join(names)}, allowed: True without cameras")
        form = Form(stepper.spec, not names if flat is None else flat, bound=mujoco.mjMAXVAL)
        super().__init__(stepper, form, render_mode)
        if isinstance(camera, str):
            self._camera = self._camera.scaled(self.pool.task.scale.reach)
        self._seeded_N = np.zeros(num_envs, dtype=np.bool_)
        self._texts = np.array(stepper.spec.texts, dtype=object) if len(set(stepper.spec.goals)) > 1 else None
        self._set: dict[str, tuple[Any, ...]] = {}  # by ``set_attr``

    @property
    def pool(self) -> MujocoPool:
        """The pool; ClosedEnvironmentError after ``close``."""
        env = self.stepper.env
        assert isinstance(env, MujocoPool)
        return env

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start new episodes in all envs, or in those of ``options["reset_mask"]``, bool [N].

        seed: env i has seed ``seed + i``, or ``seed[i]``; None: the next episode, or a random seed if it had none so
        far. UserError for other options, a bad mask or bad seeds.
        """
        seeds, mask_N = seeds_of(seed, self.num_envs), _reset_mask(options, self.num_envs)
        super().reset(seed=int(seed) if isinstance(seed, int | np.integer) else None)
        chosen_N = np.ones(self.num_envs, np.bool_) if mask_N is None else mask_N
        for row in np.flatnonzero(chosen_N & ~self._seeded_N):
            if seeds[row] is None:
                seeds[row] = int(self.np_random.integers(2**31))
        obs = self.stepper.reset(seeds, mask_N=mask_N)
        self._seeded_N |= chosen_N
        pool = self.pool
        return self._form(obs), self._infos(obs["privileged"], pool.task.success(), pool.plans.instruction_n, chosen_N)

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Render an image [h, w, 3] of every env if ``render_mode="rgb_array"``; a solved one has a green border."""
        self.stepper.check_running("render")
        if self.render_mode is None:
            return None
        film = partial(self.pool.film_quickly, camera=self._camera)
        return tuple(self.stepper.frames(self._camera.width, self._camera.height, film))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute of each env; options of the task are attributes too, and spaces are those of one env.

        AttributeError for an unknown name, and for a method that steps or resets: envs of a pool are stepped together.
        """
        if name in self._set:
            return self._set[name]
        if name in ("step", "reset", "close"):
            raise AttributeError(f"'{name}' is a method of the whole pool: the envs of a pool have none of their own")
        config = self.pool.task.config
        of_one = f"single_{name}" if hasattr(self, f"single_{name}") else name
        return (getattr(config, name) if hasattr(config, name) else getattr(self, of_one),) * self.num_envs

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

    def _step_infos(self, step: Timestep, ended_N: Bools, renewed: bool) -> Info:
        pool = self.pool
        success_N = pool.task.success() if renewed else step.info["success"]
        all_N = np.ones(self.num_envs, np.bool_)
        return self._infos(step.obs["privileged"], success_N, pool.plans.instruction_n, all_N)

    def _final_infos(self, step: Timestep, ended_N: Bools) -> Info:
        privileged_NP, instruction_N = torch.zeros_like(step.obs["privileged"]), np.zeros(self.num_envs, np.int64)
        privileged_NP[step.final_ids] = step.final_obs["privileged"]
        instruction_N[ended_N] = step.episodes.plans.instruction_n
        return self._infos(privileged_NP, step.info["success"], instruction_N, ended_N)

    def _infos(self, privileged_NP: torch.Tensor, success_N: torch.Tensor, instruction_N: Ints, mask_N: Bools) -> Info:
        """Return ``infos`` with their masks; ``mask_N``: rows that are valid, others are 0 or None."""
        success = success_N.numpy()
        infos: Info = {"privileged": privileged_NP.numpy(), "success": success, "is_success": success}
        if self._texts is not None:
            infos["instruction"] = self._texts.take(instruction_N)
        for key, value in list(infos.items()):
            infos[key] = value.copy()
            infos[key][~mask_N] = None if value.dtype == object else 0
            infos[f"_{key}"] = mask_N.copy()
        return infos


def _camera_of(camera: str | Camera, width: int, height: int) -> Camera:
    """Return the camera of that name, ``width`` x ``height`` pixels, or a Camera as it is; UserError for others."""
    if isinstance(camera, Camera):
        return camera
    if not isinstance(camera, str):
        raise UserError(f"camera: got {camera!r}, allowed: a name or a Camera; what a policy sees is cameras=")
    placed = {OVERVIEW: FRONT, **CAMERAS}
    if camera not in placed:
        raise unknown_name("camera", camera, placed)
    return replace(placed[camera], width=width, height=height)


def _reset_mask(options: dict[str, Any] | None, num_envs: int) -> Bools | None:
    """Return the mask of the envs to reset (None: all); UserError for another option or another array."""
    if unknown := [str(key) for key in options or {} if key != "reset_mask"]:
        raise UserError(f"reset options: got {', '.join(unknown)}, allowed: reset_mask")
    if not options:
        return None
    mask_N = options["reset_mask"]
    if not isinstance(mask_N, np.ndarray) or mask_N.dtype != np.bool_ or mask_N.shape != (num_envs,):
        got = f"{mask_N.dtype} {list(mask_N.shape)}" if isinstance(mask_N, np.ndarray) else type(mask_N).__name__
        raise UserError(f"reset_mask: got {got}, needed a numpy array of bool [{num_envs}]")
    if not mask_N.any():
        raise UserError("reset_mask: got no env to reset, needed one True at least")
    return mask_N.copy()
