"""The part that the views of other libraries share: a VecEnv with its sampler that takes one action per step.

    open_task("lift", 64) ─► Stepper: reset ─► observations        step(actions [N, A]) ─► Timestep of one control step
                                │
         isaac_gym   rl_games   rsl_rl   sb3   envpool   lerobot: the same timestep in the terms of each library

Every view is made by ``make(task, num_envs, **options)`` of its module, with the options of ``open_task``, or from a
``Stepper`` around any ``VecEnv``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from embodied.core.episodes import EpisodeStats
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import from_mapping
from embodied.core.protocols import ExactResume, Filmed, FilmedQuickly, RowByRow, VecEnv
from embodied.core.spec import TRAIN, Box, CameraSpec
from embodied.core.types import Obs, Timestep
from embodied.envs.base.episodic import EpisodicEnv
from embodied.envs.episodes.sampler import SamplerSetup
from embodied.envs.registry import FAMILIES, sim_options, split_name
from embodied.envs.views.sampler import PresentSampler

RENDER_MODES = ("rgb_array",)


class Stepper:
    """A VecEnv with a sampler of its episodes, stepped by one action per env. Used by one thread at a time.

    seed: env i has env seed ``seed + i``. splits: splits of the instructions that episodes come from; None: all.
    stagger: cut each env's first episode short by a random time, so that not all envs are reset together. stages: start
    the share ``StartStage.share`` of the episodes from a later stage of the task. autoreset: if False, an env whose
    episode ended is not stepped until ``begin``; UserError for environments that cannot wait.

    ``pickle`` and ``copy.deepcopy`` copy what ``open_task`` built by its arguments and state, if the simulator can
    restore a state. The copy goes on exactly as the original would.
    """

    arguments: dict[str, Any] | None = None
    """Arguments of the ``open_task`` that built it."""

    elapsed_N: Tensor
    """Control steps since the beginning of each env's present episode, int64 [N]; an episode that was cut short by
    ``stagger`` counts as if it had begun earlier. ``spec.max_episode_steps`` is the time limit."""

    def __init__(
        self,
        env: VecEnv,
        *,
        seed: int = 0,
        splits: str | Sequence[str] | None = (TRAIN,),
        stagger: bool = False,
        stages: bool = False,
        autoreset: bool = True,
    ) -> None:
        self._env: VecEnv | None = env
        self.autoreset = autoreset
        if isinstance(env, EpisodicEnv):
            env.autoreset = autoreset
        elif not autoreset:
            raise UserError(f"the environments of '{env.spec.task}' cannot wait for their reset: use another view")
        self.spec, self.num_envs, self.device = env.spec, env.num_envs, env.device
        self._setup = SamplerSetup(env.num_envs, seed, splits_of(splits), stagger, stages)
        self._sampler = PresentSampler(env.spec, self._setup)
        self._film: Callable[[], NDArray[np.uint8]] | None = None
        self._running = False
        self.elapsed_N = torch.zeros(env.num_envs, dtype=torch.int64)

    @property
    def env(self) -> VecEnv:
        """The VecEnv; ClosedEnvironmentError after ``close``."""
        if self._env is None:
            raise ClosedEnvironmentError("the environment was closed")
        return self._env

    def reset(self, seed: int | Sequence[int] | None = None, elapsed_N: Tensor | None = None) -> Obs:
        """Start an episode in every env and return the observations, [N, ...].

        seed: env seed of env 0, the others follow, or the env seeds of all envs; each then begins with its first
        episode. None goes on to the next episodes. elapsed_N: int64 [N], control steps that count as elapsed already.
        """
        env = self.env
        if seed is not None:
            seeds_N = np.asarray(seed, dtype=np.int64) + (np.arange(self.num_envs) if np.ndim(seed) == 0 else 0)
            if seeds_N.shape != (self.num_envs,) or seeds_N.min() < 0:
                raise UserError(f"seed: got {seed}, allowed: an integer of at least 0, or {self.num_envs} of them")
            self._sampler = PresentSampler(self.spec, self._setup)
            self._sampler.seed_N[:] = seeds_N
        limit = self.spec.max_episode_steps
        self._sampler.skipped_N = None if elapsed_N is None else elapsed_N.clamp(0, limit - 1).cpu().numpy()
        with torch.inference_mode(False):
            obs = env.reset(self._sampler)
        self.elapsed_N = torch.from_numpy(limit - self._sampler.time_limit_N)
        self._sampler.skipped_N = None
        self._running = True
        return obs

    def step(self, action: ArrayLike | Tensor) -> Timestep:
        """Make one control step in every env and return its timestep, with E = 1.

        action: float [N, A] in [-1, 1], beyond which values are clipped, or integers [N] or [N, 1] for ``Discrete``.
        ValueError for another shape, for a value that is not finite and before the first ``reset``.
        """
        env = self.env
        if not self._running:
            raise ValueError("step before the first reset: call reset() first")
        dtype = torch.float32 if isinstance(self.spec.action, Box) else torch.int64
        action_NA = torch.as_tensor(action).detach().to(self.device, dtype)
        if dtype == torch.int64 and action_NA.shape == (self.num_envs,):
            action_NA = action_NA.unsqueeze(-1)
        needed = (self.num_envs, self.spec.action_dim)
        if action_NA.shape != needed:
            raise ValueError(f"action: got shape {tuple(action_NA.shape)}, needed {needed}")
        with torch.inference_mode(False):  # what a simulator keeps must stay usable outside of inference mode
            step = env.step(action_NA.unsqueeze(1))
        self.elapsed_N = self.elapsed_N + step.num_steps_N.cpu()
        if self.autoreset and len(step.final_ids):
            self._began(step.final_ids.cpu().numpy())
        return step

    def begin(self, ids: NDArray[np.int64]) -> Obs:
        """Start the next episodes of envs ``ids`` [n], also of running ones; return their observations [n, ...]."""
        env = self.env
        assert isinstance(env, EpisodicEnv)
        with torch.inference_mode(False):
            env.begin(ids, self._sampler.skip_to_next(ids))
            obs = env.observe(ids)
        self._began(ids)
        return obs

    @property
    def waiting_N(self) -> Tensor:
        """Whether each env waits for ``begin``, bool [N]."""
        env = self.env
        return env.waiting_N if isinstance(env, EpisodicEnv) else torch.zeros(self.num_envs, dtype=torch.bool)

    def _began(self, ids: NDArray[np.int64]) -> None:
        """Set ``elapsed_N`` of envs that have begun an episode."""
        self.elapsed_N[ids] = torch.from_numpy(self.spec.max_episode_steps - self._sampler.time_limit_N[ids])

    def instructions(self) -> list[str]:
        """Return the instruction of each env's present episode, in words; empty texts if the task has none."""
        texts = self.spec.texts or ("",)
        return [texts[i] for i in self._sampler.instruction_N.tolist()]

    def frames(self) -> NDArray[np.uint8]:
        """Render every env for people, uint8 [N, 480, 640, 3].

        UserError for a simulator that cannot be filmed. ValueError before the first ``reset``.
        """
        env = self.env
        if not self._running:
            raise ValueError("render before the first reset: call reset() first")
        if self._film is None:
            if not isinstance(env, Filmed):
                raise UserError(f"render: the simulator of '{self.spec.task}' cannot be filmed")
            film = env.film_quickly if isinstance(env, FilmedQuickly) else env.film
            self._film = film(640, 480)
        return self._film()

    def close(self) -> None:
        """Release the environments. May be called again."""
        if self._env is not None:
            self._env.close()
        self._env = self._film = None

    def __reduce__(self) -> tuple[Any, ...]:
        env = self.env
        if self.arguments is None or not isinstance(env, ExactResume):
            raise UserError(f"the environments of '{self.spec.task}' cannot be copied: they cannot restore a state")
        state = {"sampler": self._sampler.state_dict(), "elapsed": self.elapsed_N.clone()}
        if self._running:
            state |= {"env": env.state_dict(), "waiting": self.waiting_N.clone()}
        return _rebuilt, (self.arguments, state)


