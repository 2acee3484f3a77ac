"""Groups of environments, and the cursor with which each of them fills its fragments.

    cursor        start(ticket)          advance(reply) x T                                  advance(reply)
    dataflow      obs, noise ──► actor   sample ──► env.step ──► record ──► obs, noise ──►    values ──► Fragment

Timeline of a group: ``start`` gives the request of decision 0; ``advance`` takes the actor's reply, steps the envs and
gives the next request; after T decisions that is a request of values only, whose reply completes the fragment with
V of the last observation. The first action of the next fragment is drawn when the ledger has admitted it, with the
weights of that time: with max_staleness=0 every decision is exactly on-policy.

Last observations of truncated episodes travel with the next request; their values fill final_value_TN. All noise of a
group is drawn from its own generator when the request is made, so results do not depend on how requests are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.protocols import VecEnv
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.types import Fragment, Obs
from embodied.runtime.ledger import Ticket
from embodied.runtime.messages import ActReply, ActRequest
from embodied.runtime.recorder import Recorder

SampleNoise = Callable[[int, torch.Generator], Tensor]
"""``Policy.sample_noise``: (num, generator) -> [num, ...]"""


class EnvWorker:
    """G env groups of one worker. Knows no runtime: whoever runs it carries requests and replies.

    decisions: T of a fragment. execute: E of a chunk. sample_noise: of the policy. seed: of the run. first_env: index
    of this worker's first env among all envs of the run. Everything must be called from one thread at a time.
    """

    def __init__(
        self,
        groups: Sequence[VecEnv],
        worker_id: int,
        decisions: int,
        execute: int,
        sample_noise: SampleNoise,
        seed: int,
        first_env: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.cursors: list[Cursor] = []
        for group, env in enumerate(groups):
            cursor = Cursor(env, (worker_id, group), decisions, execute, sample_noise, seed, first_env)
            self.cursors.append(cursor)
            first_env += env.num_envs

    @property
    def sim_s(self) -> float:
        """Seconds spent in ``VecEnv.step`` so far."""
        return sum(cursor.sim_s for cursor in self.cursors)

    def start(self, ticket: Ticket) -> ActRequest:
        """Begin a fragment of ``ticket.group``; the request of its first decision."""
        return self.cursors[ticket.group].start(ticket)

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        """Go on with what the actor said; the next request, or the complete fragment."""
        return self.cursors[reply.group].advance(reply)

    def state_dict(self, group: int) -> dict[str, Any]:
        """Of one group, between two of its fragments."""
        return self.cursors[group].state_dict()

    def load_state_dict(self, group: int, state: Mapping[str, Any]) -> None:
        self.cursors[group].load_state_dict(state)

    def close(self) -> None:
        for cursor in self.cursors:
            cursor.env.close()


class Cursor:
    """Where one group stands. ``obs``: what its next decision is made on; ``ticket``: None between fragments."""

    def __init__(
        self,
        env: VecEnv,
        key: tuple[int, int],
        decisions: int,
        execute: int,
        sample_noise: SampleNoise,
        seed: int,
        first_env: int,
    ) -> None:
        self.env = env
        self.worker, self.group = key
        self.decisions = decisions
        self.execute = execute
        self.sample_noise = sample_noise
        self.env_seed = first_env_seed(Purpose.TRAINING, seed) + first_env
        self.generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, *key)).generate_state(1)[0]))
        self.obs: Obs | None = None
        self.ticket: Ticket | None = None
        self.sim_s = 0.0
        self._t = 0
        self._recorder: Recorder | None = None
        self._awaited_rows = torch.empty(0, dtype=torch.int64)  # envs truncated at decision t-1: their V is asked for
        self._final_obs: Obs | None = None

    def start(self, ticket: Ticket) -> ActRequest:
        assert self.ticket is None, "the group is in the middle of a fragment"
        if self.obs is None:
            self.obs = self.env.reset(self.env_seed)
        self.ticket, self._t = ticket, 0
        self._recorder = Recorder(self.decisions, self.env.num_envs)
        return self._request_action()

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        assert self.ticket is not None
        assert self._recorder is not None
        if reply.final_value_M is not None:
            self._recorder.final_value_TN[self._t - 1, self._awaited_rows] = reply.final_value_M
        if reply.sample is None:
            assert reply.value_N is not None
            fragment = self._recorder.fragment(reply.value_N, self.ticket)
            self.ticket = self._recorder = None
            return fragment
        assert self.obs is not None
        self._recorder.observe(self._t, self.obs if reply.obs is None else reply.obs)
        began = time.perf_counter()
        step = self.env.step(reply.sample.action_NHA[:, : self.execute])
        self.sim_s += time.perf_counter() - began
        self._recorder.record(self._t, reply.sample, step)
        self.obs = step.obs
        self._final_obs = None
        truncated = step.truncated_N[step.final_ids]
        if truncated.any():
            self._awaited_rows = step.final_ids[truncated]
            self._final_obs = {key: rows[truncated] for key, rows in step.final_obs.items()}
        self._t += 1
        if self._t < self.decisions:
            return self._request_action()
        return ActRequest(self.worker, self.group, self.obs, None, self._final_obs)

    def state_dict(self) -> dict[str, Any]:
        """Env, its pending observation and the noise generator; copies. Only between fragments."""
        assert self.ticket is None, "a group can be saved between its fragments only"
        if self.obs is None:
            self.obs = self.env.reset(self.env_seed)
        return {
            "env": {key: tensor.clone() for key, tensor in self.env.state_dict().items()},
            "obs": {key: tensor.clone() for key, tensor in self.obs.items()},
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.ticket is None, "a group can be restored between its fragments only"
        self.env.load_state_dict(state["env"])
        self.obs = dict(state["obs"])
        self.generator.set_state(state["generator"])

    def _request_action(self) -> ActRequest:
        assert self.obs is not None
        final_obs = self._final_obs if self._t else None
        noise = self.sample_noise(self.env.num_envs, self.generator)
        return ActRequest(self.worker, self.group, self.obs, noise, final_obs)
