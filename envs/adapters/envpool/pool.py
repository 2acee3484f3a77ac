"""A pool of EnvPool: actions in, arrays out, pictures."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.episodes import Ints
from embodied.core.process.child import Builder
from embodied.envs.adapters.envpool.spec import library
from embodied.envs.adapters.pixels import Pixels, resized

Arrays = dict[str, NDArray[Any]]
LEAST_DRAWN = 240  # pixels; the smaller side of a picture that EnvPool draws


@functools.cache
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

    It calls the methods that EnvPool's interface for gymnasium calls, with one list of arrays each. That interface
    takes as long as all other Python code of a control step together.
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
        """Begin an episode in each of envs ``env_id``."""
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