def _rebuilt(arguments: Mapping[str, Any], state: Mapping[str, Any]) -> Stepper:
    """Return the copy of a stepper."""
    stepper = open_task(**arguments)
    stepper._sampler.load_state_dict(state["sampler"])
    stepper.elapsed_N = state["elapsed"]
    if "env" in state:
        env = stepper.env
        assert isinstance(env, ExactResume)
        env.load_state_dict(state["env"], stepper._sampler)
        stepper.waiting_N.copy_(state["waiting"])
        stepper._running = True
    return stepper


def open_task(
    task: str,
    num_envs: int,
    *,
    seed: int = 0,
    num_threads: int = 0,
    sim: dict[str, Any] | None = None,
    cameras: str | CameraSpec | Sequence[str | CameraSpec] = (),
    image_size: int = 64,
    splits: str | Sequence[str] | None = (TRAIN,),
    stagger: bool = False,
    stages: bool = False,
    autoreset: bool = True,
    **options: Any,
) -> Stepper:
    """Build the environments of ``task=<task>`` and return their stepper.

    num_threads: threads that step the simulations (0: all cores). sim: options of the simulator, such as
    ``{"name": "warp"}``. cameras: one or several; names, with images ``image_size`` pixels wide and high, or specs.
    seed, splits, stagger, stages, autoreset: see ``Stepper``.
    options: of the task, such as ``control={"mode": "joint_delta"}``. UserError for an unknown task, option or camera.
    """
    given = locals()
    arguments = {key: given[key] for key in given if key != "options"} | options
    for name, least in {"num_envs": 1, "num_threads": 0, "image_size": 1}.items():
        if given[name] < least:
            raise UserError(f"{name}: got {given[name]}, allowed: at least {least}")
    name, id = split_name(task)
    family = FAMILIES[name].build()
    config = family.task_config(id)
    for key in options:
        if key not in config.__dataclass_fields__:
            taken = inspect.signature(open_task).parameters.values()
            own = [one.name for one in taken if one.kind is one.KEYWORD_ONLY]
            raise unknown_name("key", key, [*config.__dataclass_fields__, *own])
    cameras = [cameras] if isinstance(cameras, (str, CameraSpec)) else cameras
    seen = [CameraSpec.square(camera, image_size) if isinstance(camera, str) else camera for camera in cameras]
    env = family.make(
        id,
        from_mapping(config, options),
        num_envs=num_envs,
        num_threads=num_threads,
        sim=sim_options(name, sim or {}),
        cameras=seen,
    )
    if isinstance(env, RowByRow):
        env.close()
        raise UserError("sim.batch_size: a view steps all its environments together; allowed: null")
    stepper = Stepper(env, seed=seed, splits=splits, stagger=stagger, stages=stages, autoreset=autoreset)
    stepper.arguments = arguments
    return stepper


