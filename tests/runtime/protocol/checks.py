"""What must hold after every step, kept in a book of its own that shares no code with what it checks.

credits    every lease is the ticket of one group of a living worker; accepted + leased never exceeds the bound
age        no decision is older than max_staleness versions when it is learned from, and no other one is masked
once       a piece of experience is learned from at most once
order      a batch is the tickets of its number, or with order=arrival the oldest fragments as soon as enough are there
old        an answer of an old incarnation, or a second one, changes nothing
recovery   a session that continues from a checkpoint has its counters; at max_staleness=0 the same batches follow
progress   once faults have ended, every batch comes in bounded time: no deadlock
learner    nothing that was drawn for or by a learner that was lost is learned from by the next one
parts      at most one incarnation of a part is wanted, a crash loop ends the run, and nothing else does
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embodied.runtime.ledger import Ticket
from embodied.runtime.ray.supervision import Ask, Decision, Kill, Start
from tests.runtime.protocol.parts import PATIENCE, Publication, Sampled, Violation, Weight
from tests.runtime.protocol.world import Plan

if TYPE_CHECKING:
    from tests.runtime.protocol.session import Session

PROGRESS_S = 200.0
"""Longest time without faults in which no batch may be consumed."""

POLICY = Weight()
"""One for all schedules, which follow each other: to create a module takes as long as ten steps."""


def must(holds: bool, *what: object) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(" ".join(map(str, what)))


class Checks:
    """The book of one run, over all its sessions."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.policy = POLICY
        self.history: list[list[Sampled]] = []  # batches that the weights have learned from
        self.leases: dict[int, Ticket] = {}
        self.there: set[int] = set()  # numbers of the fragments that were accepted and not taken
        self.wanted: dict[str, int] = {}
        self.failures: Counter[str] = Counter()
        self.killed_s: defaultdict[str, list[float]] = defaultdict(list)
        self.accepted = self.taken_batches = self.version = 0
        self.store_version = -1
        self.since_s = 0.0  # of the last progress or fault
        self.replaced = False  # whether a worker was, so that its groups have other streams

    # ---------------------------------------------------------------------------------------------------- session
    def begin(self, session: Session, checkpoint: dict[str, Any] | None) -> None:
        """A session begins. What was learned after its checkpoint is gone."""
        self.session, self.wanted = session, {}
        self.failures.clear()
        self.killed_s.clear()
        if checkpoint is not None:
            must(
                session.prior_restarts == checkpoint["prior_restarts"],
                "incarnations after the start:",
                session.prior_restarts,
            )
        self._continue(checkpoint)

    def rewound(self, checkpoint: dict[str, Any] | None) -> None:
        """Another learner has taken the place of one that was lost, in the same session."""
        self.replaced = True
        self._continue(checkpoint)

    def _continue(self, checkpoint: dict[str, Any] | None) -> None:
        counters = (0, 0) if checkpoint is None else tuple(checkpoint["counters"])
        self.history = self.history[: counters[0]]
        self.leases, self.there = {}, set()
        self.version = self.taken_batches = counters[0]
        self.accepted = counters[0] * self.plan.batch_fragments
        self.store_version = -1
        session = self.session
        learner = session.learner
        must((learner.iteration, learner.env_steps) == counters, "counters of the learner after the start:",
             learner.iteration, learner.env_steps, "expected", counters)  # fmt: skip
        must(session.algorithm.steps == counters[0], "updates of the algorithm after the start")
        must(int(session.algorithm.policy.updates) == counters[0], "weights after the start")
        self.after_step()

    def emptied(self) -> None:
        """The channel dropped its fragments, because the learner was lost."""
        self.there.clear()

    def published(self, publication: Publication) -> None:
        """The learner published weights."""
        version, iteration = publication.weights.version, self.session.learner.iteration
        must(version == iteration, "published", version, "after", iteration, "updates")

    def seen(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with this book's own counters, for ``begin``."""
        batches = self.history[: state["ledger"]["version"]]
        steps = self._steps(batches)
        now = [self.wanted[name] for name in self.session.workers]
        now = [incarnation if incarnation >= 0 else -1 - incarnation for incarnation in now]  # or the next one
        prior_restarts = [
            first + incarnation for first, incarnation in zip(self.session.prior_restarts, now, strict=True)
        ]
        return {**state, "counters": (len(batches), steps), "prior_restarts": prior_restarts}

    def after_step(self) -> None:
        """Check what must always hold."""
        session, size, leased = self.session, self.plan.batch_fragments, len(self.leases)
        ledger = session.ledger
        bound = (self.version + 1 + self.plan.max_staleness) * size
        in_channel = len(self.there)
        newest = session.store.version
        if ledger.in_flight != leased:
            raise Violation(f"{ledger.in_flight} leases, expected {self.leases}")
        if ledger.accepted != self.accepted:
            raise Violation(f"{ledger.accepted} accepted, expected {self.accepted}")
        if ledger.version != self.version:
            raise Violation(f"{ledger.version} consumed, expected {self.version}")
        if self.accepted + leased > bound:
            raise Violation(f"{self.accepted} accepted and {leased} leased are more than {bound}")
        if len(session.channel) != in_channel:
            raise Violation(f"{len(session.channel)} in the channel, expected {in_channel}")
        if newest < self.store_version:
            raise Violation(f"the newest weights went back from {self.store_version} to {newest}")
        if self.version > newest >= 0:
            raise Violation(f"{self.version} batches are consumed, the newest weights are {newest}")
        self.store_version = newest

    def progresses(self, now_s: float) -> None:
        """Check that there is no deadlock."""
        if now_s - self.since_s > PROGRESS_S:
            raise Violation(f"deadlock: no batch since {self.since_s:.1f} s")

    def ends(self, now_s: float) -> None:
        """A session ends or a fault happens: deadlines begin anew."""
        self.since_s = max(self.since_s, now_s)

    # ---------------------------------------------------------------------------------------------------- parts
    def decided(self, decision: Decision) -> None:
        """Supervision has decided something."""
        part = decision.part
        if isinstance(decision, Start):
            must(part not in self.wanted or self.wanted[part] == -1 - decision.incarnation, "started twice:", decision)
            self.wanted[part] = decision.incarnation
        elif isinstance(decision, Ask):
            must(self.wanted.get(part) == decision.incarnation, "asked without being there:", decision)
        elif isinstance(decision, Kill):
            must(self.wanted.get(part) == decision.incarnation, "killed without being there:", decision)
            self.wanted[part] = -2 - decision.incarnation  # nothing, until the next one starts
            self.failures[part] += 1
            self.killed_s[part].append(self.session.world.now_s)
            self.replaced |= part in self.session.workers
            must(self.failures[part] <= PATIENCE.max_failures, "goes on in a crash loop:", decision)
            must(self._recent(part) <= PATIENCE.max_in_window, "fails again and again:", decision)
        else:
            again = self._recent(part) >= PATIENCE.max_in_window
            must(again or self.failures[part] >= PATIENCE.max_failures, "ended for no reason:", decision)

    def _recent(self, part: str) -> int:
        since_s = self.session.world.now_s - PATIENCE.window_s
        return sum(killed_s > since_s for killed_s in self.killed_s[part])

    def heard(self, part: str, incarnation: int, decisions: list[Decision]) -> None:
        """Supervision has heard of a death, perhaps late or a second time."""
        present = self.wanted.get(part) == incarnation
        must(present or not decisions, "the death of incarnation", incarnation, "led to", decisions)

    def worked(self, part: str, incarnation: int) -> None:
        """A part did useful work."""
        if self.wanted.get(part) == incarnation:
            self.failures[part] = 0

    # ---------------------------------------------------------------------------------------------------- tickets
    def acquired(self, worker: int, incarnation: int, group: int, ticket: Ticket | None) -> None:
        """The ledger was asked for a ticket."""
        if ticket is not None:
            asked = worker, incarnation, group
            must((ticket.worker, ticket.incarnation, ticket.group) == asked, "not for", asked, ticket)
            must(ticket.sequence not in self.leases, "given out twice:", ticket)
            last = (self.version + 1 + self.plan.max_staleness) * self.plan.batch_fragments - 1
            first = self.version * self.plan.batch_fragments if self.plan.order == "ticket" else 0
            must(first <= ticket.sequence <= last, "out of its time:", ticket)
            self.leases[ticket.sequence] = ticket

    def delivered(self, ticket: Ticket, accepted: bool) -> None:
        """A fragment arrived, and the ledger accepted it or did not."""
        expected = self.leases.get(ticket.sequence) == ticket
        must(accepted == expected, "accepted" if accepted else "refused", ticket, "whose lease is",
             self.leases.get(ticket.sequence))  # fmt: skip
        if accepted:
            del self.leases[ticket.sequence]
            self.accepted += 1
            self.there.add(ticket.sequence)

    def released(self, worker: int, incarnation: int, count: int) -> None:
        """The tickets of a dead worker were given back."""
        held = [t.sequence for t in self.leases.values() if (t.worker, t.incarnation) == (worker, incarnation)]
        must(count == len(held), "released", count, "leases of worker", worker, "expected", held)
        for sequence in held:
            del self.leases[sequence]

    # ---------------------------------------------------------------------------------------------------- batches
    def batch_is_due(self, version: int) -> bool:
        """Return whether enough fragments have been accepted for a batch."""
        due = self.accepted >= (version + 1) * self.plan.batch_fragments
        if self.plan.order == "arrival":
            must(self.session.channel.has(version) == due, "batch", version, "is held up or short:", self.there)
        return due

    def taken(self, version: int, batch: list[Sampled]) -> None:
        """The channel gave a batch to the learner."""
        size, plan = self.plan.batch_fragments, self.plan
        numbers = sorted(sampled.sequence for sampled in batch)
        expected = list(range(version * size, (version + 1) * size))
        if plan.order == "arrival":
            expected = sorted(self.there)[:size]
        must(numbers == expected, "batch", version, "has", numbers, "expected", expected)
        self.there.difference_update(numbers)
        order = [(sampled.worker, sampled.group, sampled.sequence) for sampled in batch]
        must(order == sorted(order), "order of batch", version, order)
        present = self.session.supervision.incarnation("learner")
        for sampled in batch:
            must(set(sampled.learners) == {present}, "not by learner", present, sampled)
            oldest, newest = min(sampled.versions), max(sampled.versions)
            fresh = version - oldest <= plan.max_staleness
            must(fresh or plan.order == "arrival", "too old in batch", version, sampled)
            must(newest <= version, "from the future in batch", version, sampled)
        self.taken_batches += 1
        if plan.max_staleness == 0:
            groups = [pair[:2] for pair in order]
            must(len(set(groups)) == size, "batch", version, "has not one fragment of each group:", groups)
            if not self.replaced:
                must(all(s.stream == (0, version) for s in batch), "not the batch of a run without faults:", batch)

    def learned(self, batch: list[Sampled]) -> None:
        """The learner has learned from a batch and published; it counts as consumed next."""
        learner = self.session.learner
        self.history.append(batch)
        must(learner.iteration == len(self.history), "iteration", learner.iteration, "expected", len(self.history))
        oldest = learner.iteration - 1 - self.plan.max_staleness
        for sampled, seen in zip(batch, self.session.algorithm.batch, strict=True):
            found, expected = seen.num_steps_TN.flatten().tolist(), sampled.counting(oldest)
            must(found == expected, "learned from", found, "control steps of", sampled, "expected", expected)
        steps = self._steps(self.history)
        must(learner.env_steps == steps, "env_steps", learner.env_steps, "expected", steps)
        ids = [(sampled.worker, sampled.group, *sampled.stream) for one in self.history for sampled in one]
        must(len(set(ids)) == len(ids), "experience was learned from twice:", ids)
        self.ends(self.session.world.now_s)

    def consumed(self, version: int) -> None:
        """The ledger was told that the batch is consumed."""
        self.version += 1
        must(version == self.version, "consumed", version, "expected", self.version)

    def _steps(self, batches: Sequence[Sequence[Sampled]]) -> int:
        """Return the control steps of the first batches that were young enough to count."""
        ages = ((batch, version - self.plan.max_staleness) for version, batch in enumerate(batches))
        return sum(sum(sampled.counting(oldest)) for batch, oldest in ages for sampled in batch)
