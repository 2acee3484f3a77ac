"""Env worker: groups of environments; a cursor per group fills its fragments.

    cursor        start(ticket)          advance(reply) x T                                  advance(reply)
    dataflow      obs, noise ──► actor   sample ──► env.step ──► record ──► obs, noise ──►    values ──► Fragment

Timeline of a group: ``start`` returns the request of decision 0. ``advance`` takes the actor's reply, steps the envs
and returns the next request. After T decisions that is a request for values alone; its reply completes the fragment
with V of the last observation. The first action of the next fragment is drawn after the ledger has admitted that
fragment, with the weights of that time. With max_staleness=0 every decision is therefore exactly on-policy.

The last observations of episodes are in the next request; the values of truncated ones fill final_value_TN. Each group
draws its noise from its own generator when it makes a request, so results do not depend on how requests are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from embodied.core.contract import check_obs, check_timestep
from embodied.core.episodes import EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.execution import execute, obs_on_cpu
from embodied.core.protocols import ExactResume, VecEnv
from embodied.core.types import Fragment, Obs, Timestep
from embodied.runtime.ledger import Ticket
from embodied.runtime.messages import ActReply, ActRequest
from embodied.runtime.recorder import Recorder
from embodied.runtime.track import Track


class EnvWorker:
    """Env groups of one worker. It is independent of the runtime, which carries its requests and replies.

    groups: envs with the samplers of their episodes. decisions: T of a fragment. execute: E of a chunk. noise_shape:
    that of the policy. seed: that of the run. incarnation: how often the worker was replaced; each draws other noise.
    Only one thread at a time may call it. ``track``: it steps, records, or between two calls waits, for the actor if a
    group is in the middle of a fragment, and otherwise for a ticket.
    """

    def __init__(
        self,
        groups: Sequence[tuple[VecEnv, EpisodeSampler]],
        worker_id: int,
        decisions: int,
        execute: int,
        noise_shape: tuple[int, ...],
        seed: int,
        incarnation: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.track = Track(f"env worker {worker_id}", "wait_ticket")
        self.cursors = [
            Cursor(env, sampler, (worker_id, group, incarnation), decisions, execute, noise_shape, seed, self.track)
            for group, (env, sampler) in enumerate(groups)
        ]

    @property
    def num_groups(self) -> int:
        """Number of its env groups."""
        return len(self.cursors)

    @property
    def resumes_exactly(self) -> bool:
        """Whether all its envs can be restored from a checkpoint."""
        return all(isinstance(cursor.env, ExactResume) for cursor in self.cursors)

    def totals(self) -> dict[str, float]:
        """Return the seconds of each activity so far (``Track.totals``)."""
        return self.track.totals()

    @property
    def tracks(self) -> list[Track]:
        """Its own track and one of each group."""
        return [self.track, *(cursor.track for cursor in self.cursors)]

    def start(self, ticket: Ticket) -> ActRequest:
        """Begin a fragment of ``ticket.group``; return the request of its first decision."""
        cursor = self.cursors[ticket.group]
        with self._working(cursor):
            return cursor.start(ticket)

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        """Execute the actor's reply; return the next request, or the complete fragment."""
        cursor = self.cursors[reply.group]
        with self._working(cursor):
            return cursor.advance(reply)

    def state_dict(self, group: int) -> dict[str, Any]:
        """Return the state of one group, between two of its fragments."""
        return self.cursors[group].state_dict()

    def load_state_dict(self, group: int, state: Mapping[str, Any]) -> None:
        """Continue one group from its state."""
        self.cursors[group].load_state_dict(state)

    def close(self) -> None:
        for cursor in self.cursors:
            cursor.env.close()

    @contextmanager
    def _working(self, cursor: Cursor) -> Iterator[None]:
        """Keep the tracks of the worker and of a group that it works on."""
        cursor.enter("record")
        try:
            yield
        finally:
            cursor.track.enter(_wait(cursor.ticket is not None))
            self.track.enter(_wait(any(cursor.ticket is not None for cursor in self.cursors)))


def _wait(in_fragment: bool) -> str:
    return "wait_actor" if in_fragment else "wait_ticket"


