"""Envs that are not stepped together: ``EpisodicEnv`` row by row.

send(chunks, ids) ─► begin_step ─┐   ┌─ chunk not complete: begin_step with its next action
receive ─► collect: some rows ◄──┴───┤─ episode ended: last observation, sampler.next, start, which is collected too
                                     └─ else: the row is done ─► Timestep of the rows that are done
"""

from abc import abstractmethod

import torch
from torch import Tensor

from embodied.core.episodes import EpisodePlans, EpisodeStats, Ints
from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Timestep
from embodied.envs.base.actions import checked_chunk
from embodied.envs.base.episodic import Advance, Chunks, EpisodicEnv


class RowByRowEnv(EpisodicEnv):
    """Envs on the CPU that need not be stepped together. ``step`` waits for all rows.

    A simulator adds ``begin_step`` and ``collect``, and its ``start`` does not wait while ``apart`` is set.
    """

    batch_size: int
    apart = False
    """Whether rows are stepped by ``send`` and ``receive`` now."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        super().__init__(spec, num_envs)
        self.batch_size = num_envs
        self._chunks = Chunks(torch.empty(num_envs, 0, 0), self._once)
        self._under_way_N, self._starting_N, self._done_N = torch.zeros(3, num_envs, dtype=torch.bool)
        self._stats: list[EpisodeStats] = []

    @abstractmethod
    def begin_step(self, action_nA: Tensor, ids: Ints) -> None:
        """Begin a control step of envs ``ids`` [n]."""

    @abstractmethod
    def collect(self, count: int) -> tuple[Ints, Advance]:
        """Wait for ``count`` envs that step or begin an episode; return their ids, ascending, and the steps' results.

        They are those of ``advance``; rows of envs that begin an episode are ignored. ``observe`` then returns the new
        observations.
        """

    def send(self, action: Tensor, ids: Tensor) -> None:
        if self.sampler is None:
            raise ValueError("send before the first reset: call reset(sampler) first")
        chunk_nEA = checked_chunk(action, self.spec.action, len(ids))
        if bool(self._under_way_N[ids].any()):
            raise ValueError("ids: some of these envs are under way")
        if self._chunks.action_NEA.shape[1:] != chunk_nEA.shape[1:]:
            if bool(self._under_way_N.any()):
                under_way = list(self._chunks.action_NEA.shape[1:])
                raise ValueError(f"action: chunks of another size are under way: {under_way}")
            self._chunks = Chunks(chunk_nEA.new_zeros(self.num_envs, *chunk_nEA.shape[1:]), self._once)
        chunks = self._chunks
        chunks.action_NEA[ids], chunks.reward_NE[ids], chunks.num_steps_N[ids] = chunk_nEA, 0.0, 0
        chunks.ended_N[ids] = chunks.terminated_N[ids] = False
        if chunks.broken_N is not None:
            chunks.broken_N[ids] = False
        self._under_way_N[ids] = True
        self.begin_step(chunk_nEA[:, 0], ids.numpy())

    def receive(self) -> tuple[Tensor, Timestep]:
        """UserError if the sampler wants episodes of several envs to begin together."""
        wanted = min(self.batch_size, int(self._under_way_N.sum()))
        while (missing := wanted - int(self._done_N.sum())) > 0:
            ids, result = self.collect(missing)
            collected_N = torch.zeros_like(self._done_N).index_fill_(0, torch.from_numpy(ids), True)
            self._done_N |= collected_N & self._starting_N
            stepped_N = collected_N & ~self._starting_N
            self._starting_N &= ~collected_N
            if bool(stepped_N.any()):
                self._continue(stepped_N, result)
        rows = self._done_N.nonzero().squeeze(-1)
        self._done_N[rows] = self._under_way_N[rows] = False
        stats = EpisodeStats.concatenate(self._stats)
        here_M = torch.isin(stats.env_id_M, rows)
        self._stats, stats = [stats.rows(~here_M)], stats.rows(here_M)
        episodes = stats.rows(stats.env_id_M.argsort()) if len(stats) else self._nobody
        return rows, self._timestep(self._chunks, episodes, rows)

    def begin(self, ids: Ints, plans: EpisodePlans) -> None:
        """UserError for plans that repeat others, if rows are apart."""
        if self.apart and plans.filler_n.any():
            raise UserError("sim.batch_size: groups of equal episodes (algo=grpo) are stepped together; leave it out")
        super().begin(ids, plans)

    def _continue(self, stepped_N: Tensor, result: Advance) -> None:
        """Count a control step of envs ``stepped_N``, and begin the next step, the next episode, or nothing."""
        chunks, rows = self._chunks, stepped_N.nonzero().squeeze(-1)
        at_n = chunks.num_steps_N[rows]
        reward_N, ended_N = self._count(chunks, result, stepped_N)
        chunks.reward_NE[rows, at_n] = reward_N[rows]
        on_N = stepped_N & ~chunks.ended_N
        self._done_N |= on_N & (chunks.num_steps_N == chunks.action_NEA.shape[1])
        if ended_N is not None:
            ended = ended_N.nonzero().squeeze(-1)
            self._keep_final(ended_N)
            self._starting_N |= ended_N
            self.apart = True
            self._stats.append(self._renew(ended, chunks))
            self.apart = False
        on = (on_N & ~self._done_N).nonzero().squeeze(-1)
        if len(on):
            self.begin_step(chunks.action_NEA[on, chunks.num_steps_N[on]], on.numpy())
