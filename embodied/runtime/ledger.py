"""The only authority on staleness: which group may begin a fragment, and which batch that fragment belongs to.

    worker ── try_acquire ──► Ticket ── (T decisions) ── deliver ──► accepted      learner ── consumed_batch ──► version

A fragment is admitted only while ``accepted + in_flight < (version + 1 + max_staleness) * batch_fragments``, where
version counts consumed batches. Tickets are numbered in order of admission and batch b is the tickets
``b * batch_fragments ...`` of that order, whatever the order of delivery: since ticket k is given out only while
``k < (version + 1 + max_staleness) * batch_fragments`` and is consumed when version is ``k // batch_fragments``, no
decision is ever more than max_staleness versions old at its update. Tickets are leases: ``release_worker`` frees a dead
worker's numbers for the next tickets. Nothing can deadlock as long as every ticket is delivered or released: the batch
that the learner waits for can always be admitted whole.

With max_staleness=0 (synchronous PPO) each group gives exactly one fragment to each batch, so that a batch does not
depend on which group was faster. order=arrival: docs/architecture.md, "Where staleness is decided".
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to sample one fragment."""

    sequence: int
    """Its number in the order of admission."""
    worker: int
    group: int
    """Indices of the env worker, and of the env group in its worker."""
    incarnation: int
    learner: int = 0
    """How often the worker and the learner were replaced."""


class Ledger:
    """Thread-safe; every method returns at once except ``acquire``.

    batch_fragments: fragments of one batch. max_staleness: see above. version: batches consumed. accepted: fragments
    delivered since the beginning. waiting: calls that wait in ``acquire`` now, until a batch has been consumed.
    """

    def __init__(self, batch_fragments: int, max_staleness: int) -> None:
        self.batch_fragments, self.max_staleness = batch_fragments, max_staleness
        self.version = self.accepted = self.waiting = 0
        self._changed = threading.Condition()
        self._next = 0
        self._freed: list[int] = []  # heap of released numbers
        self._leases: dict[int, Ticket] = {}
        self._given: Counter[tuple[int, int]] = Counter()  # tickets per group since the last consumed batch
        self._learner = 0
        self._wakes = 0
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Tickets that are neither delivered nor released."""
        return len(self._leases)

    def try_acquire(self, worker: int, incarnation: int = 0, group: int = 0) -> Ticket | None:
        """Return a ticket, or None if the limit is reached or the ledger is closed."""
        with self._changed:
            limit = (self.version + 1 + self.max_staleness) * self.batch_fragments
            if self._closed or self.accepted + len(self._leases) >= limit:
                return None
            if self.max_staleness == 0 and self._given[worker, group]:
                return None
            self._given[worker, group] += 1
            if self._freed:
                sequence = heapq.heappop(self._freed)
            else:
                sequence, self._next = self._next, self._next + 1
            self._leases[sequence] = ticket = Ticket(sequence, worker, group, incarnation, self._learner)
            return ticket

    def acquire(self, worker: int, incarnation: int = 0, group: int = 0) -> Ticket | None:
        """Wait for a ticket and return it; None on ``wake`` or ``close``."""
        with self._changed:
            wakes = self._wakes
            self.waiting += 1
            while (ticket := self.try_acquire(worker, incarnation, group)) is None:
                if self._closed or self._wakes != wakes:
                    break
                self._changed.wait()
            self.waiting -= 1
            return ticket

    def deliver(self, ticket: Ticket) -> bool:
        """Accept a complete fragment. False if its lease was released meanwhile: the fragment must be dropped."""
        with self._changed:
            if self._leases.get(ticket.sequence) != ticket:
                return False
            del self._leases[ticket.sequence]
            self.accepted += 1
            return True

    def release_worker(self, worker: int, incarnation: int) -> int:
        """Give back all tickets of a dead worker; return their number."""
        with self._changed:
            held = [t for t in self._leases.values() if (t.worker, t.incarnation) == (worker, incarnation)]
            for ticket in held:
                del self._leases[ticket.sequence]
                heapq.heappush(self._freed, ticket.sequence)
                self._given[worker, ticket.group] -= 1
            self._changed.notify_all()
            return len(held)

    def consumed_batch(self) -> int:
        """Count batch ``version`` as consumed, after version + 1 was published; return the new version."""
        with self._changed:
            assert self.accepted >= (self.version + 1) * self.batch_fragments, "a batch that was never delivered"
            self.version += 1
            self._given.clear()
            self._changed.notify_all()
            return self.version

    def wake(self) -> None:
        """Make every waiting ``acquire`` return None once."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Admit nothing any more, and wake every waiting ``acquire``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def continue_after(self, version: int, learner: int) -> None:
        """Continue after ``version`` consumed batches, before anything was admitted or for another learner.

        Tickets that were given out before are refused.
        """
        with self._changed:
            assert learner > self._learner or self._next == self.version * self.batch_fragments
            self._leases.clear()
            self._freed.clear()
            self._given.clear()
            self.version, self._learner = version, learner
            self.accepted = self._next = version * self.batch_fragments
            self._changed.notify_all()