def splits_of(splits: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of splits, of which one may be given alone; None: all."""
    return (splits,) if isinstance(splits, str) else None if splits is None else tuple(splits)


def success_of(outcomes: Any, rows: int) -> Tensor:
    """Return the outcome ``success``, bool [rows]; False for an environment without it."""
    success: Tensor | None = outcomes.get("success")
    return torch.zeros(rows, dtype=torch.bool) if success is None else success


def episode_means(episodes: EpisodeStats) -> dict[str, float]:
    """Return the means over episodes that ended: ``return``, ``length`` and each outcome at the end; none if M is 0."""
    if not len(episodes):
        return {}
    return {
        "return": float(episodes.return_M.mean()),
        "length": float(episodes.length_M.float().mean()),
        **{name: float(held_M.float().mean()) for name, held_M in episodes.at_end.items()},
    }


def check_render_mode(mode: str | None) -> str | None:
    """Return ``mode``; UserError if it is neither None nor one of ``RENDER_MODES``."""
    if mode is not None and mode not in RENDER_MODES:
        raise unknown_name("render_mode", mode, RENDER_MODES)
    return mode


def no_cameras(stepper: Stepper, view: str) -> None:
    """Raise UserError if the environments have cameras; ``view`` has no images."""
    if stepper.spec.cameras:
        others = "embodied.envs.views.sb3, rsl_rl, envpool and lerobot"
        raise UserError(f"cameras: {view} has no images here; {others} have them")


def missing_package(package: str) -> UserError:
    """Return the error for a library of the extra ``trainers`` that is not installed."""
    return UserError(f"{package} is not installed: pip install -c constraints.txt -e '.[trainers]'")
