"""Envs that are not stepped together: the chunk loop, the ends and the statistics of ``EpisodicEnv`` row by row.

send(chunks, ids) ─► begin_step ─┐   ┌─ chunk not complete: begin_step with its next action
receive ─► collect: some rows ◄──┴───┤─ episode ended: last observation, sampler.next, start, which is collected too
                                     └─ else: the row is done ─► Timestep of the rows that are done
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from embodied.core.episodes import EpisodePlans, EpisodeStats, Ints
from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs, Timestep
from embodied.envs.base.actions import checked_chunk
from embodied.envs.base.episodic import Advance, EpisodicEnv


class RowByRowEnv(EpisodicEnv):
    """Envs on the CPU that need not be stepped together. ``step`` waits for all rows.

    A simulator adds to the methods of ``EpisodicEnv``: ``begin_step``, ``collect``, and ``start`` does not wait while
    ``apart`` is set.
    """

    batch_size: int
    apart = False
    """Whether rows are stepped by ``send`` and ``receive`` now."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        super().__init__(spec, num_envs)
        self.batch_size = num_envs
        no_N = torch.zeros(num_envs, dtype=torch.bool)
        self._under_way_N, self._starting_N, self._done_N = no_N.clone(), no_N.clone(), no_N.clone()
        self._failed_N, self._cut_N = no_N.clone(), no_N.clone()
        self._latest = {name: no_N.clone() for name in spec.outcomes}
        self._at_N = torch.zeros(num_envs, dtype=torch.int64)  # actions of the chunk that were executed
        self._action_NEA = self._reward_NE = torch.empty(0)
        self._final: Obs = {}  # last observation of each row's latest episode, [N, ...]
        self._stats: list[EpisodeStats] = []

    @abstractmethod
    def begin_step(self, action_nA: Tensor, ids: Ints) -> None:
        """Begin a control step of envs ``ids`` [n]."""

    @abstractmethod
    def collect(self, count: int) -> tuple[Ints, Advance]:
        """Wait for ``count`` of the envs that are in a control step or begin an episode.

        Return their ids, ascending, and the result of the steps, as of ``advance``; rows of envs that begin an episode
        are ignored too. ``observe`` then returns the new observations.
        """

    def send(self, action: Tensor, ids: Tensor) -> None:
        """See ``VecEnv``."""
        if self.sampler is None:
            raise ValueError("send before the first reset: call reset(sampler) first")
        chunk_nEA = checked_chunk(action, self.spec.action, len(ids))
        if bool(self._under_way_N[ids].any()):
            raise ValueError("ids: some of these envs are under way")
        if self._action_NEA.shape[1:] != chunk_nEA.shape[1:]:
            if bool(self._under_way_N.any()):
                raise ValueError(f"action: chunks of another size are under way: {list(self._action_NEA.shape[1:])}")
            self._action_NEA = chunk_nEA.new_zeros(self.num_envs, *chunk_nEA.shape[1:])
            self._reward_NE = torch.zeros(self.num_envs, chunk_nEA.shape[1])
        self._action_NEA[ids], self._reward_NE[ids], self._at_N[ids] = chunk_nEA, 0.0, 0
        self._failed_N[ids] = self._cut_N[ids] = False
        self._under_way_N[ids] = True
        self.begin_step(chunk_nEA[:, 0], ids.numpy())

    def receive(self) -> tuple[Tensor, Timestep]:
        """See ``VecEnv``. UserError if the sampler wants episodes of several envs to begin together."""
        wanted = min(self.batch_size, int(self._under_way_N.sum()))
        while (missing := wanted - int(self._done_N.sum())) > 0:
            ids, result = self.collect(missing)
            rows = torch.from_numpy(ids)
            starting_n = self._starting_N[rows]
            self._done_N[rows[starting_n]] = True
            self._starting_N[rows] = False
            stepped = rows[~starting_n]
            if len(stepped):
                self._continue(stepped, result)
        rows = self._done_N.nonzero().squeeze(-1)
        self._done_N[rows] = self._under_way_N[rows] = False
        return rows, self._timestep(rows)

    def begin(self, ids: Ints, plans: EpisodePlans) -> None:
        """See ``EpisodicEnv``. UserError for plans that repeat others, if rows are apart."""
        if self.apart and plans.filler_n.any():
            raise UserError("sim.batch_size: groups of equal episodes (algo=grpo) are stepped together; leave it out")
        super().begin(ids, plans)

    def _continue(self, rows: Tensor, result: Advance) -> None:
        """Count a control step of envs ``rows``, and begin the next step, the next episode, or nothing."""
        stepped_N = torch.zeros_like(self._done_N)
        stepped_N[rows] = True
        result, found_N = self._count(result, stepped_N, self._failed_N, self._latest)
        ended_N = torch.zeros_like(stepped_N) if found_N is None else found_N
        self._reward_NE[rows, self._at_N[rows]] = result.reward_N[rows]
        self._at_N[rows] += 1
        self._cut_N |= ended_N & ~self._failed_N
        complete_N = self._at_N == self._action_NEA.shape[1]
        self._done_N |= stepped_N & complete_N & ~ended_N
        if found_N is not None:
            self._end(ended_N.nonzero().squeeze(-1))
        on = (stepped_N & ~complete_N & ~ended_N).nonzero().squeeze(-1)
        if len(on):
            self.begin_step(self._action_NEA[on, self._at_N[on]], on.numpy())

    def _end(self, rows: Tensor) -> None:
        """Keep statistics and last observations of envs ``rows``, and begin their next episodes."""
        for key, value in self.observe(rows.numpy()).items():
            if key not in self._final:
                self._final[key] = value.new_empty(self.num_envs, *value.shape[1:])
            self._final[key][rows] = value
        self._starting_N[rows] = True
        self.apart = True
        self._stats.append(self._renew(rows, self._latest, self._action_NEA.shape[1] - self._at_N))
        self.apart = False

    def _timestep(self, rows: Tensor) -> Timestep:
        """Return the result of envs ``rows`` that are done."""
        ended = (self._failed_N[rows] | self._cut_N[rows]).nonzero().squeeze(-1)
        obs = self.observe(rows.numpy())
        stats = EpisodeStats.concatenate(self._stats)
        here_M = torch.isin(stats.env_id_M, rows)
        self._stats = [stats.rows(~here_M)]
        stats = stats.rows(here_M)
        return Timestep(
            obs=obs,
            reward_NE=self._reward_NE[rows],
            terminated_N=self._failed_N[rows],
            truncated_N=self._cut_N[rows],
            num_steps_N=self._at_N[rows],
            final_ids=ended,
            final_obs={key: self._final[key][rows[ended]] if len(ended) else value[:0] for key, value in obs.items()},
            episodes=stats.rows(stats.env_id_M.argsort()) if len(stats) else self._nobody,
            info={name: outcome_N[rows] for name, outcome_N in self._latest.items()},
        )
