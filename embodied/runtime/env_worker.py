"""Env worker: groups of environments; a cursor per group fills its fragments.

    cursor        start(ticket)          advance(reply) x T                                  advance(reply)
    dataflow      obs, noise ──► actor   sample ──► env.step ──► record ──► obs, noise ──►    values ──► Fragment

Timeline of a group: ``start`` returns the request of decision 0. ``advance`` takes the actor's reply, steps the envs
and returns the next request. After T decisions that is a request for values alone; its reply completes the fragment
with V of the last observation. The first action of the next fragment is drawn after the ledger has admitted that
fragment, with the weights of that time. With max_staleness=0 every decision is therefore exactly on-policy.

The last observations of episodes are in the next request; the values of truncated ones fill final_value_TN. Each group
draws its noise with a key of its own when it makes a request, so results do not depend on how requests are merged.

A group whose envs need not be stepped together (``RowByRow``) has a ``RowCursor``, whose requests are for some envs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from embodied.core.device import CPU
from embodied.core.episodes import EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.protocols import ExactResume, RowByRow, VecEnv
from embodied.core.types import Fragment
from embodied.runtime.cursor import Cursor
from embodied.runtime.ledger import Ticket
from embodied.runtime.messages import ActReply, ActRequest
from embodied.runtime.row_cursor import RowCursor
from embodied.runtime.watch.track import Track


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
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.track = Track(f"env worker {worker_id}", "wait_ticket")
        self.cursors = [
            (RowCursor if isinstance(env, RowByRow) else Cursor)(
                env, sampler, (worker_id, group, incarnation), decisions, execute, noise_shape, seed, self.track, device
            )
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

    def load_state_dict(self, group: int, state: Mapping[str, Any] | None) -> None:
        """Continue one group from its state. UserError if the checkpoint has none."""
        if state is None:
            raise UserError("the checkpoint lacks env workers that were still to join: resume it with runtime=ray")
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
