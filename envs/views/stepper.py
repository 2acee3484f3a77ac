"""The part that all views share: environments with their sampler that take one action per step.

    open_task("lift", 64) ─► Stepper: reset ─► observations        step(actions [N, A]) ─► Timestep of one control step
                                │
         isaac_gym   rl_games   rsl_rl   sb3   envpool   lerobot   gymnasium: the same timestep in each library's terms

Every view of another library is made by ``make(task, num_envs, **options)`` of its module, with the options of
``open_task``, or from a ``Stepper`` around any ``VecEnv``.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from embodied.core.env import Film, VecEnv
from embodied.core.episodes import EpisodePlans, Ints
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import from_mapping
from embodied.core.spec import TRAIN, Box, CameraSpec
from embodied.core.types import Obs, Timestep
from embodied.envs.episodes.registry import SamplerSetup, UniformConfig
from embodied.envs.episodes.sampler import UniformSampler
from embodied.envs.registry import FAMILIES, sim_options, split_name
from embodied.envs.rendering.cameras import Camera
from embodied.envs.views.spaces import first_seed, seeds_of

RENDER_MODES = ("rgb_array",)


class NotReset(ResetNeeded, ValueError):
    """A call that needs an episode where none runs."""


class UnknownArgumentError(UserError, TypeError):
    """A keyword argument that nothing takes: what Python raises, with the nearest name."""


class _Sampler(UniformSampler):
    """A uniform sampler whose ``start`` cuts episodes short by ``elapsed_N`` control steps."""

    elapsed_N: Ints | None = None

    def start(self) -> EpisodePlans:
        plans = super().start()
        if self.elapsed_N is not None:
            plans.time_limit_n[:] = self.spec.max_episode_steps - self.elapsed_N
        return plans


class Stepper:
    """An environment with a sampler of its episodes, stepped by one action per env. Used by one thread at a time.

    seed: env i has env seed ``seed + i``. splits: of the instructions that episodes come from; None: all. stagger: cut
    each env's first episode short by a random time. stages: start the share ``StartStage.share`` of the episodes from a
    later stage. autoreset: when an env whose episode ended begins its next one: in the same step, in its next step
    (which ignores its action and has reward 0), or (DISABLED) by ``begin`` or ``reset``. ``pickle`` and
    ``copy.deepcopy`` copy what ``open_task`` built, if the simulator can restore a state; the copy goes on exactly as
    the original would.
    """

    rebuild: "Callable[[], Stepper] | None" = None
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
        autoreset: AutoresetMode = AutoresetMode.SAME_STEP,
    ) -> None:
        if autoreset is not AutoresetMode.SAME_STEP and env.waiting_N is None:
            raise UserError(f"the environments of '{env.spec.task}' cannot wait for their reset: use another view")
        self._env: VecEnv | None = env
        self.autoreset, env.autoreset = autoreset, autoreset is AutoresetMode.SAME_STEP
        self.spec, self.num_envs, self.device = env.spec, env.num_envs, env.device
        seed = first_seed(seed, env.num_envs)
        splits = (splits,) if isinstance(splits, str) else None if splits is None else tuple(splits)
        self._sampler = _Sampler(env.spec, UniformConfig(), SamplerSetup(env.num_envs, seed, splits, stagger, stages))
        self._film: Callable[[], NDArray[np.uint8]] | None = None
        self._running = False
        self.elapsed_N = torch.zeros(env.num_envs, dtype=torch.int64)

    @property
    def env(self) -> VecEnv:
        """The environment; ClosedEnvironmentError after ``close``."""
        if self._env is None:
            raise ClosedEnvironmentError("the environment was closed")
        return self._env

    def check_running(self, what: str) -> VecEnv:
        """Return the environment. NotReset before the first ``reset``; what: the call that needs an episode."""
        env = self.env
        if not self._running:
            raise NotReset(f"{what} before the first reset: call reset() first: no episode has begun")
        return env

    def waiting_ids(self) -> Ints:
        """Return the envs that wait for their next episode, [n]."""
        waiting_N = self.env.waiting_N
        return np.zeros(0, np.int64) if waiting_N is None else waiting_N.nonzero().squeeze(-1).cpu().numpy()

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
            self.begin(ids)
            return env.observe()
        limit = self.spec.max_episode_steps
        self._sampler.elapsed_N = None if elapsed_N is None else elapsed_N.clamp(0, limit - 1).cpu().numpy()
        with torch.inference_mode(False):
            obs = env.reset(self._sampler)
        self._running = True
        self._count_from_start(ids)
        return obs

    def step(self, action: ArrayLike | Tensor) -> Timestep:
        """Make one control step in every env and return its timestep, with E = 1.

        action: float [N, A] in [-1, 1], beyond which values are clipped, or integers [N] or [N, 1] for ``Discrete``.
        ValueError for another shape and for a value that is not finite. NotReset before the first ``reset`` and, if
        autoreset is disabled, while an env waits.
        """
        env, waiting = self.check_running("step"), self.waiting_ids()
        if len(waiting) and self.autoreset is AutoresetMode.DISABLED:
            ended = ", ".join(map(str, waiting[:5]))
            raise NotReset(f"call reset() first: the episode has ended in env {ended}")
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
        if env.autoreset and len(step.final_ids):
            self._count_from_start(step.final_ids.cpu().numpy())
        if len(waiting):
            for key, first in self.begin(waiting).items():
                step.obs[key][waiting] = first
        return step

    def begin(self, ids: Ints) -> Obs:
        """Start the next episodes of envs ``ids`` [n], also of running ones; return their observations [n, ...].

        NotReset before all envs were reset.
        """
        env = self.check_running("reset of some envs")
        with torch.inference_mode(False):
            env.begin(ids, self._sampler.skip_to_next(ids))
            obs = env.observe(ids)
        self._count_from_start(ids)
        return obs

    def frames(self, width: int = 640, height: int = 480, film: Film | None = None) -> NDArray[np.uint8]:
        """Render every env for people, uint8 [N, height, width, 3], always as in the first call. film: prepares it.

        UserError for a simulator that cannot be filmed. NotReset before the first ``reset``.
        """
        env = self.check_running("render")
        if self._film is None:
            film = film or env.film_quickly or env.film
            if film is None:
                raise UserError(f"render: the simulator of '{self.spec.task}' cannot be filmed")
            self._film = film(width, height)
        return self._film()

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = self._film = None

    def _count_from_start(self, ids: Ints) -> None:
        limits_n = self.env.plans.time_limit_n[ids]
        self.elapsed_N[ids] = torch.from_numpy(self.spec.max_episode_steps - limits_n)

    def __reduce__(self) -> tuple[Any, ...]:
        env = self._env
        if self.rebuild is None or not (env is None or env.resumes_exactly):
            raise UserError(f"the environments of '{self.spec.task}' cannot be copied: they cannot restore a state")
        if env is None:
            return self.rebuild, (), {}
        state: dict[str, Any] = {"sampler": self._sampler.state_dict(), "elapsed": self.elapsed_N.clone()}
        if self._running:
            state |= {"env": env.state_dict(), "waiting": self.waiting_ids()}
        return self.rebuild, (), state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        if not state:  # a copy of a closed stepper
            self.close()
            return
        self._sampler.load_state_dict(state["sampler"])
        self.elapsed_N = state["elapsed"]
        if "env" in state:
            self.env.load_state_dict(state["env"], self._sampler)
            if self.env.waiting_N is not None:
                self.env.waiting_N[state["waiting"]] = True
            self._running = True


def open_task(
    task: str,
    num_envs: int,
    *,
    seed: int = 0,
    num_threads: int = 0,
    sim: dict[str, Any] | None = None,
    cameras: str | CameraSpec | Camera | Sequence[str | CameraSpec | Camera] = (),
    image_size: int = 64,
    splits: str | Sequence[str] | None = (TRAIN,),
    stagger: bool = False,
    stages: bool = False,
    autoreset: AutoresetMode = AutoresetMode.SAME_STEP,
    **options: Any,
) -> Stepper:
    """Build the environments of ``task=<task>`` and return their stepper.

    num_threads: threads that step the simulations (0: all cores). sim: options of the simulator, such as
    ``{"name": "warp"}``. cameras: one or several; names, with images ``image_size`` pixels wide and high, or specs, or,
    for our tasks, Camera objects. seed, splits, stagger, stages, autoreset: see ``Stepper``.
    options: of the task, such as ``control={"mode": "joint_delta"}``. UserError for an unknown task, option or camera.
    """
    arguments = {key: value for key, value in locals().items() if key != "options"} | options
    for key, got, least in (("num_envs", num_envs, 1), ("num_threads", num_threads, 0), ("image_size", image_size, 1)):
        if got < least:
            raise UserError(f"{key}: got {got}, allowed: at least {least}")
    name, id = split_name(task)
    family = FAMILIES[name].build()
    config = family.task_config(id)
    check_options(open_task, config, options)
    listed = [cameras] if isinstance(cameras, (str, CameraSpec, Camera)) else cameras
    seen: list[Any] = [CameraSpec.square(one, image_size) if isinstance(one, str) else one for one in listed]
    checked, (_, simulator) = from_mapping(config, options), sim_options(task, sim or {})
    env = family.make(id, checked, num_envs=num_envs, num_threads=num_threads, sim=simulator, cameras=seen)
    with ExitStack() as opened:  # closes the envs if anything is refused
        opened.callback(env.close)
        if env.batch_size is not None:
            raise UserError("sim.batch_size: a view steps all its environments together; allowed: null")
        stepper = Stepper(env, seed=seed, splits=splits, stagger=stagger, stages=stages, autoreset=autoreset)
        opened.pop_all()
    stepper.rebuild = partial(open_task, **arguments)
    return stepper


def check_options(call: Callable[..., Any], config: type[Any], options: Iterable[str]) -> None:
    """Raise UnknownArgumentError for a keyword argument that is neither of ``call`` nor an option of the task."""
    own = [key for key, taken in inspect.signature(call).parameters.items() if taken.kind is taken.KEYWORD_ONLY]
    for name in options:
        if name not in config.__dataclass_fields__:
            wrong = unknown_name("option", name, [*config.__dataclass_fields__, *own])
            # torchrl reads Python's own words
            raise UnknownArgumentError(f"{call.__name__}() got an unexpected keyword argument '{name}': {wrong}")


def check_render_mode(mode: str | None) -> str | None:
    """Return ``mode``; UserError if it is neither None nor one of ``RENDER_MODES``."""
    if mode is not None and mode not in RENDER_MODES:
        raise unknown_name("render_mode", mode, RENDER_MODES)
    return mode


def missing_package(package: str) -> UserError:
    """Return the error for a library of the extra ``trainers`` that is not installed."""
    return UserError(f"{package} is not installed: pip install -c constraints.txt -e '.[trainers]'")
