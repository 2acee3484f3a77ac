"""Blocks of env seeds: each pair of a purpose and a user's seed has its own block, and no two blocks overlap."""

from __future__ import annotations

from enum import IntEnum

BLOCK_SIZE = 1_000_000  # env seeds, more than any pool has envs


class Purpose(IntEnum):
    """Purpose of a pool of envs."""

    EVALUATION = 0
    TRAINING = 1
    DEMONSTRATIONS = 2
    SCENES = 3
    """Labelled images for supervised learning."""


def first_env_seed(purpose: Purpose, seed: int) -> int:
    """Return the seed of env 0 of a pool; env i has this seed plus i.

    seed: of the run or the command, at least 0.
    """
    return BLOCK_SIZE * (len(Purpose) * seed + purpose)
