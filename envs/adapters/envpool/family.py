"""The family ``envpool``: environments of EnvPool (Weng et al. 2022), ``task=envpool/<id>``.

    step   actions of the rows in play ─► send(action, env_id) ─► recv ─► rewards, ends, success, float32 observations
    reset  rows whose episodes ended   ─► reset(env_id), at once: EnvPool by itself would reset one step later and
                                          ignore that step's action

Seeds. EnvPool seeds an env when it is built, and never again. Episode k of env seed s is here the k-th initial state of
an env that was built with a seed made of s. A training env goes through its seed's episodes in order, by resets. Envs
whose plan is another one, as at the beginning of an evaluation, are built anew and reset k times. So an evaluation
always has the same initial states, however often and with however many envs it is run, and costs the time to build its
envs. Environments that draw random numbers during an episode as well (such as the commands of joystick tasks) reproduce
their first episode, which evaluations use; later ones then depend on how long those before them lasted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.episodes import EpisodePlans, Ints
from embodied.core.options import PositiveInt, config_dataclass
from embodied.core.spec import SUCCESS, CameraSpec, Discrete, EnvSpec
from embodied.core.types import Obs
from embodied.envs.adapters.envpool.pool import Arrays, Pool, can_render
from embodied.envs.adapters.envpool.spec import EnvpoolTaskConfig, Layout, read_layout, require_known
from embodied.envs.adapters.pixels import Pixels
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.base.rows import RowByRowEnv
from embodied.envs.episodes.sampler import INCARNATION
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.registry import FAMILIES

LISTED = (
    "Ant-v5", "CartPole-v1", "FetchPickAndPlaceDense-v1", "FetchReachDense-v4", "Go1JoystickFlatTerrain-v1",
    "HalfCheetah-v5", "Humanoid-v5", "LunarLander-v3", "MetaWorld/DrawerOpen-v3", "MetaWorld/Reach-v3",
    "PandaPickCube-v1", "Walker2d-v5",
)  # fmt: skip


@config_dataclass
class EnvpoolConfig:
    """Options of the simulator."""

    batch_size: PositiveInt | None = None
    """Number of envs of a group that get their next decisions together, as soon as they are done, while the others are
    still simulated; null waits for the whole group."""


class EnvpoolEnv(EpisodicEnv):
    """N envs of one environment of EnvPool.

    They are all in one pool, unless single rows were built anew: each such group of rows is a pool of its own.
    """

    one_by_one = False
    """Whether EnvPool gives the results of its envs one by one."""

    def __init__(self, layout: Layout, num_envs: int, num_threads: int, can_render: bool) -> None:
        """Begin no pool yet. can_render: whether EnvPool can draw the envs for people."""
        super().__init__(layout.spec, num_envs)
        if can_render:
            self.film = self._film
        self.layout, self.num_threads = layout, num_threads
        self._discrete = isinstance(layout.spec.action, Discrete)
        self._scaled = not self._discrete and not ((layout.scale_A == 1).all() and (layout.offset_A == 0).all())
        self._pools: list[Pool] = []
        self._pool_N = np.zeros(num_envs, dtype=np.int64)  # index into _pools of each row
        self._env_N = np.zeros(num_envs, dtype=np.int32)  # env_id of each row in its pool
        self._all = np.arange(num_envs)
        self._seed_N = np.full(num_envs, -1, dtype=np.int64)  # env seed that each row was built for
        self._next_N = np.zeros(num_envs, dtype=np.int64)  # number of the episode that its next reset begins
        self._state = np.zeros((num_envs, layout.spec.state_dim), dtype=np.float32)
        self._privileged = np.zeros((num_envs, layout.spec.privileged_dim), dtype=np.float32)
        self._images = {
            camera.name: np.zeros((num_envs, camera.height, camera.width, 3), dtype=np.uint8)
            for camera in layout.spec.cameras
        }
        choices = layout.spec.action.n if isinstance(layout.spec.action, Discrete) else 0
        self._mask = np.ones((num_envs, choices), dtype=np.bool_)

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        follows = (self._seed_N[ids] == plans.seed_n) & (self._next_N[ids] == plans.number_n)
        follows &= plans.number_n % INCARNATION > 0  # another incarnation has another seed
        again = plans.filler_n & (self._seed_N[ids] >= 0)  # only fills time: any episode does
        fresh = ~(follows | again)
        if fresh.any():
            self._build(ids[fresh], plans.rows(fresh))
        for pool, rows in self._parts(ids):
            self._reset(pool, rows)
        self._next_N[ids] += 1

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        action = self._converted(action_NA)
        if ids is None and len(self._pools) == 1:
            self._pools[0].send(action, self._env_N)
            result = self._pools[0].receive(self.num_envs)
            self._store(result, slice(None))
            return self._advance(result)
        parts = self._parts(self._all if ids is None else ids)
        for pool, rows in parts:
            pool.send(action[rows], self._env_N[rows])
        results = [(pool.receive(len(rows)), rows) for pool, rows in parts]
        for result, rows in results:
            self._store(result, rows)
        return self._advance(self._spread(results))

    def observe(self, ids: Ints | None = None) -> Obs:
        seen: Arrays = {"state": self._state, **{f"images.{name}": images for name, images in self._images.items()}}
        if self.spec.privileged:
            seen["privileged"] = self._privileged
        if self.spec.cameras:
            seen["instruction"] = self.plans.instruction_n
        if self.spec.action_mask:
            seen["action_mask"] = self._mask
        obs = {key: torch.from_numpy(value.copy() if ids is None else value[ids]) for key, value in seen.items()}
        if not self.layout.state:
            obs["state"] = self.time_passed_N()[slice(None) if ids is None else ids, None]
        return obs

    def close(self) -> None:
        """Stop EnvPool's threads and free its envs."""
        self._pools.clear()
        self._seed_N[:] = -1

    # -- inside ------------------------------------------------------------------------------------------------------

    def _converted(self, action: Tensor) -> NDArray[Any]:
        """Return actions [n, A] as EnvPool takes them."""
        if self._discrete:
            return action.numpy()[:, 0]
        return self.layout.offset_A + self.layout.scale_A * action.numpy() if self._scaled else action.numpy()

    def _spread(self, results: Sequence[tuple[Arrays, Ints]]) -> Arrays:
        """Return arrays of all N rows, given those of some rows; the others are zero."""
        spread: Arrays = {}
        for result, rows in results:
            for key in self.layout.results:
                spread.setdefault(key, np.zeros(self.num_envs, result[key].dtype))[rows] = result[key]
        return spread

    def _advance(self, result: Arrays) -> Advance:
        """Return the outcome of a control step from EnvPool's arrays."""
        outcomes = {}
        if self.layout.success is not None:
            outcomes[SUCCESS] = torch.from_numpy(result[self.layout.success] > 0)
        failed_N = truncated_N = None
        if result["done"].any():
            failed_N, truncated_N = (torch.from_numpy(result[key]) for key in ("done", "trunc"))
            failed_N &= ~truncated_N
        return Advance(torch.from_numpy(result["reward"]), outcomes, failed_N, truncated_N=truncated_N)

    def _reset(self, pool: Pool, rows: Ints) -> None:
        """Begin episodes in ``rows`` of a pool, and keep their observations."""
        pool.reset(self._env_N[rows])
        self._store(pool.receive(len(rows)), rows)

    def _parts(self, ids: Ints) -> list[tuple[Pool, Ints]]:
        """Return pools with those of rows ``ids`` [n] that are in them."""
        if len(self._pools) == 1:
            return [(self._pools[0], ids)]
        pool_n = self._pool_N[ids]
        return [(self._pools[index], ids[pool_n == index]) for index in np.unique(pool_n)]

    def _build(self, ids: Ints, plans: EpisodePlans) -> None:
        """Build envs for rows ``ids`` [n], and make their next resets begin the episodes of ``plans``."""
        in_use = np.unique(np.delete(self._pool_N, ids)) if self._pools else np.zeros(0, dtype=np.int64)
        self._pools = [self._pools[index] for index in in_use]  # frees the others before new ones are built
        self._pool_N = np.searchsorted(in_use, self._pool_N)
        self._pool_N[ids], self._env_N[ids] = len(self._pools), np.arange(len(ids))
        pool = Pool(self.layout.id, self.layout.options, envpool_seeds(plans), self.num_threads, self.one_by_one)
        number_n = plans.number_n % INCARNATION
        for number in range(int(number_n.max())):
            later = np.flatnonzero(number_n > number).astype(np.int32)
            pool.reset(later)
            pool.receive(len(later))
        self._pools.append(pool)
        self._seed_N[ids], self._next_N[ids] = plans.seed_n, plans.number_n

    def _store(self, arrays: Arrays, rows: Ints | slice) -> None:
        """Keep the observations of ``rows``."""
        _fill(self._state, rows, arrays, self.layout.state)
        if self.layout.privileged:
            _fill(self._privileged, rows, arrays, self.layout.privileged)
        for name, frame in self.layout.frames.items():
            self._images[name][rows] = frame.pixels(arrays[frame.key], *self._images[name].shape[1:3])
        if self.layout.mask is not None:
            mask = arrays[self.layout.mask]
            # An episode that EnvPool ended allows all, and so does a state without any choice, as some mazes begin in.
            self._mask[rows] = mask | (arrays["done"] | ~mask.any(-1))[:, None]

    def _film(self, width: int, height: int) -> Callable[[], Pixels]:
        def render() -> Pixels:
            images = np.zeros((self.num_envs, height, width, 3), dtype=np.uint8)
            for pool, rows in self._parts(self._all):
                images[rows] = pool.render(self._env_N[rows], width, height)
            return images

        return render


