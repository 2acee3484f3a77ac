"""No two purposes and no two seeds of a user share an env seed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from embodied.core.options import Seed
from embodied.core.seeds import BLOCK_SIZE, SEEDS, Purpose, first_env_seed


def test_blocks_do_not_meet() -> None:
    seeds = (0, 1, 2, 6, 99, 1000, SEEDS // 2, SEEDS - 1)
    firsts = [first_env_seed(purpose, seed) for purpose in Purpose for seed in seeds]
    firsts += [first_env_seed(Purpose.VALIDATION, SEEDS + iteration) for iteration in seeds]  # of confirmations
    firsts.sort()
    assert all(after - before >= BLOCK_SIZE for before, after in pairwise(firsts))
    assert firsts[0] >= 0
    assert firsts[-1] + BLOCK_SIZE <= np.iinfo(np.int64).max


def test_seeds_of_a_user_are_below_the_bound() -> None:
    options = TypeAdapter(Seed)
    assert options.validate_python(SEEDS - 1) == SEEDS - 1
    with pytest.raises(ValidationError):
        options.validate_python(SEEDS)