class Cursor:
    """Progress of one group. ``obs``: input of its next decision. ``ticket``: None between fragments."""

    def __init__(
        self,
        env: VecEnv,
        sampler: EpisodeSampler,
        key: tuple[int, int, int],
        decisions: int,
        execute: int,
        noise_shape: tuple[int, ...],
        seed: int,
        worker_track: Track,
    ) -> None:
        self.env = env
        self.sampler = sampler
        self.worker, self.group, _ = key
        self.decisions = decisions
        self.execute = execute
        self.noise_shape = noise_shape
        self.generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, *key)).generate_state(1)[0]))
        self.obs: Obs | None = None
        self.ticket: Ticket | None = None
        self.track = Track(f"group {self.group}", "wait_ticket")
        self._worker_track = worker_track
        self._checked = False  # whether a step in which episodes ended has passed ``check_timestep``
        self._t = 0
        self._recorder: Recorder | None = None
        self._ended: Timestep | None = None  # of decision t-1, if episodes ended there

    def start(self, ticket: Ticket) -> ActRequest:
        assert self.ticket is None, "the group is in the middle of a fragment"
        if self.obs is None:
            self.obs = obs_on_cpu(self.env.reset(self.sampler))
            check_obs(self.env, self.obs, self.env.num_envs, "reset()")
        self.ticket, self._t = ticket, 0
        self._recorder = Recorder(self.decisions, self.env.num_envs)
        return self._request()

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        assert self.ticket is not None
        assert self._recorder is not None
        assert self.obs is not None
        if self._ended is not None:
            self._record_end(self._ended, reply)
        obs = self.obs if reply.obs is None else reply.obs
        if reply.sample is None:
            assert reply.value_N is not None
            fragment = self._recorder.fragment(obs, reply.value_N, self.ticket)
            self.ticket = self._recorder = self._ended = None
            return fragment
        self._recorder.observe(self._t, obs)
        self.enter("step")
        action_NEA, step = execute(self.env, reply.sample.action_NHA, self.execute)
        self.enter("record")
        if not self._checked:
            check_timestep(self.env, step, self.execute)
            self._checked = len(step.final_ids) > 0
        self._recorder.record(self._t, reply.sample, action_NEA, step)
        self.obs = step.obs
        self._ended = step if len(step.final_ids) else None
        self._t += 1
        return self._request()

    def enter(self, activity: str) -> None:
        """Begin an activity of the group and its worker."""
        self.track.enter(activity)
        self._worker_track.enter(activity)

    def _record_end(self, step: Timestep, reply: ActReply) -> None:
        """Keep the last observations of the episodes that ended in ``step``, and the value of truncated ones."""
        assert self._recorder is not None
        assert reply.final_value_M is not None
        t, ids_M = self._t - 1, step.final_ids
        counts_M, truncated_M = step.num_steps_N[ids_M] > 0, step.truncated_N[ids_M]
        value_M = torch.where(counts_M, reply.final_value_M, self._recorder.value_TN[t, ids_M])
        self._recorder.final_value_TN[t, ids_M[truncated_M]] = value_M[truncated_M]
        final_obs = step.final_obs if reply.final_obs is None else reply.final_obs
        self._recorder.end(self._t - 1, step.final_ids, final_obs)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of sampler and noise generator, between fragments only.

        If the env can be resumed exactly, also of env and pending observation.
        """
        assert self.ticket is None, "a group can be saved between its fragments only"
        if self.obs is None:
            self.obs = obs_on_cpu(self.env.reset(self.sampler))
        state: dict[str, Any] = {
            "num_envs": self.env.num_envs,
            "sampler": self.sampler.state_dict(),
            "generator": self.generator.get_state(),
        }
        if isinstance(self.env, ExactResume):
            state["env"] = {key: tensor.clone() for key, tensor in self.env.state_dict().items()}
            state["obs"] = {key: tensor.clone() for key, tensor in self.obs.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; an env that cannot be resumed exactly starts new episodes."""
        if "sampler" not in state:
            raise UserError(
                "the checkpoint is of a version of this code that kept other states of environments and cannot be "
                "resumed; start a new run from its policy with init=<run directory>"
            )
        if state["num_envs"] != self.env.num_envs:
            raise UserError(
                f"the checkpoint has {state['num_envs']} envs in a group, this run {self.env.num_envs}: keep num_envs"
            )
        self.sampler.load_state_dict(state["sampler"])
        self.generator.set_state(state["generator"])
        if isinstance(self.env, ExactResume):
            self.env.load_state_dict(state["env"], self.sampler)
            self.obs = {key: tensor.clone() for key, tensor in state["obs"].items()}
        else:
            self.obs = obs_on_cpu(self.env.reset(self.sampler))

    def _request(self) -> ActRequest:
        """Request the next decision, or after the last decision values alone."""
        assert self.obs is not None
        noise = None
        if self._t < self.decisions:
            noise = torch.randn(self.env.num_envs, *self.noise_shape, generator=self.generator)
        final_obs = None if self._ended is None else self._ended.final_obs
        return ActRequest(self.worker, self.group, self.obs, noise, final_obs)
