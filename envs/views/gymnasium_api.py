"""The tasks as gymnasium environments ``embodied/Reach-v0``, ``embodied/PickPlace-v0``, ...; ``envs`` registers them.

    gymnasium.make(id)                   one env; the time limit is gymnasium's TimeLimit wrapper, as everywhere
    gymnasium.make_vec(id, num_envs=n)   the native pool, SAME_STEP autoreset

gymnasium 1.x has no plugin entry points: write ``import envs`` first, or name the module in the id, as in
``gymnasium.make("envs:embodied/Reach-v0")``.

Observations are ``{"state": float32 [S]}``, what a policy may see. What only a simulator knows is not among them: it
is ``info["privileged"]``, float32 [P], for critics. ``info["success"]``, also under the name ``is_success`` that
stable-baselines3 reads, tells whether the task is solved in the state that ``info`` belongs to, and
``info["instruction"]`` what the robot is told there, in words. Bounds of observations are those beyond which the engine
itself calls a state diverged.

With ``cameras=["front", "wrist"]``, names in ``envs.rendering.vision.CAMERAS``, observations have their pictures beside
the state: ``images.<name>``, uint8 [h, w, 3], ``image_size`` pixels wide and high. The state is then what the robot
knows of itself, and ``info["privileged"]`` has the rest of it.

Keyword arguments of ``make`` and ``make_vec`` are the task's options (``cube_mass_kg=0.1``,
``control={"mode": "joint_delta"}``), ``sim`` (options of SimConfig), ``splits`` of the instructions that episodes come
from (by default those to train on), ``cameras``, ``image_size``, ``num_threads`` and ``render_mode``; a wrong one is a
ValueError that names the nearest.
"""

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
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from embodied.core.episodes import Ints
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import from_mapping
from embodied.core.spec import TRAIN, EnvSpec
from embodied.core.types import Obs
from envs.common.sampler import SamplerSetup, UniformConfig, UniformSampler
from envs.mujoco.pool import MujocoPool, SimConfig
from envs.mujoco.viewer import Viewer
from envs.registry import TASKS
from envs.rendering.cameras import Camera
from envs.rendering.vision import find_camera

Observation = dict[str, NDArray[Any]]
Info = dict[str, Any]

METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}
_NO_LIMIT = 2**31 - 1  # control steps; more than three years


class TaskEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """One env of a task. Truncated only if its simulation diverges (TimeLimit does the rest); terminated if it fails.

    task: name in the registry of tasks. cameras: by name, ``image_size`` pixels wide and high, or as Camera objects.
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
        self._simulated = _Simulated(
            task, {"max_episode_steps": _NO_LIMIT, **options}, 1, num_threads, sim, render_mode, splits,
            _cameras(cameras, image_size),
        )  # fmt: skip
        self.render_mode = render_mode
        self.metadata = self._simulated.metadata
        self.observation_space, self.action_space = _spaces(self._simulated.pool.spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """The first episode of ``seed``, or the one after the present one. There are no options: ValueError."""
        super().reset(seed=seed)
        obs = self._simulated.reset(seed, options, self.np_random)
        pool = self._simulated.pool
        return _row(_seen(obs), 0), self._info(obs["privileged"], pool.task.success(), pool.plans.instruction_n)

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, Info]:
        """One control step. ValueError if action is not finite or not of shape [A]; nothing is executed then."""
        pool = self._simulated.pool
        step = pool.step(_checked(action, self.action_space)[None])
        terminated, truncated = bool(step.terminated_N[0]), bool(step.truncated_N[0])
        ended = terminated or truncated
        obs = step.final_obs if ended else step.obs
        plans = step.episodes.plans if ended else pool.plans
        info = self._info(obs["privileged"], step.info["success"], plans.instruction_n)
        return _row(_seen(obs), 0), float(step.reward_N[0]), terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        """A picture [h, w, 3] if ``render_mode="rgb_array"``, with a green frame while the task is solved."""
        return None if self.render_mode is None else self._simulated.frames()[0]

    def close(self) -> None:
        self._simulated.close()

    def _info(self, privileged_1P: torch.Tensor, success_1: torch.Tensor, instruction_1: Ints) -> Info:
        success = bool(success_1[0])
        text = self._simulated.texts(instruction_1)[0]
        return {"privileged": privileged_1P[0].numpy(), "success": success, "is_success": success, "instruction": text}


class TaskVectorEnv(VectorEnv[Observation, NDArray[np.float32], NDArray[Any]]):
    """N envs of a task in one batch of simulations, with arrays of N rows.

    ``infos`` are those of gymnasium's own vector envs: arrays with a mask of the same name and ``_`` before it, and for
    rows that ended ``final_obs`` (an array of objects, None in other rows) and ``final_info``.
    num_threads: that step the simulations, 0 for all cores. stagger: first episodes start at different elapsed times.
    cameras, image_size: as in TaskEnv.
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
        self._simulated = _Simulated(
            task, options, num_envs, num_threads, sim, render_mode, splits, _cameras(cameras, image_size), stagger
        )
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.metadata = {**self._simulated.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = _spaces(self._simulated.pool.spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """New episodes everywhere; env i starts from seed + i. There are no options: ValueError."""
        super().reset(seed=seed)
        obs = self._simulated.reset(seed, options, self.np_random)
        pool = self._simulated.pool
        texts = self._simulated.texts(pool.plans.instruction_n)
        return _seen(obs), self._infos(obs["privileged"], pool.task.success(), texts)

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[Observation, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """One control step of all envs. ValueError if actions are not finite or not [N, A]; then nothing happened."""
        pool = self._simulated.pool
        step = pool.step(_checked(actions, self.action_space))
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
            seen = _seen(step.final_obs)
            for i, row in enumerate(ended.tolist()):
                final_obs[row] = _row(seen, i)
            final_texts[ended.numpy()] = self._simulated.texts(step.episodes.plans.instruction_n)
            privileged_NP = torch.zeros_like(step.obs["privileged"])
            privileged_NP[ended] = step.final_obs["privileged"]
            final_info = self._infos(privileged_NP, success_N & ended_N, final_texts, mask_N)
            infos |= {"final_obs": final_obs, "_final_obs": mask_N, "final_info": final_info, "_final_info": mask_N}
        reward_N = step.reward_N.double().numpy()
        return _seen(step.obs), reward_N, step.terminated_N.numpy(), step.truncated_N.numpy(), infos

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """A picture [h, w, 3] of every env if ``render_mode="rgb_array"``."""
        return None if self.render_mode is None else tuple(self._simulated.frames())

    def close_extras(self, **kwargs: Any) -> None:
        self._simulated.close()

    def _infos(
        self,
        privileged_NP: torch.Tensor,
        success_N: torch.Tensor,
        texts_N: NDArray[np.object_],
        mask_N: NDArray[np.bool_] | None = None,
    ) -> Info:
        success = success_N.numpy()
        values = {
            "privileged": privileged_NP.numpy(), "success": success, "is_success": success, "instruction": texts_N,
        }  # fmt: skip
        masks = {f"_{key}": np.ones(self.num_envs, bool) if mask_N is None else mask_N.copy() for key in values}
        return {key: value.copy() for key, value in values.items()} | masks


class _Simulated:
    """A pool that may be closed, and how it is reset and looked at."""

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
            stages="held_starts" in options,  # the default share is for training
        )  # fmt: skip
        self._sampler = self._sampler_of(0)
        self._texts = np.array(self._pool.spec.texts, dtype=object)
        self._viewer: Viewer | None = None
        self._seeded = False
        self.metadata = {**METADATA, "render_fps": round(1 / self._pool.spec.control_dt_s)}

    @property
    def pool(self) -> MujocoPool:
        if self._pool is None:
            raise ClosedEnvironmentError("the environment was closed")
        return self._pool

    def reset(self, seed: int | None, options: dict[str, Any] | None, random: np.random.Generator) -> Obs:
        """New episodes. Without any seed so far, one is drawn from ``random``."""
        if options:
            raise UserError(f"reset takes no options, got: {', '.join(map(str, options))}")
        if seed is None and not self._seeded:
            seed = int(random.integers(2**31))
        self._seeded = True
        if seed is not None:
            self._sampler = self._sampler_of(seed)
        return self.pool.reset(self._sampler)

    def _sampler_of(self, seed: int) -> UniformSampler:
        return UniformSampler(self.pool.spec, UniformConfig(), replace(self._setup, seed=seed))

    def texts(self, instruction_n: Ints) -> NDArray[np.object_]:
        """The texts of instructions, str [n]."""
        return np.take(self._texts, instruction_n)

    def frames(self) -> NDArray[np.uint8]:
        """Pictures of all envs, [N, h, w, 3]."""
        if self._viewer is None:
            self._viewer = Viewer(self.pool)
        return self._viewer.render()

    def close(self) -> None:
        self._pool = self._viewer = None


def _spaces(spec: EnvSpec) -> tuple[Space[Observation], Space[NDArray[np.float32]]]:
    """Spaces of one env: observation and action."""
    limit = np.full(spec.state_dim, mujoco.mjMAXVAL, np.float32)
    pictures = {f"images.{cam.name}": Box(0, 255, (cam.height, cam.width, 3), np.uint8) for cam in spec.cameras}
    observation: Any = Dict({"state": Box(-limit, limit), **pictures})
    action: Any = Box(-1.0, 1.0, (spec.action_dim,))
    return observation, action


def _cameras(cameras: Sequence[str | Camera], image_size: int) -> list[Camera]:
    """Those given by name, ``image_size`` pixels wide and high; Camera objects as they are."""
    if image_size < 1:
        raise UserError(f"image_size: got {image_size}, allowed: at least 1")
    return [
        camera if isinstance(camera, Camera) else replace(find_camera(camera), width=image_size, height=image_size)
        for camera in cameras
    ]


def _seen(obs: Obs) -> Observation:
    """What of the pool's observation is in the observation space, [N, ...]."""
    return {key: value.numpy() for key, value in obs.items() if key == "state" or key.startswith("images.")}


def _row(observation: Observation, row: int) -> Observation:
    return {key: value[row] for key, value in observation.items()}


def _checked(action: ArrayLike, space: gymnasium.Space[Any]) -> torch.Tensor:
    """The action as a tensor of the space's shape; the pool checks its values."""
    array = np.asarray(action, dtype=np.float32)
    if array.shape != space.shape:
        raise ValueError(f"action: got shape {array.shape}, needed {space.shape}")
    return torch.from_numpy(array)


def gymnasium_id(task: str) -> str:
    """``pick_place`` → ``embodied/PickPlace-v0``"""
    return f"embodied/{''.join(word.capitalize() for word in task.split('_'))}-v0"


def register_tasks() -> None:
    """Give every registered task its gymnasium id. Called when ``envs`` is imported."""
    for task in TASKS.names():
        gymnasium.register(
            gymnasium_id(task),
            entry_point=f"{__name__}:{TaskEnv.__name__}",
            vector_entry_point=f"{__name__}:{TaskVectorEnv.__name__}",
            max_episode_steps=TASKS[task].config().max_episode_steps,
            kwargs={"task": task},
        )
