"""Counter-based random numbers: a pure function of (env seed, episode, stream, index).

An env's draws do not depend on the number of envs, on threads, or on other envs' draws. So the same seed gives the same
episode everywhere, and a checkpoint needs no generator state.
"""

import functools
import zlib

import numpy as np

from embodied.core.errors import UserError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STREAM = np.uint64(0xD1B54A32D192ED03)


def _mix(z: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


@functools.cache
def counters(stream: str, size: int) -> np.ndarray:
    """Return the counters of a stream's numbers in the sequence of an episode, uint64 [size]."""
    with np.errstate(over="ignore"):
        return np.uint64(zlib.crc32(stream.encode())) * _STREAM + np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN


def _uniform(bits: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) for random bits."""
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


class EpisodeRng:
    """Random numbers of n episodes, whose env seeds and numbers are ``seed_n`` and ``episode_n``, int [n].

    A stream is named by the purpose of its numbers. Streams are independent, and one always has the same numbers, so
    ``unit`` and ``uniform`` refuse to draw one again. turn_n: sum of seed and number, for choices made in turn.
    """

    def __init__(self, seed_n: np.ndarray, episode_n: np.ndarray) -> None:
        self.seed_n = np.asarray(seed_n)
        self.turn_n = self.seed_n.astype(np.int64) + np.asarray(episode_n).astype(np.int64)
        self._drawn: set[str] = set()

    @functools.cached_property
    def key_n(self) -> np.ndarray:
        """Start of each episode's counters, uint64 [n]; a sum that wraps around, as ``turn_n``, has the same bits."""
        seed_n = self.seed_n.astype(np.uint64)
        with np.errstate(over="ignore"):
            key_n = _mix(seed_n * _GOLDEN)
            return _mix(key_n + (self.turn_n.astype(np.uint64) - seed_n) * _GOLDEN)

    def rows(self, index: np.ndarray) -> "EpisodeRng":
        """Return the random numbers of some of the episodes."""
        chosen = EpisodeRng.__new__(EpisodeRng)
        chosen.seed_n, chosen.turn_n, chosen.key_n = self.seed_n[index], self.turn_n[index], self.key_n[index]
        chosen._drawn = set()
        return chosen

    def __len__(self) -> int:
        return len(self.turn_n)

    def unit(self, stream: str, size: int) -> np.ndarray:
        """Draw numbers uniform in [0, 1), float64 [n, size]."""
        if stream in self._drawn:
            raise UserError(f"random numbers '{stream}' are drawn twice for a start, and would be the same: rename one")
        self._drawn.add(stream)
        return _uniform(_mix(self.key_n[:, None] + counters(stream, size)))

    def numbers(self, stream: str, index_n: np.ndarray) -> np.ndarray:
        """Draw number ``index_n`` of each episode's stream, uniform in [0, 1), float64 [n]; the same as in ``unit``."""
        return self.block(stream, index_n, 1)[:, 0]

    def block(self, stream: str, block_n: np.ndarray, size: int) -> np.ndarray:
        """Draw block ``block_n`` of ``size`` numbers, uniform in [0, 1), float64 [n, size]; ``unit`` has block 0."""
        with np.errstate(over="ignore"):
            first_n = (block_n * size).astype(np.uint64) * _GOLDEN
            return _uniform(_mix((self.key_n + first_n)[:, None] + counters(stream, size)))

    def normal(self, stream: str, block_n: np.ndarray, size: int) -> np.ndarray:
        """Draw block ``block_n`` of ``size`` standard normals of each episode's stream, float64 [n, size].

        The transform of Box and Muller (1958) makes two normals from two uniform numbers.
        """
        half = -(-size // 2)
        unit = self.block(stream, block_n, 2 * half)
        radius, angle = np.sqrt(-2 * np.log1p(-unit[:, :half])), 2 * np.pi * unit[:, half:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :size]

    def uniform(self, stream: str, low: float | list[float], high: float | list[float]) -> np.ndarray:
        """Draw numbers uniform in [low, high), [n, d] with d = len(low); [n] if low and high are numbers."""
        if isinstance(low, list):
            return np.asarray(np.asarray(low) + np.subtract(high, low) * self.unit(stream, len(low)))
        assert not isinstance(high, list)
        return np.asarray(low + (high - low) * self.unit(stream, 1)[:, 0])
