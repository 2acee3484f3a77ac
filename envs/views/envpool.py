"""Our environments with EnvPool's API for gymnasium: numpy arrays, ``send`` and ``recv``, NEXT_STEP autoreset.

    envs = embodied.envs.views.envpool.make("lift", num_envs=64, batch_size=32)
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.types import Obs
from embodied.envs.views.envpool_spec import Spec, form_of
from embodied.envs.views.stepper import Stepper, open_task

Batch = tuple[Any, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]
"""Observations, rewards, terminated, truncated and infos of some envs."""


def make(
    task: str, num_envs: int, *, batch_size: int = 0, seed: int = 0, num_threads: int = 0, **options: Any
) -> EnvPoolView:
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``.

    batch_size: envs of one ``recv``, a divisor of ``num_envs`` (0: all). num_threads: threads that step all simulations
    (0: all cores).
    """
    size = batch_size or num_envs
    if size < 1 or num_envs % size:
        raise UserError(f"batch_size: got {batch_size}, allowed: divisors of num_envs, {num_envs}")
    count = num_envs // size
    threads = num_threads if count == 1 or num_threads < 0 else max(1, (num_threads or os.cpu_count() or 1) // count)
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
        self._given = (batches, config)
        self._threads = ThreadPoolExecutor(len(batches), "batch")
        self._done: Queue[Future[Batch]] = Queue()
        self._pending = 0  # batches that were sent and not received

    def __len__(self) -> int:
        return self.num_envs

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pending:
            raise UserError("a copy of environments with a step under way: call recv first")
        return type(self), self._given

    @property
    def config(self) -> dict[str, Any]:
        """Options of the environments, by name."""
        config: dict[str, Any] = self.spec.config._asdict()
        return config

    @property
    def is_async(self) -> bool:
        """Whether one ``recv`` returns only some of the envs."""
        return len(self._batches) > 1

    def async_reset(self) -> None:
        """Start an episode in every env; ``recv`` returns the first observations."""
        for batch in self._batches:
            self._run(batch.reset)

    def send(self, action: NDArray[Any] | dict[str, Any], env_id: NDArray[Any] | None = None) -> None:
        """Begin a control step of envs ``env_id`` (None: all) with actions [n, A], or {"action", "env_id"}.

        ValueError for envs that are not one batch in order, as ``info["env_id"]`` has them, or another shape.
        """
        if isinstance(action, dict):
            env_id = action.get("env_id", env_id)
            action = action["action"]
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
        self._pending -= 1
        done = self._done.get().result()
        return (done[0], done[4]) if reset else done

    def step(self, action: NDArray[Any] | dict[str, Any], env_id: NDArray[Any] | None = None) -> Batch:
        """Make a control step: ``send``, then ``recv``."""
        self.send(action, env_id)
        batch: Batch = self.recv()
        return batch

    def reset(self, env_id: NDArray[Any] | None = None) -> tuple[Any, dict[str, Any]]:
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
        """Have a thread call ``call``; what it returns or raises comes out of ``recv``."""
        self._pending += 1
        self._threads.submit(call).add_done_callback(self._done.put)


class _Batch:
    """A stepper with the ids of its envs."""

    def __init__(self, stepper: Stepper, ids: NDArray[np.int32]) -> None:
        self.stepper, self.ids, self.form = stepper, ids, form_of(stepper.spec)

    def reset(self) -> Batch:
        """Start an episode in every env."""
        return self._batch(self.stepper.reset())

    def begin(self, ids: NDArray[Any]) -> Batch:
        """Start the next episodes of the envs in these rows."""
        return self._batch(self.stepper.begin(ids.astype(np.int64)), ids)

    def step(self, action: NDArray[Any]) -> Batch:
        """Make one control step; envs that wait begin their next episode instead."""
        step = self.stepper.step_or_begin(action)
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
        return self.form(obs), np.zeros(len(ids), np.float32), ends[0], ends[1], info
