"""The part that both gymnasium views share: a pool that can be closed and copied, its seeding and its images."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from numpy.typing import NDArray

from embodied.core.episodes import Ints
from embodied.core.errors import UserError, nearest, unknown_name
from embodied.core.options import from_mapping
from embodied.core.types import Obs
from embodied.envs.episodes.sampler import SamplerSetup, UniformConfig, UniformSampler
from embodied.envs.mujoco.pool import MujocoPool, SimConfig
from embodied.envs.mujoco.viewer import FRONT, QuickViewer
from embodied.envs.registry import TASKS
from embodied.envs.rendering.cameras import Camera
from embodied.envs.rendering.vision import CAMERAS, find_camera
from embodied.envs.views.stepper import splits_of

METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}
OVERVIEW = "overview"  # name of the view of ``render`` that shows the whole arm


class UnknownArgumentError(UserError, TypeError):
    """A keyword argument that nothing takes: what Python raises, with the nearest name."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What ``render`` shows: a camera by name, ``width`` × ``height`` pixels, or a Camera as it is."""

    mode: str | None
    """``rgb_array``, or None if nothing is rendered."""
    camera: str | Camera
    """``overview``, a name in CAMERAS, or a Camera."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""

    def viewer(self, pool: MujocoPool) -> QuickViewer | None:
        """Return the viewer of a pool that was not reset so far; UserError for an unknown mode or camera."""
        if self.mode is not None and self.mode not in METADATA["render_modes"]:
            raise unknown_name("render_mode", str(self.mode), METADATA["render_modes"])
        camera = self.camera
        if isinstance(camera, str):
            if camera not in (OVERVIEW, *CAMERAS):
                raise unknown_name("camera", camera, [OVERVIEW, *CAMERAS])
            placed = FRONT if camera == OVERVIEW else CAMERAS[camera]
            camera = replace(placed, width=self.width, height=self.height)
        elif not isinstance(camera, Camera):
            raise UserError(f"camera: got {camera!r}, allowed: a name or a Camera; what a policy sees is cameras=")
        return None if self.mode is None else QuickViewer(pool, camera)


class SimulatedTask:
    """A pool with its sampler and viewer. UserError for an unknown task, option, camera or render mode.

    options: of the task. rendering: what ``frames`` renders.
    """

    def __init__(
        self,
        task: str,
        options: dict[str, Any],
        num_envs: int,
        num_threads: int,
        sim: dict[str, Any] | None,
        rendering: Rendering,
        splits: str | Sequence[str],
        cameras: Sequence[Camera],
        stagger: bool = False,
    ) -> None:
        entry = TASKS[task]
        self._pool: MujocoPool | None = MujocoPool(
            entry.build(from_mapping(entry.config, options)), num_envs=num_envs, num_threads=num_threads,
            sim=from_mapping(SimConfig, sim or {}, "sim"), cameras=cameras,
        )  # fmt: skip
        spec = self._pool.spec
        setup = SamplerSetup(
            num_envs, splits=splits_of(splits), stagger=stagger,
            stages="held_starts" in options,  # the default share is for training only
        )  # fmt: skip
        self._sampler = UniformSampler(spec, UniformConfig(), setup)
        self._seeded_N = np.zeros(num_envs, dtype=np.bool_)
        self._viewer = rendering.viewer(self._pool)
        self._texts = np.array(spec.texts, dtype=object)
        self.has_goals = len(set(spec.goals)) > 1
        self.metadata = {**METADATA, "render_fps": round(1 / spec.control_dt_s)}

    @property
    def pool(self) -> MujocoPool:
        """The pool; ClosedEnvironmentError after ``close``."""
        if self._pool is None:
            raise ClosedEnvironmentError("the environment was closed")
        return self._pool

    def running(self, waiting: bool = False) -> MujocoPool:
        """Return the pool; ResetNeeded before the first reset and, unless ``waiting``, if an episode has ended."""
        pool = self.pool
        if pool.sampler is None:
            raise ResetNeeded("call reset() first: no episode has begun")
        if not waiting and bool(pool.waiting_N.any()):
            ended = pool.waiting_N.nonzero().squeeze(-1)[:5].tolist()
            raise ResetNeeded(f"call reset() first: the episode has ended in env {', '.join(map(str, ended))}")
        return pool

    def reset(self, seeds: Sequence[int | None], random: np.random.Generator, mask_N: NDArray[np.bool_] | None) -> Obs:
        """Start new episodes in all envs, or in those of the mask, and return what all envs observe.

        seeds: env seed of each env; None: the next episode, or the first one of a seed from ``random`` if the env had
        no seed so far. ResetNeeded for a mask before all envs were reset.
        """
        pool = self.pool
        mask_N = np.ones(pool.num_envs, np.bool_) if mask_N is None else mask_N
        if pool.sampler is None and not mask_N.all():
            raise ResetNeeded("reset_mask: the first reset must be one of all envs")
        for row, seed in enumerate(seeds):
            if mask_N[row] and not (seed is None and self._seeded_N[row]):
                drawn = int(random.integers(2**31)) if seed is None else seed
                self._sampler.reseed(np.array([row]), np.array([drawn], dtype=np.int64))
                self._seeded_N[row] = True
        if mask_N.all():
            return pool.reset(self._sampler)
        self.begin_next(np.flatnonzero(mask_N))
        return pool.observe()

    def begin_next(self, ids: Ints) -> None:
        """Start the next episodes of envs ``ids`` [n]."""
        self.pool.begin(ids, self._sampler.skip_to_next(ids))

    def texts(self, instruction_n: Ints) -> NDArray[np.object_]:
        """Return the texts of instructions, str [n]."""
        return np.take(self._texts, instruction_n)

    def frames(self) -> NDArray[np.uint8] | None:
        """Render all envs, [N, h, w, 3]; None without a render mode. ResetNeeded before the first reset."""
        self.running(waiting=True)
        return None if self._viewer is None else self._viewer.render()

    def close(self) -> None:
        """Release the pool and the viewer."""
        self._pool = self._viewer = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return all that ``load_state_dict`` needs to go on exactly; None if closed."""
        if self._pool is None:
            return None
        begun = self._pool.sampler is not None
        return {
            "seeded": self._seeded_N.copy(),
            "sampler": self._sampler.state_dict(),
            "pool": self._pool.state_dict() if begun else None,
            "waiting": self._pool.waiting_N.clone(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from ``state_dict`` of a task with the same arguments; close if it is None."""
        if state is None:
            return self.close()
        self._seeded_N[:] = state["seeded"]
        self._sampler.load_state_dict(state["sampler"])
        if state["pool"] is not None:
            self.pool.load_state_dict(state["pool"], self._sampler)
            self.pool.waiting_N.copy_(state["waiting"])


class Copyable:
    """Makes ``pickle`` and ``copy.deepcopy`` copy an env by its constructor's arguments and its state.

    A copy goes on exactly as the original would. Subclasses have ``_arguments`` and ``_simulated``.
    """

    _arguments: dict[str, Any]
    _simulated: SimulatedTask

    def __reduce__(self) -> tuple[Any, ...]:
        own = {key: value for key, value in self.__dict__.items() if key not in ("_simulated", "_arguments")}
        return _rebuilt, (type(self), self._arguments, self._simulated.state_dict(), own)


def _rebuilt(cls: type[Any], arguments: dict[str, Any], state: dict[str, Any] | None, own: dict[str, Any]) -> Any:
    """Return the copy of an env. own: its other attributes."""
    env = cls(**arguments)
    env.__dict__.update(own)
    env._simulated.load_state_dict(state)
    return env


def check_options(cls: type[Any], task: str, options: dict[str, Any]) -> None:
    """Raise UnknownArgumentError unless all keyword arguments of a view are options of the task."""
    allowed = {field.name for field in fields(TASKS[task].config)}
    for name in options:
        if name not in allowed:
            own = {key for key, taken in inspect.signature(cls).parameters.items() if taken.kind is taken.KEYWORD_ONLY}
            suggestion = nearest(name, sorted(allowed | own))
            hint = f" Did you mean '{suggestion}'?" if suggestion else ""
            raise UnknownArgumentError(
                f"{cls.__name__}.__init__() got an unexpected keyword argument '{name}'.{hint} "
                f"Allowed: {', '.join(sorted(allowed | own))}"
            )


def cameras_of(cameras: str | Camera | Sequence[str | Camera], image_size: int) -> list[Camera]:
    """Return Camera objects unchanged, and for names the camera with ``image_size`` pixels in width and height.

    cameras: one or several.
    """
    if image_size < 1:
        raise UserError(f"image_size: got {image_size}, allowed: at least 1")
    return [
        camera if isinstance(camera, Camera) else replace(find_camera(camera), width=image_size, height=image_size)
        for camera in ([cameras] if isinstance(cameras, (str, Camera)) else cameras)
    ]


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


def reset_mask(options: dict[str, Any] | None, num_envs: int) -> NDArray[np.bool_] | None:
    """Return the mask of the envs to reset (None: all); UserError for another option or another array."""
    unknown = [str(key) for key in options or {} if key != "reset_mask"]
    if unknown:
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
