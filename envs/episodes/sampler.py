"""Samplers of episodes for training.

A registered sampler is built as ``build(spec, config, SamplerSetup)``. To write a curriculum, subclass
``UniformSampler`` and override ``draw_instructions`` or ``draw_stages``. Override ``on_episodes_end`` to get the
statistics of episodes that ended.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.episodes import EpisodePlans, EpisodeStats, Ints
from embodied.core.errors import UserError, unknown_name
from embodied.core.spec import EnvSpec, Instruction
from embodied.envs.episodes.registry import SamplerSetup, UniformConfig
from embodied.envs.episodes.seeding import EpisodeRng

INCARNATION = 1_000_000  # distance between the episode numbers of a worker and of its replacement
ALIKE = 8  # repetitions of a start that end alike, one after another, after which it is forgotten: no more to learn


class InstructionDraw:
    """Draw the instructions of episodes: the next split, the next goal of the split, and a random text of the goal.

    So consecutive seeds have equally many episodes of each. splits: None: all. UserError for an unknown split and for
    no split.
    """

    def __init__(self, instructions: Sequence[Instruction], splits: Sequence[str] | None = None) -> None:
        texts: dict[str, dict[str, list[int]]] = {}
        for i, instruction in enumerate(instructions):
            texts.setdefault(instruction.split, {}).setdefault(instruction.goal, []).append(i)
        self.splits = list(texts) if splits is None else list(splits)
        if not self.splits:
            raise UserError(f"splits: got none, allowed: {', '.join(texts)}, or None for all")
        for split in self.splits:
            if split not in texts:
                raise unknown_name("split of the instructions", split, texts)
        groups = [group for split in self.splits for group in texts[split].values()]
        # texts ordered by goal, goals ordered by split: number and first place of each goal's texts, each split's goals
        self._order = np.concatenate([np.array(group) for group in groups])
        self._num_texts = np.array([len(group) for group in groups])
        self._first_text = np.cumsum(self._num_texts) - self._num_texts
        self._num_goals = np.array([len(texts[split]) for split in self.splits])
        self._first_goal = np.cumsum(self._num_goals) - self._num_goals

    def __call__(self, rng: EpisodeRng) -> np.ndarray:
        turn_n, split_n = np.divmod(rng.turn_n, len(self.splits))
        goal_n = self._first_goal[split_n] + turn_n % self._num_goals[split_n]
        text_n = (rng.uniform("instruction", 0.0, 1.0) * self._num_texts[goal_n]).astype(np.int64)
        index_n: np.ndarray = self._order[self._first_text[goal_n] + text_n]
        return index_n


class UniformSampler:
    """Give all splits, and within a split all goals, equally many episodes.

    UserError for an unknown split; ValueError for a group_size that does not divide the number of envs.
    """

    def __init__(self, spec: EnvSpec, config: Any, setup: SamplerSetup) -> None:
        if setup.group_size < 1 or setup.num_envs % setup.group_size:
            allowed = f"divisors of the number of envs, {setup.num_envs}"
            raise ValueError(f"group_size: got {setup.group_size}, allowed: {allowed}")
        self.spec, self.setup, self.num_envs = spec, setup, setup.num_envs
        self._instructions = InstructionDraw(spec.instructions, setup.splits) if spec.instructions else None
        self._first_number = setup.incarnation * INCARNATION
        self.seed_N = np.arange(setup.num_envs, dtype=np.int64) // setup.group_size + setup.seed
        self.number_N = np.full(setup.num_envs, self._first_number - 1, dtype=np.int64)
        # env seed, number, instruction, and repetitions in a row that failed (if negative) or were solved, [F, 4], the
        # newest last
        self._failures = np.zeros((0, 4), dtype=np.int64)
        self._most_failures = max(1, setup.num_envs // 2)
        self._success = 0.0  # of the last episodes, about as many as envs

    def draw_instructions(self, rng: EpisodeRng) -> Ints:
        """Draw the instructions of the episodes of ``rng``, indices into ``spec.instructions`` [n]."""
        return np.zeros(len(rng), dtype=np.int64) if self._instructions is None else self._instructions(rng)

    def draw_stages(self, rng: EpisodeRng) -> Ints:
        """Draw the stages that the episodes of ``rng`` start from, [n]; see ``EpisodePlans.stage_n``."""
        if not self.setup.stages or not self.spec.stages:
            return np.zeros(len(rng), dtype=np.int64)
        bounds = np.cumsum([stage.share for stage in self.spec.stages])
        index_n = np.searchsorted(bounds, rng.uniform("held", 0.0, 1.0), side="right")
        return np.where(index_n < len(bounds), index_n + 1, 0)

    def on_episodes_end(self, ended: EpisodeStats) -> None:
        """Learn from episodes that ended; called before their successors are drawn."""

    def start(self) -> EpisodePlans:
        """Return the plans of a new episode in every env."""
        self.number_N += 1
        return self._draw(np.arange(self.num_envs), stagger=self.setup.stagger)

    def next(self, ended: EpisodeStats, steps_left_N: Tensor) -> EpisodePlans:
        """Return the next plans of envs in ``ended``; if an env's group is not done, the group's plan again."""
        counted = ended.counted()
        if self.setup.repeat_failures:
            self._remember(counted.rows(torch.from_numpy(counted.plans.own_n(self.spec.max_episode_steps))))
        self.on_episodes_end(counted)
        ids = ended.env_id_M.numpy()
        if self.setup.group_size == 1:
            self.number_N[ids] += 1
            return self._draw(ids)
        left_GM = steps_left_N.numpy().reshape(-1, self.setup.group_size)
        group_left_N = left_GM.min(axis=1).repeat(self.setup.group_size)  # to the end of the group's episodes
        again = group_left_N[ids] > 0  # the group is not done: repeat its plan to keep its envs synchronous
        self.number_N[ids] += ~again
        plans = self._draw(ids)
        plans.put(np.flatnonzero(again), ended.plans.rows(again))
        plans.time_limit_n[again] = group_left_N[ids][again]
        plans.filler_n[again] = True
        return plans

    def reseed(self, ids: Ints, seed_n: Ints) -> None:
        """Give envs ``ids`` [n] other env seeds; the next episode of each is the first one of its seed."""
        self.seed_N[ids], self.number_N[ids] = seed_n, self._first_number - 1

    def skip_to_next(self, ids: Ints) -> EpisodePlans:
        """Return the plans of the next episodes of envs ``ids``, whether or not their present ones have ended.

        Not for groups of envs, and not for curricula, which learn of ended episodes only from ``next``.
        """
        self.number_N[ids] += 1
        return self._draw(ids)

    def state_dict(self) -> dict[str, Tensor]:
        """Return env seeds and episode numbers, int64 [N]; with ``repeat_failures`` also what ``_remember`` has."""
        state = {"seed": torch.from_numpy(self.seed_N.copy()), "number": torch.from_numpy(self.number_N.copy())}
        if self.setup.repeat_failures:
            success = torch.tensor(self._success, dtype=torch.float64)
            state |= {"repeat/failures": torch.from_numpy(self._failures), "repeat/success": success}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.seed_N[:], self.number_N[:] = state["seed"].numpy(), state["number"].numpy()
        if self.setup.repeat_failures:
            failures = state["repeat/failures"].numpy()
            if failures.shape[1] < 4:  # earlier versions drew the instruction again, the first counted no repetitions
                told_F = self.draw_instructions(EpisodeRng(*failures[:, :2].T))
                failures = np.insert(np.pad(failures, ((0, 0), (0, 3 - failures.shape[1]))), 2, told_F, axis=1)
            self._failures = failures
            self._success = float(state["repeat/success"])

    def _remember(self, ended: EpisodeStats) -> None:
        """Remember which ordinary starts failed, each once; forget those whose repetitions always end alike."""
        success_M, plans, ids = ended.success_at_end_M.numpy(), ended.plans, ended.env_id_M.numpy()
        start_M = np.stack([plans.seed_n, plans.number_n, plans.instruction_n, np.zeros_like(ids)], axis=1)
        new_M = (plans.seed_n == self.seed_N[ids]) & (plans.number_n == self.number_N[ids])
        same_MF = (start_M[:, None, :2] == self._failures[:, :2]).all(axis=2)
        solved_F, failed_F = same_MF[success_M].sum(axis=0), same_MF[~success_M].sum(axis=0)
        alike_F = np.where(solved_F > 0, self._failures[:, 3].clip(min=0), self._failures[:, 3])
        alike_F = np.where(failed_F > 0, alike_F.clip(max=0), alike_F) + solved_F - failed_F
        kept = np.column_stack([self._failures[:, :3], alike_F])[np.abs(alike_F) < ALIKE]
        self._failures = np.concatenate([kept, start_M[new_M & ~success_M]])[-self._most_failures :]
        self._success += (success_M - self._success).sum() / max(self.num_envs, len(success_M))

    def _draw(self, ids: Ints, stagger: bool = False) -> EpisodePlans:
        """Draw the plans of the episodes ``number_N`` of envs ``ids`` [n], or of failures in place of some."""
        seed_n, number_n = self.seed_N[ids], self.number_N[ids]
        rng = EpisodeRng(seed_n, number_n)
        stage_n = self.draw_stages(rng)
        if len(self._failures):
            share = self.setup.repeat_failures * self._success * len(self._failures) / self._most_failures
            again_n = (stage_n == 0) & (rng.uniform("again", 0.0, 1.0) < share)
            chosen = (rng.uniform("failure", 0.0, 1.0)[again_n] * len(self._failures)).astype(np.int64)
            seed_n[again_n], number_n[again_n] = self._failures[chosen, :2].T
            rng = EpisodeRng(seed_n, number_n)
        instruction_n = np.array(self.draw_instructions(rng))
        if len(self._failures):
            instruction_n[again_n] = self._failures[chosen, 2]
        limit = self.spec.max_episode_steps
        limit_n = np.full(len(ids), limit)
        if stagger:
            limit_n -= (rng.uniform("stagger", 0.0, 1.0) * limit).astype(np.int64)
        no_n = np.zeros(len(ids), dtype=np.bool_)
        return EpisodePlans(seed_n, number_n, instruction_n, stage_n, limit_n, no_n)


def first_episodes(spec: EnvSpec, episodes: int, seed: int, splits: Sequence[str] | None = None) -> EpisodePlans:
    """Return the first episodes of seeds ``seed``, ``seed + 1``, ..., full-length and from the ordinary start."""
    setup = SamplerSetup(episodes, seed, None if splits is None else tuple(splits))
    return UniformSampler(spec, UniformConfig(), setup).start()
