"""The part that all views share: environments with their sampler that take one action per step.

    open_task("lift", 64) ─► Stepper: reset ─► observations        step(actions [N, A]) ─► Timestep of one control step
                                │
         isaac_gym   rl_games   rsl_rl   sb3   envpool   lerobot   gymnasium: the same timestep in each library's terms

Every view of another library is made by ``make(task, num_envs, **options)`` of its module, with the options of
``open_task``, or from a ``Stepper`` around any ``VecEnv``. The gymnasium views build theirs in ``gymnasium_base``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeStats
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import from_mapping
from embodied.core.spec import TRAIN, Box, CameraSpec, EnvSpec
from embodied.core.types import Obs, Timestep
from embodied.envs.base.episodic import EpisodicEnv
from embodied.envs.episodes.sampler import SamplerSetup, UniformConfig, UniformSampler
from embodied.envs.registry import FAMILIES, sim_options, split_name

RENDER_MODES = ("rgb_array",)
P = ParamSpec("P")


class NotReset(ResetNeeded, ValueError):
    """A call that needs an episode where none runs."""


class PresentPlans(UniformSampler):
    """A uniform sampler that keeps the plans of the present episodes."""

    def __init__(self, spec: EnvSpec, setup: SamplerSetup) -> None:
        super().__init__(spec, UniformConfig(), setup)
        self.plans = EpisodePlans.empty(setup.num_envs)
        self.elapsed_N: NDArray[np.int64] | None = None  # control steps by which ``start`` cuts the episodes short

    def start(self) -> EpisodePlans:
        """Return the plans of a new episode in every env."""
        plans = super().start()
        if self.elapsed_N is not None:
            plans.time_limit_n[:] = self.spec.max_episode_steps - self.elapsed_N
            self.plans.put(np.arange(self.num_envs), plans)
        return plans

    def _draw(self, ids: NDArray[np.int64], stagger: bool = False) -> EpisodePlans:
        plans = super()._draw(ids, stagger)
        self.plans.put(ids, plans)
        return plans


class Stepper:
    """An environment with a sampler of its episodes, stepped by one action per env. Used by one thread at a time.

    seed: env i has env seed ``seed + i``. splits: splits of the instructions that episodes come from; None: all.
    stagger: cut each env's first episode short by a random time, so that not all envs are reset together. stages: start
    the share ``StartStage.share`` of the episodes from a later stage of the task. autoreset: if False, an env whose
    episode ended waits for ``begin``, ``reset`` or ``step_or_begin``. film: what ``frames`` renders; None: an overview,
    640 x 480 pixels.

    ``pickle`` and ``copy.deepcopy`` copy what ``open_task`` built, if the simulator can restore a state. The copy goes
    on exactly as the original would.
    """

    rebuild: Callable[[], Stepper] | None = None
    """Builds the same stepper again, without its state."""
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
        film: Callable[[], NDArray[np.uint8]] | None = None,
    ) -> None:
        self._env: VecEnv | None = env
        self.autoreset = autoreset
        if isinstance(env, EpisodicEnv):
            env.autoreset = autoreset
        elif not autoreset:
            raise UserError(f"the environments of '{env.spec.task}' cannot wait for their reset: use another view")
        self.spec, self.num_envs, self.device = env.spec, env.num_envs, env.device
        splits = (splits,) if isinstance(splits, str) else None if splits is None else tuple(splits)
        setup = SamplerSetup(env.num_envs, seed, splits, stagger, stages)
        self._sampler = PresentPlans(env.spec, setup)
        self._film = film
        self._running = False
        self.elapsed_N = torch.zeros(env.num_envs, dtype=torch.int64)

    @property
    def env(self) -> VecEnv:
        """The environment; ClosedEnvironmentError after ``close``."""
        if self._env is None:
            raise ClosedEnvironmentError("the environment was closed")
        return self._env

    @property
    def waiting_N(self) -> Tensor:
        """Whether each env waits for its next episode to begin, bool [N]."""
        env = self.env
        return env.waiting_N if isinstance(env, EpisodicEnv) else torch.zeros(self.num_envs, dtype=torch.bool)

    def check_running(self, what: str) -> VecEnv:
        """Return the environment. NotReset before the first ``reset``; what: the call that needs an episode."""
        env = self.env
        if not self._running:
            raise NotReset(f"{what} before the first reset: call reset() first: no episode has begun")
        return env

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        elapsed_N: Tensor | None = None,
        mask_N: NDArray[np.bool_] | None = None,
    ) -> Obs:
        """Start an episode in every env, or in those of the mask, and return the observations of all, [N, ...].

        seed: env seed of env 0, the others follow, or the env seeds of all envs; each then begins with its first
        episode. None goes on to the next episode. elapsed_N: int64 [N], control steps that count as elapsed already.
        NotReset for a mask before all envs were reset.
        """
        env = self.env
        ids = np.arange(self.num_envs) if mask_N is None else np.flatnonzero(mask_N)
        if not self._running and len(ids) < self.num_envs:
            raise NotReset("reset_mask: the first reset must be one of all envs")
        seeds = seeds_of(seed, self.num_envs)
        given = [row for row in ids.tolist() if seeds[row] is not None]
        self._sampler.reseed(np.array(given, dtype=np.int64), np.array([seeds[row] for row in given], dtype=np.int64))
        if len(ids) < self.num_envs:
            assert isinstance(env, EpisodicEnv)
            self.begin(ids)
            return env.observe()
        limit = self.spec.max_episode_steps
        self._sampler.elapsed_N = None if elapsed_N is None else elapsed_N.clamp(0, limit - 1).cpu().numpy()
        with torch.inference_mode(False):
            obs = env.reset(self._sampler)
        self._sampler.elapsed_N = None
        self._running = True
        self._began(ids)
        return obs

    def step(self, action: ArrayLike | Tensor) -> Timestep:
        """Make one control step in every env and return its timestep, with E = 1.

        action: float [N, A] in [-1, 1], beyond which values are clipped, or integers [N] or [N, 1] for ``Discrete``.
        ValueError for another shape and for a value that is not finite. NotReset before the first ``reset`` and while
        an env waits.
        """
        self.check_running("step")
        if not self.autoreset and bool(self.waiting_N.any()):
            ended = self.waiting_N.nonzero().squeeze(-1)[:5].tolist()
            raise NotReset(f"call reset() first: the episode has ended in env {', '.join(map(str, ended))}")
        return self._step(action)

    def step_or_begin(self, action: ArrayLike | Tensor) -> Timestep:
        """Make one control step; an env that waits begins its next episode instead, with reward 0 (NEXT_STEP)."""
        self.check_running("step")
        waiting = self.waiting_N.nonzero().squeeze(-1)
        step = self._step(action)
        if len(waiting):
            for key, first in self.begin(waiting.cpu().numpy()).items():
                step.obs[key][waiting] = first
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

    def instructions(self) -> list[str]:
        """Return the instruction of each env's present episode, in words; empty texts if the task has none."""
        texts = self.spec.texts or ("",)
        return [texts[i] for i in self._sampler.plans.instruction_n.tolist()]

    def frames(self) -> NDArray[np.uint8]:
        """Render every env for people, uint8 [N, h, w, 3].

        UserError for a simulator that cannot be filmed. NotReset before the first ``reset``.
        """
        env = self.check_running("render")
        if self._film is None:
            film = env.film_quickly or env.film
            if film is None:
                raise UserError(f"render: the simulator of '{self.spec.task}' cannot be filmed")
            self._film = film(640, 480)
        return self._film()

    def close(self) -> None:
        """Release the environments. May be called again."""
        if self._env is not None:
            self._env.close()
        self._env = self._film = None

    def _step(self, action: ArrayLike | Tensor) -> Timestep:
        dtype = torch.float32 if isinstance(self.spec.action, Box) else torch.int64
        action_NA = torch.as_tensor(action).detach().to(self.device, dtype)
        if dtype == torch.int64 and action_NA.shape == (self.num_envs,):
            action_NA = action_NA.unsqueeze(-1)
        needed = (self.num_envs, self.spec.action_dim)
        if action_NA.shape != needed:
            raise ValueError(f"action: got shape {tuple(action_NA.shape)}, needed {needed}")
        with torch.inference_mode(False):  # what a simulator keeps must stay usable outside of inference mode
            step = self.env.step(action_NA.unsqueeze(1))
        self.elapsed_N = self.elapsed_N + step.num_steps_N.cpu()
        if self.autoreset and len(step.final_ids):
            self._began(step.final_ids.cpu().numpy())
        return step

    def _began(self, ids: NDArray[np.int64]) -> None:
        """Set ``elapsed_N`` of envs that have begun an episode."""
        limits_n = self._sampler.plans.time_limit_n[ids]
        self.elapsed_N[ids] = torch.from_numpy(self.spec.max_episode_steps - limits_n)

    def __reduce__(self) -> tuple[Any, ...]:
        env = self._env
        if self.rebuild is None or not (env is None or env.resumes_exactly):
            raise UserError(f"the environments of '{self.spec.task}' cannot be copied: they cannot restore a state")
        if env is None:
            return _rebuilt, (self.rebuild, None)
        state = {"sampler": self._sampler.state_dict(), "elapsed": self.elapsed_N.clone()}
        if self._running:
            state |= {
                "plans": self._sampler.plans.state_dict(),
                "env": env.state_dict(),
                "waiting": self.waiting_N.clone(),
            }
        return _rebuilt, (self.rebuild, state)


