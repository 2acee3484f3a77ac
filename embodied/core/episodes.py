"""Plans of episodes, the samplers that draw them, and statistics of the episodes that ended.

    sampler.start() ──► EpisodePlans of all envs ──► VecEnv ──► EpisodeStats of those that ended
        sampler.next(stats, steps_left_N) ──► EpisodePlans of their next episodes ──┘

A simulator only executes plans. Staggered starts, starts from a later stage, groups of equal episodes, the fixed
episodes of an evaluation and curricula are all samplers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.spec import SUCCESS

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EpisodePlans:
    """Plans of n episodes, one row each. An episode is a pure function of its plan and of the actions."""

    seed_n: Ints
    """Env seed, at least 0."""
    number_n: Ints
    """Number of the episode among those of its env seed."""
    instruction_n: Ints
    """Index into ``EnvSpec.instructions``; 0 if the task has none."""
    stage_n: Ints
    """Stage that the episode starts from: 0 for the ordinary start, i for ``EnvSpec.stages[i - 1]``."""
    time_limit_n: Ints
    """Control steps after which the episode is truncated, at least 1."""
    filler_n: NDArray[np.bool_]
    """Whether the episode is padding that repeats another plan; statistics exclude it."""

    def __len__(self) -> int:
        return len(self.seed_n)

    def own_n(self, max_episode_steps: int) -> NDArray[np.bool_]:
        """Return whether each begins as the task's own episodes do, and has their whole time limit."""
        own_n: NDArray[np.bool_] = (self.stage_n == 0) & (self.time_limit_n >= max_episode_steps)
        return own_n

    def rows(self, ids: Ints | NDArray[np.bool_] | slice) -> EpisodePlans:
        """Return the plans of rows ``ids``, in that order."""
        return EpisodePlans(*(getattr(self, name)[ids] for name in _COLUMNS))

    def put(self, ids: Ints, plans: EpisodePlans) -> None:
        """Overwrite rows ``ids`` by ``plans``, in place."""
        for name in _COLUMNS:
            getattr(self, name)[ids] = getattr(plans, name)

    @staticmethod
    def empty(num: int) -> EpisodePlans:
        """Return ``num`` plans to be overwritten: seed 0, episode 0, ordinary start, one control step."""
        seed, number, instruction, stage = np.zeros((4, num), dtype=np.int64)
        limit, filler = np.ones(num, dtype=np.int64), np.zeros(num, dtype=np.bool_)
        return EpisodePlans(seed, number, instruction, stage, limit, filler)

    @staticmethod
    def concatenate(parts: Sequence[EpisodePlans]) -> EpisodePlans:
        """Return all rows of ``parts``, in order."""
        if not parts:
            return EpisodePlans.empty(0)
        return EpisodePlans(*(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the columns as tensors (copies), under keys that begin with ``plan/``."""
        return {key: torch.from_numpy(getattr(self, name).copy()) for name, key in _STATE_KEYS.items()}

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> EpisodePlans:
        """Return the plans whose ``state_dict`` is a part of ``state``."""
        return EpisodePlans(*(state[key].numpy().copy() for key in _STATE_KEYS.values()))


_COLUMNS = tuple(field.name for field in fields(EpisodePlans))
_STATE_KEYS = {name: f"plan/{name[:-2]}" for name in _COLUMNS} | {"filler_n": "plan/repeat"}  # of checkpoints


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """Statistics of the M episodes that ended in one call of ``VecEnv.step``, one row each; M may be 0."""

    env_id_M: Tensor
    """int64, index of the env in the VecEnv."""
    return_M: Tensor
    """float32, undiscounted sum of the episode's rewards."""
    length_M: Tensor
    """int64, control steps of the episode."""
    plans: EpisodePlans
    once: Mapping[str, Tensor]
    """For each of ``EnvSpec.outcomes``, whether it held after at least one step, bool [M]."""
    at_end: Mapping[str, Tensor]
    """For each of ``EnvSpec.outcomes``, whether it held after the last step, bool [M]."""

    def __len__(self) -> int:
        return len(self.env_id_M)

    @property
    def success_at_end_M(self) -> Tensor:
        """Whether the episode was solved after the last step, bool; KeyError without the outcome ``success``."""
        return self.at_end[SUCCESS]

    def counted(self) -> EpisodeStats:
        return self.rows(torch.from_numpy(~self.plans.filler_n)) if self.plans.filler_n.any() else self

    def rows(self, ids: Tensor) -> EpisodeStats:
        """Return some of the episodes. ids: int64 indices or a bool mask [M]."""
        once, at_end = ({name: held[ids] for name, held in part.items()} for part in (self.once, self.at_end))
        plans = self.plans.rows(ids.numpy())
        return EpisodeStats(self.env_id_M[ids], self.return_M[ids], self.length_M[ids], plans, once, at_end)

    @staticmethod
    def concatenate(parts: Sequence[EpisodeStats]) -> EpisodeStats:
        """Return all rows of ``parts``, which must have the same outcomes."""
        parts = [part for part in parts if len(part)]
        if not parts:
            none = torch.zeros(0)
            return EpisodeStats(none.long(), none, none.long(), EpisodePlans.empty(0), {}, {})
        return EpisodeStats(
            env_id_M=torch.cat([part.env_id_M for part in parts]),
            return_M=torch.cat([part.return_M for part in parts]),
            length_M=torch.cat([part.length_M for part in parts]),
            plans=EpisodePlans.concatenate([part.plans for part in parts]),
            once={name: torch.cat([part.once[name] for part in parts]) for name in parts[0].once},
            at_end={name: torch.cat([part.at_end[name] for part in parts]) for name in parts[0].at_end},
        )


@runtime_checkable
class EpisodeSampler(Protocol):
    """Draws the plans of the episodes of one VecEnv. Used only by the thread that steps the VecEnv."""

    num_envs: int
    """N, number of envs of the VecEnv."""

    def start(self) -> EpisodePlans:
        """Return the plan of a new episode for every env; episodes in progress are abandoned."""
        ...

    def next(self, ended: EpisodeStats, steps_left_N: Tensor) -> EpisodePlans:
        """Return the plans of the next episodes of envs ``ended.env_id_M``, in that order.

        ended: statistics of the episodes that ended in these envs. steps_left_N: int64, for each env, the control steps
        that would be left to its time limit if its episode had run to the end of this chunk; at least 0.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that ``load_state_dict`` needs to draw the same plans again, as tensors (copies)."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly from the result of ``state_dict``."""
        ...


class PlanList:
    """A sampler that gives each plan of a list once, in order, to the next env that is free.

    Every plan is run to its end, so short episodes are not favoured. If no plan is left, an env repeats its last plan
    as a filler.
    """

    def __init__(self, plans: EpisodePlans, num_envs: int) -> None:
        assert 1 <= num_envs <= len(plans), f"{num_envs} envs for {len(plans)} plans"
        self.plans, self.num_envs = plans, num_envs
        self.present = EpisodePlans.empty(num_envs)
        self._num_given = num_envs

    def start(self) -> EpisodePlans:
        self._num_given = self.num_envs
        plans = self.plans.rows(slice(self.num_envs))
        self.present.put(np.arange(self.num_envs), plans)
        return plans

    def next(self, ended: EpisodeStats, steps_left_N: Tensor) -> EpisodePlans:
        fresh = np.arange(self._num_given, min(self._num_given + len(ended), len(self.plans)))
        self._num_given += len(fresh)
        plans = EpisodePlans.concatenate([ended.plans])  # a copy
        plans.filler_n[:] = True
        plans.put(np.arange(len(fresh)), self.plans.rows(fresh))
        self.present.put(ended.env_id_M.numpy(), plans)
        return plans

    def state_dict(self) -> dict[str, Tensor]:
        return {"given": torch.tensor(self._num_given)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._num_given = int(state["given"])
