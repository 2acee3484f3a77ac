"""Our environments with EnvPool's API for gymnasium: numpy arrays, ``send`` and ``recv``, NEXT_STEP autoreset.

    envs = envs.views.envpool.make("lift", num_envs=64, batch_size=32)
    envs.async_reset()
    while True:
        obs, reward, terminated, truncated, info = envs.recv()       of the 32 envs info["env_id"]
        envs.send(policy(obs), info["env_id"])

``batch_size`` envs are a batch of simulations with a thread of its own, so that one batch is simulated while the policy
acts on another. Envs of a batch are always received and sent together. With ``batch_size=num_envs``, the default,
``reset`` and ``step`` work too.

As in EnvPool, the last observation of an episode is returned. The next step of that env ignores its action and returns
the first observation of the next episode, with reward 0 and ``info["elapsed_step"]`` 0: leave that transition out.
"""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode
from numpy.typing import ArrayLike, NDArray

from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from envs.views.stepper import Stepper, action_space, open_task, pixels, unbounded

Batch = tuple[Any, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]
"""Observations, rewards, terminated, truncated and infos of some envs."""


def make(
    task: str, num_envs: int, *, batch_size: int = 0, seed: int = 0, num_threads: int = 0, **options: Any
) -> EnvPoolView:
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``envs.views.stepper.open_task``.

    batch_size: envs of one ``recv``, a divisor of ``num_envs`` (0: all). num_threads: threads that step all simulations
    (0: all cores).
    """
    size = batch_size or num_envs
    if size < 1 or num_envs % size:
        raise UserError(f"batch_size: got {batch_size}, allowed: divisors of num_envs, {num_envs}")
    count = num_envs // size
    threads = num_threads if count == 1 else max(1, (num_threads or os.cpu_count() or 1) // count)
    return EnvPoolView(
        [
            open_task(task, size, seed=seed + i * size, num_threads=threads, autoreset=False, **options)
            for i in range(count)
        ],
        {"seed": seed, "num_threads": num_threads},
    )


class EnvPoolView:
    """Several batches of equally many environments of one task. Used by one thread.

    batches: steppers with ``autoreset=False``. config: further entries of ``config``, as they were chosen.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, batches: Sequence[Stepper], config: dict[str, Any] | None = None) -> None:
        size = batches[0].num_envs
        self.num_envs = size * len(batches)
        self.spec = Spec(
            batches[0].spec,
            {
                "num_envs": self.num_envs,
                "batch_size": size,
                "max_episode_steps": batches[0].spec.max_episode_steps,
                "max_num_players": 1,
                "gym_reset_return_info": True,
                **(config or {}),
            },
        )
        self.all_env_ids = np.arange(self.num_envs, dtype=np.int32)
        self.observation_space = self.single_observation_space = self.spec.observation_space
        self.action_space = self.single_action_space = self.spec.action_space
        self._batches = [
            _Batch(stepper, ids) for stepper, ids in zip(batches, np.split(self.all_env_ids, len(batches)), strict=True)
        ]
        self._threads = ThreadPoolExecutor(len(batches), "batch")
        self._done: Queue[Batch | Exception] = Queue()
        self._pending = 0  # batches that were sent and not received

    def __len__(self) -> int:
        return self.num_envs

    @property
    def config(self) -> dict[str, Any]:
        """Options of the environments, by name."""
        return self.spec.config._asdict()

    @property
    def is_async(self) -> bool:
        """Whether one ``recv`` returns only some of the envs."""
        return len(self._batches) > 1

    def async_reset(self) -> None:
        """Start an episode in every env; ``recv`` returns the first observations."""
        for batch in self._batches:
            self._run(batch.reset)

    def send(self, action: ArrayLike | dict[str, Any], env_id: ArrayLike | None = None) -> None:
        """Begin a control step of envs ``env_id`` (None: all) with actions [n, A], or {"action", "env_id"}.

        ValueError for envs that are not one batch in order, as ``info["env_id"]`` has them, or another shape.
        """
        if isinstance(action, dict):
            action, env_id = action["action"], action.get("env_id", env_id)
        ids = self.all_env_ids if env_id is None else np.asarray(env_id)
        batch = next((batch for batch in self._batches if np.array_equal(batch.ids, ids)), None)
        if batch is None:
            size = len(self._batches[0].ids)
            raise ValueError(f"env_id: got {ids[:5].tolist()}..., needed the {size} ids of a batch that recv returned")
        array = np.asarray(action)
        if array.shape[:1] != ids.shape:
            raise ValueError(f"action: got {list(array.shape)}, needed one row for each of {len(ids)} envs")
        self._run(lambda: batch.step(array))

    def recv(self, reset: bool = False, return_info: bool = True) -> Any:
        """Wait for the batch that is finished first; return observations, rewards [n], terminated, truncated, infos.

        reset: return observations and infos alone. ValueError if nothing was sent.
        """
        if not self._pending:
            raise ValueError("recv: nothing was sent; call async_reset or send first")
        done = self._done.get()
        self._pending -= 1
        if isinstance(done, Exception):
            raise done
        return (done[0], done[4]) if reset else done

    def step(self, action: ArrayLike | dict[str, Any], env_id: ArrayLike | None = None) -> Batch:
        """Make a control step: ``send``, then ``recv``."""
        self.send(action, env_id)
        batch: Batch = self.recv()
        return batch

    def reset(self, env_id: ArrayLike | None = None) -> tuple[Any, dict[str, Any]]:
        """Start episodes in envs ``env_id`` (None: all) and return their observations and infos.

        ValueError if ``batch_size`` is not ``num_envs``: use ``async_reset``.
        """
        if self.is_async or self._pending:
            raise ValueError("reset: batch_size is not num_envs, or a step is under way; use async_reset and recv")
        ids = self.all_env_ids if env_id is None else np.asarray(env_id)
        batch = self._batches[0]
        done = batch.reset() if len(ids) == self.num_envs else batch.begin(ids)
        return done[0], done[4]

    def close(self) -> None:
        """Wait for what is under way and release the environments."""
        self._threads.shutdown()
        for batch in self._batches:
            batch.stepper.close()

    def _run(self, call: Callable[[], Batch]) -> None:
        """Have a thread call ``call`` and put its result, or what it raised, into the queue."""

        def run() -> None:
            try:
                self._done.put(call())
            except Exception as error:  # noqa: BLE001 (raised again by recv)
                self._done.put(error)

        self._pending += 1
        self._threads.submit(run)


