"""The family ``envpool``, ``task=envpool/<id>``, and its envs that are not stepped together.

send(chunks, ids) ─► step begins ─┐   ┌─ chunk not complete: the next step with its next action
receive ─► EnvPool: some rows ◄───┴───┤─ episode ended: last observation, sampler.next, start, which is received too
                                      └─ else: the row is done ─► Timestep of the rows that are done
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.episodes import EpisodePlans, EpisodeStats, Ints
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.core.types import Timestep
from embodied.envs.adapters.config import EnvpoolTaskConfig
from embodied.envs.adapters.envpool.pool import EnvpoolEnv
from embodied.envs.adapters.envpool.spec import Layout, read_layout, require_known
from embodied.envs.base.actions import checked_chunk
from embodied.envs.base.episodic import Advance, Chunks

LISTED = (
    "Ant-v5", "CartPole-v1", "FetchPickAndPlaceDense-v1", "FetchReachDense-v4", "Go1JoystickFlatTerrain-v1",
    "HalfCheetah-v5", "Humanoid-v5", "LunarLander-v3", "MetaWorld/DrawerOpen-v3", "MetaWorld/Reach-v3",
    "PandaPickCube-v1", "Walker2d-v5",
)  # fmt: skip


class RowByRowEnvpoolEnv(EnvpoolEnv):
    """N envs that need not be stepped together. EnvPool gives the results one by one, as they come.

    batch_size: envs of one ``receive``. ``step`` waits for all rows.
    """

    one_by_one = True
    batch_size: int

    def __init__(self, layout: Layout, num_envs: int, num_threads: int, batch_size: int) -> None:
        super().__init__(layout, num_envs, num_threads)
        self.batch_size = batch_size
        self._chunks = Chunks(torch.empty(num_envs, 0, 0), self._once)
        self._under_way_N, self._starting_N, self._done_N = torch.zeros(3, num_envs, dtype=torch.bool)
        self._stats: list[EpisodeStats] = []

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
        chunks.ended_N[ids] = chunks.terminated_N[ids] = chunks.broken_N[ids] = False
        self._under_way_N[ids] = True
        self._begin_step(chunk_nEA[:, 0], ids.numpy())

    def receive(self) -> tuple[Tensor, Timestep]:
        """UserError if the sampler wants episodes of several envs to begin together."""
        wanted = min(self.batch_size, int(self._under_way_N.sum()))
        while (missing := wanted - int(self._done_N.sum())) > 0:
            (pool,) = self._pools
            arrays = pool.receive(missing)
            ids = arrays["info:env_id"].astype(np.int64)  # of the only pool, so they are those of the rows
            result = self._result([(arrays, ids)])
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
        if self._may_end(result) and bool(ended_N.any()):
            ended = ended_N.nonzero().squeeze(-1)
            self._keep_final(ended_N)
            self._starting_N |= ended_N
            self.apart = True
            self._stats.append(self._renew(ended, chunks))
            self.apart = False
        on = (on_N & ~self._done_N).nonzero().squeeze(-1)
        if len(on):
            self._begin_step(chunks.action_NEA[on, chunks.num_steps_N[on]], on.numpy())

    def _begin_step(self, action_nA: Tensor, ids: Ints) -> None:
        (pool,) = self._pools
        pool.send(self._converted(action_nA), self._env_N[ids])


class EnvpoolFamily:
    """See ``registry.Family``. ``task=envpool/<id>`` takes every id of EnvPool; ``ids`` has those tried here."""

    def ids(self) -> Sequence[str]:
        return LISTED if find_spec("envpool") else ()

    def task_config(self, id: str) -> type[Any]:
        require_known(id)
        return EnvpoolTaskConfig

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        return read_layout(id, task, cameras).spec

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> EnvpoolEnv:
        layout = read_layout(id, task, cameras)
        if sim.batch_size is None:
            return EnvpoolEnv(layout, num_envs, num_threads)
        return RowByRowEnvpoolEnv(layout, num_envs, num_threads, min(sim.batch_size, num_envs))
