"""No two purposes and no two seeds of a user share an env seed."""

from __future__ import annotations

from itertools import pairwise

from embodied.core.seeds import BLOCK_SIZE, Purpose, first_env_seed


def test_blocks_do_not_meet() -> None:
    firsts = sorted(first_env_seed(purpose, seed) for purpose in Purpose for seed in (0, 1, 2, 6, 99, 1000))
    assert all(after - before >= BLOCK_SIZE for before, after in pairwise(firsts))
    assert firsts[0] >= 0
