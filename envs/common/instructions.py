"""What a task can be told: texts, the goal that each one asks for, and the split that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodied.core.errors import unknown_name
from embodied.core.types import TRAIN
from envs.common.seeding import EpisodeRng


@dataclass(frozen=True)
class Instructions:
    """texts[i] asks for goals[i], which paraphrases share, and is in splits[i]: ``train``, or what is kept from it."""

    texts: tuple[str, ...]
    goals: tuple[str, ...]
    splits: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.texts
        assert len(self.texts) == len(self.goals) == len(self.splits)

    @classmethod
    def only(cls, text: str) -> Instructions:
        """Those of a task that is always told the same."""
        return cls((text,), (text,), (TRAIN,))


class InstructionDraw:
    """Draws the instructions of episodes: splits in turn, the goals of a split in turn, and any text of the goal.

    Neighbouring seeds are neighbours in these turns, so that every set of evaluation episodes and every batch of
    training envs has as many of each. splits: those to draw from (None: all). UserError for an unknown one.
    """

    def __init__(self, instructions: Instructions, splits: Sequence[str] | None = None) -> None:
        known = list(dict.fromkeys(instructions.splits))
        self.splits = known if splits is None else list(splits)
        for split in self.splits:
            if split not in known:
                raise unknown_name("split of the instructions", split, known)
        texts: dict[str, dict[str, list[int]]] = {split: {} for split in self.splits}
        for i, (goal, split) in enumerate(zip(instructions.goals, instructions.splits, strict=True)):
            if split in texts:
                texts[split].setdefault(goal, []).append(i)
        groups = [group for goals in texts.values() for group in goals.values()]
        self._order = np.concatenate([np.array(group) for group in groups])
        self._size = np.array([len(group) for group in groups])
        self._start = np.cumsum(self._size) - self._size
        self._goals = np.array([len(goals) for goals in texts.values()])  # of each split
        self._first = np.cumsum(self._goals) - self._goals

    def __call__(self, rng: EpisodeRng) -> np.ndarray:
        """Indices of texts, int64 [n]."""
        turn_n, split_n = np.divmod(rng.turn_n, len(self.splits))
        group_n = self._first[split_n] + turn_n % self._goals[split_n]
        text_n = (rng.uniform("instruction", 0.0, 1.0) * self._size[group_n]).astype(np.int64)
        return self._order[self._start[group_n] + text_n]
