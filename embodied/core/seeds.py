"""Blocks of env seeds: each pair of a purpose and a user's seed has its own block, and no two blocks overlap."""

from enum import IntEnum

BLOCK_SIZE = 1_000_000  # env seeds, more than any pool has envs
SEEDS = 2**31  # seeds of a user are below it (embodied.core.options.Seed)


class Purpose(IntEnum):
    """Purpose of a pool of envs. Its value is the block of seed 0; every further seed is four blocks ahead.

    Scenes are labelled images. Validation takes place during training, with ``runtime.eval_seed``: its purposes begin
    where those of the other seeds end, so ``seed`` may equal ``eval_seed``.
    """

    EVALUATION = 0
    TRAINING = 1
    DEMONSTRATIONS = 2
    SCENES = 3
    VALIDATION = 4 * SEEDS
    VALIDATION_SCENES = 4 * SEEDS + 1


def first_env_seed(purpose: Purpose, seed: int) -> int:
    """Return the seed of env 0 of a pool; env i has this seed plus i.

    seed: of the run, the command or ``runtime.eval_seed``, at least 0 and below ``SEEDS``.
    """
    return BLOCK_SIZE * (4 * seed + purpose)
