"""Instructions of episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied.core.errors import unknown_name
from embodied.core.spec import Instruction
from embodied.envs.episodes.seeding import EpisodeRng


def single_instruction(text: str) -> tuple[Instruction, ...]:
    """Return the instructions of a task that has only one."""
    return (Instruction(text, goal=text),)


class InstructionDraw:
    """Draw the instructions of episodes: the next split, the next goal of the split, and a random text of the goal.

    Consecutive seeds get consecutive splits and goals. So evaluations and batches of training envs have equally many
    episodes of each. splits: splits to draw from (None: all). UserError for an unknown split.
    """

    def __init__(self, instructions: Sequence[Instruction], splits: Sequence[str] | None = None) -> None:
        known = list(dict.fromkeys(instruction.split for instruction in instructions))
        self.splits = known if splits is None else list(splits)
        for split in self.splits:
            if split not in known:
                raise unknown_name("split of the instructions", split, known)
        texts: dict[str, dict[str, list[int]]] = {split: {} for split in self.splits}
        for i, instruction in enumerate(instructions):
            if instruction.split in texts:
                texts[instruction.split].setdefault(instruction.goal, []).append(i)
        groups = [group for goals in texts.values() for group in goals.values()]
        # texts ordered by goal, goals ordered by split: number and first place of each goal's texts, each split's goals
        self._order = np.concatenate([np.array(group) for group in groups])
        self._num_texts = np.array([len(group) for group in groups])
        self._first_text = np.cumsum(self._num_texts) - self._num_texts
        self._num_goals = np.array([len(goals) for goals in texts.values()])
        self._first_goal = np.cumsum(self._num_goals) - self._num_goals

    def __call__(self, rng: EpisodeRng) -> np.ndarray:
        """Draw indices of texts, int64 [n]."""
        if len(self._order) == 1:
            return np.repeat(self._order, len(rng))
        turn_n, split_n = np.divmod(rng.turn_n, len(self.splits))
        goal_n = self._first_goal[split_n] + turn_n % self._num_goals[split_n]
        text_n = (rng.uniform("instruction", 0.0, 1.0) * self._num_texts[goal_n]).astype(np.int64)
        index_n: np.ndarray = self._order[self._first_text[goal_n] + text_n]
        return index_n
