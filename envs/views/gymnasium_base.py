"""The part that both gymnasium views share: their pool, its seeds and its images."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.episodes import Ints
from embodied.core.errors import UserError, nearest, unknown_name
from embodied.core.options import from_mapping
from embodied.core.types import Obs
from embodied.envs.mujoco.pool import MujocoPool, SimConfig
from embodied.envs.mujoco.viewer import FRONT, QuickViewer
from embodied.envs.registry import TASKS
from embodied.envs.rendering.cameras import Camera
from embodied.envs.rendering.vision import CAMERAS, find_camera
from embodied.envs.views.spaces import Form
from embodied.envs.views.stepper import Stepper, copyable

METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}
Bools = NDArray[np.bool_]
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
        return None if self.mode is None else QuickViewer(pool.task, pool.batch, camera)


@copyable
def open_pool(
    task: str,
    options: dict[str, Any],
    num_envs: int,
    num_threads: int,
    sim: dict[str, Any] | None,
    rendering: Rendering,
    splits: str | Sequence[str],
    cameras: Sequence[Camera],
    stagger: bool = False,
    autoreset: bool = False,
) -> Stepper:
    """Build a pool and return its stepper. UserError for an unknown task, option, camera or render mode.

    options: of the task. rendering: what ``frames`` renders.
    """
    entry = TASKS[task]
    pool = MujocoPool(
        entry.build(from_mapping(entry.config, options)), num_envs=num_envs, num_threads=num_threads,
        sim=from_mapping(SimConfig, sim or {}, "sim"), cameras=cameras,
    )  # fmt: skip
    viewer = rendering.viewer(pool)
    return Stepper(
        pool, splits=splits, stagger=stagger, autoreset=autoreset, film=None if viewer is None else viewer.render,
        stages="held_starts" in options,  # the default share is for training only
    )  # fmt: skip


def metadata_of(stepper: Stepper) -> dict[str, Any]:
    """Return gymnasium's metadata of a pool."""
    return {**METADATA, "render_fps": round(1 / stepper.spec.control_dt_s)}


def form_of(stepper: Stepper, flat: bool | None) -> Form:
    """Return the form of a pool's observations; flat unless there are cameras if ``flat`` is None.

    UserError for a flat form with cameras.
    """
    cameras = [camera.name for camera in stepper.spec.cameras]
    if flat and cameras:
        raise UserError(f"flat: got True with the cameras {', '.join(cameras)}, allowed: True without cameras")
    return Form(stepper.spec, not cameras if flat is None else flat, bound=mujoco.mjMAXVAL)


class PoolView:
    """The part of both views that does not depend on gymnasium's two interfaces."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._seeded_N = np.zeros(stepper.num_envs, dtype=np.bool_)
        self._texts = np.array(stepper.spec.texts, dtype=object)
        self._has_goals = len(set(stepper.spec.goals)) > 1

    @property
    def pool(self) -> MujocoPool:
        """The pool; ClosedEnvironmentError after ``close``."""
        env = self._stepper.env
        assert isinstance(env, MujocoPool)
        return env

    def _reset(self, seeds: Sequence[int | None], random: np.random.Generator, mask_N: Bools | None) -> Obs:
        """Start new episodes in all envs, or in those of the mask, and return what all envs observe.

        seeds: env seed of each env; None: the next episode, or the first one of a seed from ``random`` if the env had
        no seed so far.
        """
        chosen_N = np.ones(len(seeds), np.bool_) if mask_N is None else mask_N
        given = [
            int(random.integers(2**31)) if seed is None and chosen and not seeded else seed
            for seed, chosen, seeded in zip(seeds, chosen_N, self._seeded_N, strict=True)
        ]
        obs = self._stepper.reset(given, mask_N=mask_N)
        self._seeded_N |= chosen_N
        return obs

    def _instructions(self, instruction_n: Ints) -> NDArray[np.object_]:
        """Return the texts of instructions, str [n]."""
        return np.take(self._texts, instruction_n)


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


def reset_mask(options: dict[str, Any] | None, num_envs: int) -> Bools | None:
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