def _rebuilt(rebuild: Callable[[], Stepper], state: Mapping[str, Any] | None) -> Stepper:
    """Return the copy of a stepper; state: None if it was closed."""
    stepper = rebuild()
    if state is None:
        stepper.close()
        return stepper
    stepper._sampler.load_state_dict(state["sampler"])
    stepper.elapsed_N = state["elapsed"]
    if "env" in state:
        stepper._sampler.plans = EpisodePlans.from_state_dict(state["plans"])
        stepper.env.load_state_dict(state["env"], stepper._sampler)
        stepper.waiting_N.copy_(state["waiting"])
        stepper._running = True
    return stepper


def copyable(build: Callable[P, Stepper]) -> Callable[P, Stepper]:
    """Let the steppers that ``build`` returns be copied: a copy is built with the same arguments."""

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> Stepper:
        stepper = build(*args, **kwargs)
        stepper.rebuild = functools.partial(built, *args, **kwargs)
        return stepper

    return built


@copyable
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
    for name, got, least in (("num_envs", num_envs, 1), ("num_threads", num_threads, 0), ("image_size", image_size, 1)):
        if got < least:
            raise UserError(f"{name}: got {got}, allowed: at least {least}")
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
    if env.batch_size is not None:
        env.close()
        raise UserError("sim.batch_size: a view steps all its environments together; allowed: null")
    return Stepper(env, seed=seed, splits=splits, stagger=stagger, stages=stages, autoreset=autoreset)


def seeds_of(seed: Any, num_envs: int) -> list[int | None]:
    """Return the env seed of each env: ``seed + i`` for a number, else those of the list. UserError for others."""
    if seed is None or isinstance(seed, int | np.integer):
        seeds = [None if seed is None else int(seed) + i for i in range(num_envs)]
    else:
        seeds = list(seed)
    if len(seeds) != num_envs:
        raise UserError(f"seed: got {len(seeds)} seeds, needed one for each of {num_envs} envs")
    for one in seeds:
        if one is not None and (not isinstance(one, int | np.integer) or one < 0):
            raise UserError(f"seed: got {one!r}, allowed: an integer, at least 0, or None")
    return [None if one is None else int(one) for one in seeds]


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