class RowByRowEnvpoolEnv(EnvpoolEnv, RowByRowEnv):
    """N envs that need not be stepped together. EnvPool gives the results one by one, as they come."""

    one_by_one = True

    def begin_step(self, action_nA: Tensor, ids: Ints) -> None:
        (pool,) = self._pools
        pool.send(self._converted(action_nA), self._env_N[ids])

    def collect(self, count: int) -> tuple[Ints, Advance]:
        (pool,) = self._pools
        result = pool.receive(count)
        ids = result["info:env_id"].astype(np.int64)  # of the only pool, so they are those of the rows
        self._store(result, ids)
        return ids, self._advance(self._spread([(result, ids)]))

    def _reset(self, pool: Pool, rows: Ints) -> None:
        if self.apart:
            pool.reset(self._env_N[rows])
        else:
            super()._reset(pool, rows)


def _fill(buffer: NDArray[np.float32], at: Any, arrays: Arrays, keys: Sequence[str]) -> None:
    """Write arrays side by side into rows ``at`` of a buffer [N, D]."""
    start = 0
    for key in keys:
        columns = arrays[key].reshape(len(arrays[key]), -1)
        buffer[at, start : start + columns.shape[1]] = columns
        start += columns.shape[1]


def envpool_seeds(plans: EpisodePlans) -> Ints:
    """Return EnvPool's seed, at least 0 and below 2^31, for each of n plans: a function of env seed and incarnation."""
    unit_n = EpisodeRng(plans.seed_n, plans.number_n // INCARNATION).uniform("envpool", 0.0, 1.0)
    return (unit_n * 2**31).astype(np.int64)


@FAMILIES.register("envpool", config=EnvpoolConfig)
class EnvpoolFamily:
    """See ``registry.Family``. ``task=envpool/<id>`` takes every id of EnvPool; ``ids`` has those tried here."""

    def ids(self) -> Sequence[str]:
        return LISTED if find_spec("envpool") else ()

    def task_config(self, id: str) -> type[Any]:
        require_known(id)
        return EnvpoolTaskConfig

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        return read_layout(id, task, cameras).spec

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> EnvpoolEnv:
        layout = read_layout(id, task, cameras)
        if sim is None or sim.batch_size is None:
            return EnvpoolEnv(layout, num_envs, num_threads, can_render(id))
        env = RowByRowEnvpoolEnv(layout, num_envs, num_threads, can_render(id))
        env.batch_size = min(sim.batch_size, num_envs)
        return env
