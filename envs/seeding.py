"""Counter-based random numbers: a pure function of (env seed, episode, stream, index).

An env's draws do not depend on how many envs there are, on threads, or on what other envs drew: the same seed gives
the same episode everywhere, and a checkpoint needs no generator state.
"""

from __future__ import annotations

import zlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64 finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed_N: np.ndarray, episode_N: np.ndarray, stream: str, size: int) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [N, size], for env seeds and episode numbers (integers, [N]).

    ``stream`` names what the numbers are for; different streams are independent.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.asarray(seed_N).astype(np.uint64) * _GOLDEN + np.uint64(zlib.crc32(stream.encode())))
        key = _mix(key + np.asarray(episode_N).astype(np.uint64) * _GOLDEN)
        bits = _mix(key[:, None] + (np.arange(size, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class EpisodeRng:
    """The random numbers of the episodes that start now, for n envs. A name can be drawn from once per reset."""

    def __init__(self, seed_n: np.ndarray, episode_n: np.ndarray) -> None:
        self.seed_n = seed_n
        self.episode_n = episode_n

    def __len__(self) -> int:
        return len(self.seed_n)

    def uniform(self, stream: str, low: float | list[float], high: float | list[float]) -> np.ndarray:
        """[n, d] uniform in [low, high), d = len(low); [n] where low and high are numbers."""
        low_d, high_d = np.atleast_1d(np.asarray(low, float)), np.atleast_1d(np.asarray(high, float))
        out = low_d + (high_d - low_d) * uniform(self.seed_n, self.episode_n, stream, len(low_d))
        return out[:, 0] if np.isscalar(low) else out
