"""Whose env seeds are which: every purpose has a block of its own for every seed of a user, and no two blocks meet."""

from __future__ import annotations

from enum import IntEnum

BLOCK = 1_000_000  # env seeds, more than any pool has envs


class Purpose(IntEnum):
    """What an env is seeded for."""

    EVALUATION = 0
    TRAINING = 1
    DEMONSTRATIONS = 2
    SCENES = 3


def first_env_seed(purpose: Purpose, seed: int) -> int:
    """The seed of env 0 of a pool; env i has the one i above it. seed: of the run or command, at least 0."""
    return BLOCK * (len(Purpose) * seed + purpose)