class _Batch:
    """A stepper with the ids of its envs."""

    def __init__(self, stepper: Stepper, ids: NDArray[np.int32]) -> None:
        self.stepper, self.ids = stepper, ids

    def reset(self) -> Batch:
        """Start an episode in every env."""
        return self._batch(self.stepper.reset())

    def begin(self, ids: NDArray[Any]) -> Batch:
        """Start the next episodes of the envs in these rows."""
        return self._batch(self.stepper.begin(ids.astype(np.int64)), ids)

    def step(self, action: NDArray[Any]) -> Batch:
        """Make one control step; envs that wait begin their next episode instead."""
        waiting = self.stepper.waiting_N.nonzero().squeeze(-1)
        step = self.stepper.step(action)
        if len(waiting):
            for key, first in self.stepper.begin(waiting.numpy()).items():
                step.obs[key][waiting] = first
        obs, _, _, _, info = self._batch(step.obs)
        for name, held_N in step.info.items():
            info[name] = held_N.cpu().numpy()
        ends = step.terminated_N.cpu().numpy(), step.truncated_N.cpu().numpy()
        return obs, step.reward_N.cpu().numpy(), *ends, info

    def _batch(self, obs: Obs, rows: NDArray[Any] | None = None) -> Batch:
        """Return observations of envs ``rows`` (None: all) with reward 0 and their infos."""
        rows = np.arange(len(self.ids)) if rows is None else rows
        ids, elapsed = self.ids[rows], self.stepper.elapsed_N[torch.from_numpy(rows)].numpy().astype(np.int32)
        info = {"env_id": ids, "players": {"env_id": ids}, "elapsed_step": elapsed}
        info |= {name: np.zeros(len(ids), np.bool_) for name in self.stepper.spec.outcomes}
        if "privileged" in obs:
            info["privileged"] = obs["privileged"].cpu().numpy()
        ends = np.zeros((2, len(ids)), np.bool_)
        return _observation(self.stepper.spec, obs), np.zeros(len(ids), np.float32), ends[0], ends[1], info


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Description of an array of EnvPool."""

    dtype: type
    """Type of an entry."""
    shape: list[int]
    """Shape for one env; -1 is the number of envs."""
    minimum: Any
    """Least value."""
    maximum: Any
    """Greatest value."""
    is_discrete: bool = False
    """Whether it is a choice."""


class Spec:
    """What EnvPool's ``spec`` says of environments: spaces, arrays and the options that they were built with."""

    reward_threshold = None

    def __init__(self, spec: EnvSpec, config: dict[str, Any]) -> None:
        self.config = namedtuple("Config", [*config])(**config)
        self.observation_space = self.gymnasium_observation_space = observation_space(spec)
        self.action_space = self.gymnasium_action_space = action_space(spec)

    @property
    def state_array_spec(self) -> dict[str, ArraySpec]:
        """Arrays that ``recv`` returns."""
        space = self.observation_space
        boxes = {"obs": space} if not isinstance(space, Dict) else {
            f"obs:{path}": box for path, box in _flat(space).items()
        }  # fmt: skip
        ints = ArraySpec(np.int32, [], -(2**31), 2**31 - 1)
        flags = ArraySpec(np.bool_, [], False, True)
        reward = ArraySpec(np.float32, [-1], -np.inf, np.inf)
        arrays = {"info:env_id": ints, "elapsed_step": ints, "done": flags, "trunc": flags, "reward": reward}
        return {**arrays, **{name: _array(box) for name, box in boxes.items()}}

    @property
    def action_array_spec(self) -> dict[str, ArraySpec]:
        """Arrays that ``send`` takes."""
        array = _array(self.action_space)
        ids = ArraySpec(np.int32, [], -(2**31), 2**31 - 1)
        action = ArraySpec(array.dtype, [-1, *array.shape], array.minimum, array.maximum, array.is_discrete)
        return {"env_id": ids, "players.env_id": ids, "action": action}


