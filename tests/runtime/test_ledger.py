"""The ledger's promises, one by one and with real threads. Random interleavings: tests/runtime/protocol."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from embodied.core.episodes import EpisodeStats
from embodied.core.types import Fragment
from embodied.runtime.channel import Channel, Closed
from embodied.runtime.ledger import Ledger, Ticket


def fragment_of(ticket: Ticket, version: int = 0) -> Fragment:
    row = torch.zeros(1, 1)
    return Fragment(
        obs={},
        chain=row,
        log_prob_TN=row,
        value_TN=row,
        reward_TNE=row[..., None],
        num_steps_TN=row.long(),
        terminated_TN=row.bool(),
        truncated_TN=row.bool(),
        final_value_TN=row,
        bootstrap_value_N=row[0],
        version_TN=torch.full((1, 1), version),
        episodes=EpisodeStats.concatenate([]),
        worker=ticket.worker,
        group=ticket.group,
        incarnation=ticket.incarnation,
        sequence=ticket.sequence,
    )


def test_admits_up_to_the_limit_and_again_after_a_batch() -> None:
    ledger = Ledger(batch_fragments=2, max_staleness=1)
    tickets = [ledger.try_acquire(0) for _ in range(5)]
    assert [ticket and ticket.sequence for ticket in tickets] == [0, 1, 2, 3, None]
    for ticket in tickets[:2]:
        assert ticket is not None
        assert ledger.deliver(ticket)
    assert ledger.try_acquire(0) is None
    assert ledger.consumed_batch() == 1
    assert (ledger.accepted, ledger.in_flight) == (2, 2)
    assert [ledger.try_acquire(0) is not None for _ in range(3)] == [True, True, False]


def test_synchronous_batch_has_one_fragment_of_each_group() -> None:
    ledger = Ledger(batch_fragments=2, max_staleness=0)
    first = ledger.try_acquire(0, group=0)
    assert first is not None
    assert ledger.deliver(first)
    assert ledger.try_acquire(0, group=0) is None, "a fast group must not take a slow one's place"
    second = ledger.try_acquire(0, group=1)
    assert second is not None
    assert ledger.deliver(second)
    ledger.consumed_batch()
    assert ledger.try_acquire(0, group=0) is not None


def test_lease_of_a_dead_worker_comes_back() -> None:
    for max_staleness in (0, 1):
        ledger = Ledger(batch_fragments=1, max_staleness=max_staleness)
        dead = ledger.try_acquire(worker=0, incarnation=0)
        assert dead is not None
        assert ledger.release_worker(0, incarnation=0) == 1
        again = ledger.try_acquire(worker=0, incarnation=1)
        assert again is not None
        assert again.sequence == dead.sequence, "the number of the batch in the making must not be lost"
        assert not ledger.deliver(dead), "a fragment of a released lease must be refused"
        assert ledger.deliver(again)
        assert ledger.consumed_batch() == 1


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_threads_with_blocking_acquire(max_staleness: int) -> None:
    """Workers of very different speed block on the ledger; the bound holds for the slowest as well."""
    workers, batches = 4, 60
    ledger, channel = Ledger(workers, max_staleness), Channel(workers, max_staleness)

    def work(index: int) -> None:
        rng = random.Random(index)
        while (ticket := ledger.acquire(index)) is not None:
            version = ledger.version
            time.sleep(rng.random() * 0.001 * (5 if index == 0 else 0.2))
            assert ledger.deliver(ticket)
            try:
                channel.put(fragment_of(ticket, version))
            except Closed:
                return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    for thread in threads:
        thread.start()
    for version in range(batches):
        batch = channel.take(version)
        assert all(version - int(fragment.version_TN) <= max_staleness for fragment in batch)
        ledger.consumed_batch()
    ledger.close()
    channel.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_wake_and_close_end_a_wait() -> None:
    ledger = Ledger(1, 0)
    assert ledger.try_acquire(0) is not None
    results: list[Ticket | None] = []
    for end in (ledger.wake, ledger.close):
        thread = threading.Thread(target=lambda: results.append(ledger.acquire(0)))
        thread.start()
        time.sleep(0.05)
        assert ledger.waiting == 1
        end()
        thread.join(5)
        assert ledger.waiting == 0
        assert not thread.is_alive()
    assert results == [None, None]
    assert ledger.acquire(0) is None


def test_a_lost_learner_takes_its_tickets_and_batches_with_it() -> None:
    """The bound counts from the version of the next learner, for which no late fragment is accepted."""
    ledger, channel = Ledger(2, 1), Channel(2, 1)
    delivered = [ledger.try_acquire(0, group=group) for group in (0, 1)]
    late = ledger.try_acquire(0, group=0)
    assert late is not None
    for ticket in delivered:
        assert ticket is not None
        assert ledger.deliver(ticket)
        channel.put(fragment_of(ticket))
    ledger.consumed_batch()
    ledger.continue_after(0, learner=1)
    channel.empty(learner=1)
    assert (ledger.version, ledger.accepted, ledger.in_flight, len(channel)) == (0, 0, 0, 0)
    assert not ledger.deliver(late)
    given = [ledger.try_acquire(0, group=group % 2) for group in range(5)]
    assert [ticket and ticket.sequence for ticket in given] == [0, 1, 2, 3, None]
    assert given[2] is not None
    assert (given[2].sequence, given[2].group) == (late.sequence, late.group), "the same but for the learner"
    assert not ledger.deliver(late)
    assert ledger.deliver(given[2])
    with pytest.raises(Closed):
        channel.take(0)  # of the learner that was lost
    waiting: list[str] = []

    def take() -> None:
        try:
            channel.take(0, learner=1)
        except Closed:
            waiting.append("ended")

    thread = threading.Thread(target=take)
    thread.start()
    channel.empty(learner=2)
    thread.join(10)
    assert waiting == ["ended"]


def test_state_continues_after_the_consumed_batches() -> None:
    ledger = Ledger(3, 1)
    ledger.continue_after(4, learner=0)
    ticket = ledger.try_acquire(0)
    assert ticket is not None
    assert ticket.sequence == 12
    assert ledger.version == 4
