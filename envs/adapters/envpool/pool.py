"""Environments of EnvPool (Weng et al. 2022) as a ``VecEnv``.

Rows whose episodes ended are reset at once: EnvPool by itself would reset one step later and ignore that step's action.
EnvPool seeds an env when it is built, and never again. So episode k of env seed s is the k-th initial state of an env
that was built with a seed made of s: training envs go through their episodes by resets, and envs with another plan, as
in evaluations, are built anew and reset k times. docs/simulators.md says what repeats.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.episodes import EpisodePlans, Ints
from embodied.core.process.child import Builder
from embodied.core.spec import SUCCESS, Box
from embodied.core.types import Obs
from embodied.envs.adapters.envpool.spec import Layout, library
from embodied.envs.adapters.gym.spaces import Pixels, resized
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.episodes.sampler import INCARNATION
from embodied.envs.episodes.seeding import EpisodeRng

Arrays = dict[str, NDArray[Any]]
LEAST_DRAWN = 240  # pixels; the smaller side of a picture that EnvPool draws


@cache
def can_render(id: str) -> bool:
    """Return whether EnvPool can draw an environment without a display. The first call for each builds one.

    It draws those of MuJoCo by OpenGL, and ends the process where there is no context, so they count as not drawn.
    """
    if "frame_stack" in library().make_spec(id).config._asdict():
        return False  # an option that all of MuJoCo have, and no others
    pool = Pool(id, {}, np.zeros(1, dtype=np.int64), 1)
    pool.reset(first := np.zeros(1, dtype=np.int32))
    pool.receive(1)
    try:
        return pool.render(first, 64, 64).shape == (1, 64, 64, 3)
    except RuntimeError:
        return False


class Pool:
    """Some envs in one pool of EnvPool, in the order of their ids there.

    It skips EnvPool's interface for gymnasium, which takes as long as all other Python code of a control step together.
    """

    def __init__(
        self, id: str, options: Mapping[str, Any], seed_n: Ints, num_threads: int, one_by_one: bool = False
    ) -> None:
        """Build an env for each seed. one_by_one: EnvPool gives the result of each as it comes."""
        sizes = {"num_envs": len(seed_n), "num_threads": min(num_threads, len(seed_n))}
        options = {**options, **sizes, **({"batch_size": 1} if one_by_one else {})}
        self._pool = library().make_gymnasium(id, seed=seed_n.tolist(), **options)
        self._builder, self._one_by_one = Builder(), one_by_one
        self._keys: list[str] = self._pool._state_keys
        self._dtype = self._pool.spec.action_array_spec["action"].dtype

    def send(self, action: NDArray[Any], env_id: NDArray[np.int32]) -> None:
        """Begin a step of envs ``env_id`` [n] with their actions."""
        self._builder.check()
        self._pool._send([env_id, env_id, action.astype(self._dtype, order="C")])  # the second is that of players

    def reset(self, env_id: NDArray[np.int32]) -> None:
        self._builder.check()
        self._pool._reset(env_id)

    def receive(self, count: int) -> Arrays:
        """Wait for ``count`` envs that were stepped or reset; return their arrays by EnvPool's names, ordered by env.

        If EnvPool does not give them one by one, ``count`` must be all of them.
        """
        if not self._one_by_one:
            return dict(zip(self._keys, self._pool._recv(), strict=True))
        columns = zip(*(self._pool._recv() for _ in range(count)), strict=True)
        arrays = dict(zip(self._keys, map(np.concatenate, columns), strict=True))
        order = arrays["info:env_id"].argsort()
        return {key: array[order] for key, array in arrays.items()}

    def render(self, env_id: NDArray[np.int32], width: int, height: int) -> Pixels:
        """Return what envs ``env_id`` [n] show people, [n, height, width, 3]. RuntimeError if EnvPool does not draw."""
        finer = -(-LEAST_DRAWN // min(width, height))  # thin lines vanish from small pictures
        frames = self._pool._render(env_id, finer * width, finer * height, -1)
        return np.stack([resized(frame, width, height) for frame in frames])


class EnvpoolEnv(EpisodicEnv):
    """N envs of one environment of EnvPool, in one pool; rows that were built anew together are a pool of their own."""

    one_by_one = False
    """Whether EnvPool gives the results of its envs one by one."""
    apart = False
    """Whether ``start`` does not wait for the rows that begin an episode."""

    def __init__(self, layout: Layout, num_envs: int, num_threads: int) -> None:
        super().__init__(layout.spec, num_envs)
        if can_render(layout.id):
            self.film = lambda width, height: partial(self._render, width, height)
        self.layout, self.num_threads = layout, num_threads
        self._pools: list[Pool] = []
        self._pool_N = np.zeros(num_envs, dtype=np.int64)  # index into _pools of each row
        self._env_N = np.zeros(num_envs, dtype=np.int32)  # env_id of each row in its pool
        self._seed_N = np.full(num_envs, -1, dtype=np.int64)  # env seed that each row was built for
        self._next_N = np.zeros(num_envs, dtype=np.int64)  # number of the episode that its next reset begins
        arrays = layout.spec.arrays.items()
        self._observed = {key: np.zeros((num_envs, *shape), dtype) for key, (shape, dtype) in arrays}
        if not layout.state:
            del self._observed["state"]
        if isinstance(layout.spec.action, Box):
            terms = [(term.scale, term.offset) for term in layout.spec.action.terms]
            self._scale_A, self._offset_A = np.array(terms).T
            self._is_scaled = bool((self._scale_A != 1).any() or self._offset_A.any())

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        follows = (self._seed_N[ids] == plans.seed_n) & (self._next_N[ids] == plans.number_n)
        follows &= plans.number_n % INCARNATION > 0  # another incarnation has another seed
        again = plans.filler_n & (self._seed_N[ids] >= 0)  # only fills time: any episode does
        fresh = ~(follows | again)
        if fresh.any():
            self._build(ids[fresh], plans.rows(fresh))
        for pool, rows in self._parts(ids):
            pool.reset(self._env_N[rows])
            if not self.apart:
                self._store(pool.receive(len(self._env_N[rows])), rows)
        self._next_N[ids] += 1

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        action, parts = self._converted(action_NA), self._parts(ids)
        for pool, rows in parts:
            pool.send(action[rows], self._env_N[rows])
        return self._result([(pool.receive(len(self._env_N[rows])), rows) for pool, rows in parts])

    def observe(self, ids: Ints | None = None) -> Obs:
        return self.rows_of(self._observed, ids)

    def close(self) -> None:
        self._pools.clear()
        self._seed_N[:] = -1

    def _converted(self, action: Tensor) -> NDArray[Any]:
        """Return actions [n, A] as EnvPool takes them."""
        if not isinstance(self.spec.action, Box):
            return action.numpy()[:, 0]
        return self._offset_A + self._scale_A * action.numpy() if self._is_scaled else action.numpy()

    def _result(self, results: Sequence[tuple[Arrays, Ints | slice]]) -> Advance:
        """Keep the observations in EnvPool's arrays of some rows; return the result of their control step."""
        success = self.layout.success
        found: Arrays = {}
        for arrays, rows in results:
            self._store(arrays, rows)
            if isinstance(rows, slice):  # all
                found = arrays
                continue
            for key in ("reward", "done", "trunc", *([success] if success else [])):
                found.setdefault(key, np.zeros(self.num_envs, arrays[key].dtype))[rows] = arrays[key]
        outcomes = {SUCCESS: torch.from_numpy(found[success] > 0)} if success else {}
        failed_N = truncated_N = None
        if found["done"].any():
            truncated_N = torch.from_numpy(found["trunc"])
            failed_N = torch.from_numpy(found["done"]) & ~truncated_N
        return Advance(torch.from_numpy(found["reward"]), outcomes, failed_N, truncated_N=truncated_N)

    def _parts(self, ids: Ints | None) -> list[tuple[Pool, Ints | slice]]:
        """Return pools with those of rows ``ids`` (None: all) that are in them."""
        if len(self._pools) == 1:
            return [(self._pools[0], slice(None) if ids is None else ids)]
        ids = np.arange(self.num_envs) if ids is None else ids
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
        for key, names in (("state", self.layout.state), ("privileged", self.layout.privileged)):
            begin = 0
            for name in names:
                columns = arrays[name].reshape(len(arrays[name]), -1)
                self._observed[key][rows, begin : begin + columns.shape[1]] = columns
                begin += columns.shape[1]
        for name, frame in self.layout.frames.items():
            images = self._observed[f"images.{name}"]
            images[rows] = frame.pixels(arrays[frame.key], *images.shape[1:3])
        if self.layout.mask is not None:
            mask = arrays[self.layout.mask]
            # An episode that EnvPool ended allows all, and so does a state without any choice, as some mazes begin in.
            self._observed["action_mask"][rows] = mask | (arrays["done"] | ~mask.any(-1))[:, None]

    def _render(self, width: int, height: int) -> Pixels:
        images = np.zeros((self.num_envs, height, width, 3), dtype=np.uint8)
        for pool, rows in self._parts(None):
            images[rows] = pool.render(self._env_N[rows], width, height)
        return images


def envpool_seeds(plans: EpisodePlans) -> Ints:
    """Return EnvPool's seed, at least 0 and below 2^31, for each of n plans: a function of env seed and incarnation."""
    unit_n = EpisodeRng(plans.seed_n, plans.number_n // INCARNATION).uniform("envpool", 0.0, 1.0)
    return (unit_n * 2**31).astype(np.int64)