def observation_space(spec: EnvSpec) -> gymnasium.Space[Any]:
    """Return the space of one observation: a Box, or with cameras {"state", "images": {camera: Box}}."""
    state = unbounded(spec.state_dim)
    images = {camera.name: pixels(camera) for camera in spec.cameras}
    return Dict({"state": state, "images": Dict(images)}) if images else state


def _observation(spec: EnvSpec, obs: Obs) -> Any:
    """Return observations [n, ...] as arrays in the observation space."""
    state = obs["state"].cpu().numpy()
    images = {camera.name: obs[f"images.{camera.name}"].cpu().numpy() for camera in spec.cameras}
    return {"state": state, "images": images} if images else state


def _flat(space: Dict) -> dict[str, gymnasium.Space[Any]]:
    """Return the spaces in a nested Dict by their dotted paths."""
    flat: dict[str, gymnasium.Space[Any]] = {}
    for name, part in space.spaces.items():
        flat |= {f"{name}.{path}": box for path, box in _flat(part).items()} if isinstance(part, Dict) else {name: part}
    return flat


def _array(space: gymnasium.Space[Any]) -> ArraySpec:
    """Return the description of a Box or Discrete."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return ArraySpec(np.int64, [], 0, int(space.n) - 1, True)
    assert isinstance(space, gymnasium.spaces.Box)
    return ArraySpec(space.dtype.type, list(space.shape), space.low.min(), space.high.max())
