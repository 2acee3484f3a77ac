"""Env worker: groups of environments, each of which fills one fragment after the other.

    group         start(ticket)          advance(reply) x T                                  advance(reply)
    dataflow      obs, noise ──► actor   sample ──► env.step ──► record ──► obs, noise ──►    values ──► Fragment

Timeline of a group: ``start`` returns the request of decision 0. ``advance`` takes the actor's reply, steps the envs
and returns the next request. After T decisions that is a request for values alone; its reply completes the fragment
with V of the last observation. The first action of the next fragment is drawn after the ledger has admitted that
fragment, with the weights of that time. With max_staleness=0 every decision is therefore exactly on-policy.

The last observations of episodes are in the next request; the values of truncated ones fill final_value_TN. Each group
draws its noise with a key of its own when it makes a request, so results do not depend on how requests are merged.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeSampler
from embodied.core.types import Fragment
from embodied.runtime.collecting.actor_server import ActReply, ActRequest
from embodied.runtime.collecting.rollout import GroupRollout, RowRollout
from embodied.runtime.ledger import Ticket
from embodied.runtime.watch import Track


class EnvWorker:
    """Env groups of one worker. It is independent of the runtime, which carries its requests and replies.

    groups: envs with the samplers of their episodes. decisions: T of a fragment. execute: E of a chunk. noise_shape:
    that of the policy. seed: that of the run. incarnation: how often the worker was replaced; each draws other noise.
    device: of the observations and actions of its fragments.
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
        device: torch.device = CPU,
    ) -> None:
        self.track = Track(f"env worker {worker_id}", "wait_ticket")
        self.rollouts: list[GroupRollout] = []
        for group, (env, sampler) in enumerate(groups):
            kind = GroupRollout if env.batch_size is None else RowRollout
            key = worker_id, group, incarnation
            self.rollouts.append(kind(env, sampler, key, decisions, execute, noise_shape, seed, self.track, device))

    @property
    def resumes_exactly(self) -> bool:
        """Whether all its envs can be restored from a checkpoint."""
        return all(rollout.env.resumes_exactly for rollout in self.rollouts)

    @property
    def tracks(self) -> list[Track]:
        """Its own track and one of each group."""
        return [self.track, *(rollout.track for rollout in self.rollouts)]

    def start(self, ticket: Ticket) -> ActRequest:
        """Begin a fragment of ``ticket.group``; return the request of its first decision."""
        assert self.rollouts[ticket.group].request is None, "the group is in the middle of a fragment"
        with self._working(ticket.group) as rollout:
            return rollout.start(ticket)

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        """Execute the actor's reply; return the next request, or the complete fragment."""
        with self._working(reply.group) as rollout:
            return rollout.advance(reply)

    def state_dict(self, group: int) -> dict[str, Any]:
        """Return the state of one group, between two of its fragments."""
        return self.rollouts[group].state_dict()

    def load_state_dict(self, group: int, state: Mapping[str, Any] | None) -> None:
        """Continue one group from its state. UserError if the checkpoint has none."""
        self.rollouts[group].load_state_dict(state)

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.env.close()

    @contextmanager
    def _working(self, group: int) -> Iterator[GroupRollout]:
        """Work on a group, and keep its track and the worker's."""
        rollout = self.rollouts[group]
        rollout.track.enter("record")
        self.track.enter("record")
        try:
            yield rollout
        finally:
            rollout.track.enter("wait_actor" if rollout.request else "wait_ticket")
            self.track.enter("wait_actor" if any(rollout.request for rollout in self.rollouts) else "wait_ticket")
