"""The part that both gymnasium views share: a pool that can be closed, its seeding, spaces and observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError
from gymnasium.spaces import Box, Dict, Space
from numpy.typing import ArrayLike, NDArray

from embodied.core.episodes import Ints
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import from_mapping
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from envs.common.sampler import SamplerSetup, UniformConfig, UniformSampler
from envs.mujoco.pool import MujocoPool, SimConfig
from envs.mujoco.viewer import Viewer
from envs.registry import TASKS
from envs.rendering.cameras import Camera
from envs.rendering.vision import find_camera

Observation = dict[str, NDArray[Any]]

METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}


class SimulatedTask:
    """A pool with its sampler and viewer. UserError for an unknown task, option, camera or render mode."""

    def __init__(
        self,
        task: str,
        options: dict[str, Any],
        num_envs: int,
        num_threads: int,
        sim: dict[str, Any] | None,
        render_mode: str | None,
        splits: Sequence[str],
        cameras: Sequence[Camera],
        stagger: bool = False,
    ) -> None:
        if render_mode is not None and render_mode not in METADATA["render_modes"]:
            raise unknown_name("render_mode", str(render_mode), METADATA["render_modes"])
        entry = TASKS[task]
        config = from_mapping(entry.config, options)
        self._pool: MujocoPool | None = MujocoPool(
            entry.build(config), num_envs=num_envs, num_threads=num_threads,
            sim=from_mapping(SimConfig, sim or {}, "sim"), cameras=cameras,
        )  # fmt: skip
        self._setup = SamplerSetup(
            num_envs, splits=tuple(splits), stagger=stagger,
            stages="held_starts" in options,  # the default share is for training only
        )  # fmt: skip
        self._sampler = self._sampler_of(0)
        self._texts = np.array(self._pool.spec.texts, dtype=object)
        self._viewer: Viewer | None = None
        self._seeded = False
        self.metadata = {**METADATA, "render_fps": round(1 / self._pool.spec.control_dt_s)}

    @property
    def pool(self) -> MujocoPool:
        """The pool; ClosedEnvironmentError after ``close``."""
        if self._pool is None:
            raise ClosedEnvironmentError("the environment was closed")
        return self._pool

    def reset(self, seed: int | None, options: dict[str, Any] | None, random: np.random.Generator) -> Obs:
        """Start new episodes; if no seed was given so far, draw one from ``random``. UserError for options."""
        if options:
            raise UserError(f"reset takes no options, got: {', '.join(map(str, options))}")
        if seed is None and not self._seeded:
            seed = int(random.integers(2**31))
        self._seeded = True
        if seed is not None:
            self._sampler = self._sampler_of(seed)
        return self.pool.reset(self._sampler)

    def _sampler_of(self, seed: int) -> UniformSampler:
        """Return a sampler whose env i has env seed ``seed + i``."""
        return UniformSampler(self.pool.spec, UniformConfig(), replace(self._setup, seed=seed))

    def texts(self, instruction_n: Ints) -> NDArray[np.object_]:
        """Return the texts of instructions, str [n]."""
        return np.take(self._texts, instruction_n)

    def frames(self) -> NDArray[np.uint8]:
        """Render all envs, [N, h, w, 3]."""
        if self._viewer is None:
            self._viewer = Viewer(self.pool)
        return self._viewer.render()

    def close(self) -> None:
        """Release the pool and the viewer."""
        self._pool = self._viewer = None


def spaces(spec: EnvSpec) -> tuple[Space[Observation], Space[NDArray[np.float32]]]:
    """Return the observation space and the action space of one env."""
    limit = np.full(spec.state_dim, mujoco.mjMAXVAL, np.float32)
    images = {f"images.{cam.name}": Box(0, 255, (cam.height, cam.width, 3), np.uint8) for cam in spec.cameras}
    observation: Any = Dict({"state": Box(-limit, limit), **images})
    action: Any = Box(-1.0, 1.0, (spec.action_dim,))
    return observation, action


def cameras_of(cameras: Sequence[str | Camera], image_size: int) -> list[Camera]:
    """Return Camera objects unchanged, and for names the camera with ``image_size`` pixels in width and height."""
    if image_size < 1:
        raise UserError(f"image_size: got {image_size}, allowed: at least 1")
    return [
        camera if isinstance(camera, Camera) else replace(find_camera(camera), width=image_size, height=image_size)
        for camera in cameras
    ]


def policy_obs(obs: Obs) -> Observation:
    """Return the part of the pool's observation that is in the observation space, [N, ...]."""
    return {key: value.numpy() for key, value in obs.items() if key == "state" or key.startswith("images.")}


def take_row(observation: Observation, row: int) -> Observation:
    """Return the observation of one env."""
    return {key: value[row] for key, value in observation.items()}


def check_shape(action: ArrayLike, space: gymnasium.Space[Any]) -> torch.Tensor:
    """Return the action as a tensor; ValueError unless it has the space's shape. The pool checks its values."""
    array = np.asarray(action, dtype=np.float32)
    if array.shape != space.shape:
        raise ValueError(f"action: got shape {array.shape}, needed {space.shape}")
    return torch.from_numpy(array)
