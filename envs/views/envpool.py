"""Our environments with EnvPool's API for gymnasium: numpy arrays, ``send`` and ``recv``, NEXT_STEP autoreset.

``batch_size`` envs are a batch of simulations with a thread of its own: one is simulated while the policy acts on
another. With ``batch_size=num_envs``, the default, ``reset`` and ``step`` work too. As in EnvPool, the step after the
last one of an episode ignores its action and returns the first observation of the next episode, with reward 0 and
``info["elapsed_step"]`` 0: leave that transition out.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Queue
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from embodied.core.device import available_cores
from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.envs.views.spaces import Form, action_space, box_or_discrete, first_seed
from embodied.envs.views.stepper import Stepper, open_task

Batch = tuple[Any, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]
"""Observations, rewards, terminated, truncated and infos of some envs."""


def make(
    task: str, num_envs: int, *, batch_size: int = 0, seed: int = 0, num_threads: int = 0, **options: Any
) -> "EnvPoolView":
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``.

    batch_size: envs of one ``recv``, a divisor of ``num_envs`` (0: all). num_threads: threads that step all simulations
    (0: all cores).
    """
    size = batch_size or num_envs
    if size < 1 or num_envs % size:
        raise UserError(f"batch_size: got {batch_size}, allowed: divisors of num_envs, {num_envs}")
    count, seed = num_envs // size, first_seed(seed, num_envs)
    threads = num_threads if count == 1 or num_threads < 0 else max(1, (num_threads or available_cores()) // count)
    options = {"num_threads": threads, "autoreset": AutoresetMode.NEXT_STEP, **options}
    batches = [open_task(task, size, seed=seed + i * size, **options) for i in range(count)]
    return EnvPoolView(batches, {"seed": seed, "num_threads": num_threads})


class EnvPoolView:
    """Several batches of equally many environments of one task. Used by one thread.

    batches: steppers with NEXT_STEP autoreset. config: further entries of ``config``, as they were chosen.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, batches: Sequence[Stepper], config: dict[str, Any] | None = None) -> None:
        spec, size = batches[0].spec, batches[0].num_envs
        self.num_envs = size * len(batches)
        self.config: dict[str, Any] = {
            "num_envs": self.num_envs, "batch_size": size, "max_episode_steps": spec.max_episode_steps,
            "max_num_players": 1, "gym_reset_return_info": True, **(config or {}),
        }  # fmt: skip
        self.spec = Spec(spec, self.config)
        self.is_async = len(batches) > 1  # one ``recv`` returns only some of the envs
        self.all_env_ids = np.arange(self.num_envs, dtype=np.int32)
        self.observation_space = self.single_observation_space = self.spec.observation_space
        self.action_space = self.single_action_space = self.spec.action_space
        self._batches = [
            _Batch(stepper, ids) for stepper, ids in zip(batches, np.split(self.all_env_ids, len(batches)), strict=True)
        ]
        self._given = (batches, config)
        self._threads = ThreadPoolExecutor(len(batches), "batch")
        self._done: Queue[tuple[_Batch, Future[Batch]]] = Queue()
        self._pending: list[_Batch] = []  # that were sent and not received

    def __len__(self) -> int:
        return self.num_envs

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pending:
            raise UserError("a copy of environments with a step under way: call recv first")
        return type(self), self._given

    def async_reset(self) -> None:
        """Start an episode in every env; ``recv`` returns the first observations."""
        for batch in self._batches:
            self._run(batch, partial(batch.begin, np.arange(len(batch.ids))))

    def send(self, action: NDArray[Any] | dict[str, Any], env_id: NDArray[Any] | None = None) -> None:
        """Begin a control step of envs ``env_id`` (None: all) with actions [n, A], or {"action", "env_id"}.

        ValueError for envs that are not one batch in order, as ``info["env_id"]`` has them, and for those under way.
        """
        if isinstance(action, dict):
            env_id = action.get("env_id", env_id)
            action = action["action"]
        ids = self.all_env_ids if env_id is None else np.asarray(env_id)
        batch = next((batch for batch in self._batches if np.array_equal(batch.ids, ids)), None)
        if batch is None:
            size = len(self._batches[0].ids)
            raise ValueError(f"env_id: got {ids[:5].tolist()}..., needed the {size} ids of a batch that recv returned")
        if batch in self._pending:
            raise ValueError(f"env_id: a step of the envs {ids[:5].tolist()}... is under way; call recv first")
        self._run(batch, partial(batch.step, np.asarray(action)))

    def recv(self) -> Batch:
        """Wait for the batch that is finished first and return its results. ValueError if nothing was sent."""
        if not self._pending:
            raise ValueError("recv: nothing was sent; call async_reset or send first")
        batch, done = self._done.get()
        self._pending.remove(batch)
        return done.result()

    def step(self, action: NDArray[Any] | dict[str, Any], env_id: NDArray[Any] | None = None) -> Batch:
        """Make a control step: ``send``, then ``recv``."""
        self.send(action, env_id)
        return self.recv()

    def reset(self, env_id: NDArray[Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start episodes in envs ``env_id`` (None: all); return their observations and infos, ordered by id.

        ValueError for ids that are not of envs or not different, for some of the envs before all were reset, and if
        ``batch_size`` is not ``num_envs``: use ``async_reset``.
        """
        if self.is_async or self._pending:
            raise ValueError("reset: batch_size is not num_envs, or a step is under way; use async_reset and recv")
        ids = np.atleast_1d(self.all_env_ids if env_id is None else env_id)
        rows = np.intersect1d(ids, self.all_env_ids)  # in order
        if ids.dtype.kind not in "iu" or ids.ndim > 1 or not 0 < len(rows) == len(ids):
            needed = f"different integers from 0 to {self.num_envs - 1}"
            raise ValueError(f"env_id: got {ids[:5].tolist()}, needed {needed}")
        obs, *_, info = self._batches[0].begin(rows)
        return obs, info

    def close(self) -> None:
        self._threads.shutdown()
        for batch in self._batches:
            batch.stepper.close()

    def _run(self, batch: "_Batch", call: Callable[[], Batch]) -> None:
        """Have a thread call ``call``; what it returns or raises comes out of ``recv``."""
        self._pending.append(batch)
        self._threads.submit(call).add_done_callback(lambda done: self._done.put((batch, done)))


class _Batch:
    def __init__(self, stepper: Stepper, ids: NDArray[np.int32]) -> None:
        self.stepper, self.ids, self.form = stepper, ids, form_of(stepper.spec)

    def begin(self, rows: NDArray[Any]) -> Batch:
        """Begin episodes in the envs of these rows, ascending; return their first observations, with reward 0."""
        everything = np.array_equal(rows, np.arange(len(self.ids)))
        obs = self.stepper.reset() if everything else self.stepper.begin(rows.astype(np.int64))
        info, nothing = self._info(obs, rows), np.zeros((3, len(rows)), np.bool_)
        info |= dict.fromkeys(self.stepper.spec.outcomes, nothing[0])
        return self.form(obs), np.zeros(len(rows), np.float32), nothing[1], nothing[2], info

    def step(self, action: NDArray[Any]) -> Batch:
        """Make one control step; envs that wait begin their next episode instead."""
        step = self.stepper.step(action)
        info = self._info(step.obs, np.arange(len(self.ids)))
        info |= {name: held_N.cpu().numpy() for name, held_N in step.info.items()}
        reward_N, terminated_N = step.reward_N.cpu().numpy(), step.terminated_N.cpu().numpy()
        return self.form(step.obs), reward_N, terminated_N, step.truncated_N.cpu().numpy(), info

    def _info(self, obs: Obs, rows: NDArray[Any]) -> dict[str, Any]:
        ids, elapsed = self.ids[rows], self.stepper.elapsed_N[torch.from_numpy(rows)].numpy().astype(np.int32)
        info = {"env_id": ids, "players": {"env_id": ids}, "elapsed_step": elapsed}
        return {**info, "privileged": obs["privileged"].cpu().numpy()} if "privileged" in obs else info


class Spec:
    """``spec`` of environments with EnvPool's API. UserError for several choices."""

    def __init__(self, spec: EnvSpec, config: dict[str, Any]) -> None:
        self.config: Any = namedtuple("Config", [*config])(**config)
        self.observation_space: Any = form_of(spec).space
        self.action_space = box_or_discrete(action_space(spec))


def form_of(spec: EnvSpec) -> Form:
    """Return the form of observations: the state, or with cameras {"state", "images": {camera: image}}."""
    return Form(spec, flat=not spec.cameras, images="images")
