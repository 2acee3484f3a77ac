"""Controller of a run on Ray: one thread that hands out tickets, supervises the parts and passes references on.

    answers of parts ─┐
    batches consumed ─┼─► queue of events ──► thread: Supervision decides, Ledger admits ──► calls of parts
    time             ─┘
    fragment by reference ──► Ledger.deliver ──► Channel ──► main thread, which calls the learner

Only this thread touches the states of parts and groups. No call of a part is waited for: its answer is an event. A
fragment whose actor server was lost keeps its ticket and goes on with another server; one whose worker was lost gives
its ticket back. If the learner is lost, all tickets are void: what was begun with them is finished and refused.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from embodied.core.clock import running_s
from embodied.core.errors import UserError, one_line
from embodied.runtime.channel import Channel, Closed
from embodied.runtime.ledger import Ledger, Ticket
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.ray.creation import Creator, Role, roles
from embodied.runtime.ray.group import kill
from embodied.runtime.ray.messages import Built, Delivery, Pulse, ServerLost, Summary
from embodied.runtime.ray.state import Part, Slot
from embodied.runtime.ray.supervision import Ask, Decision, End, Kill, Start, Supervision, Unresponsive
from embodied.runtime.ray.weights import Publication, WeightsLost
from embodied.runtime.ray.wire import own_cause
from embodied.runtime.snapshot import Snapshot
from embodied.runtime.thread_group import Board
from embodied.runtime.watch.trace import Trace
from embodied.runtime.watch.track import Track

log = logging.getLogger(__name__)

LEARNER = Role("learner").name


class Unsaved(Exception):
    """A worker has no state to continue from."""


class Controller:
    """States of the parts and groups. ``run`` is the thread; ``post`` and the properties are for any thread.

    groups: worker and group of each env group. trace: takes the spans of the parts.
    """

    def __init__(
        self,
        config: RayConfig,
        groups: Sequence[tuple[int, int]],
        ledger: Ledger,
        channel: Channel[Delivery],
        board: Board,
        creator: Creator,
        trace: Trace | None,
    ) -> None:
        self.config, self.ledger, self.channel, self.board, self.creator = config, ledger, channel, board, creator
        self.roles = {role.name: role for role in roles(config, len({worker for worker, _ in groups}))}
        self.workers = [name for name, role in self.roles.items() if role.kind == "env_worker"]
        self.servers = [name for name, role in self.roles.items() if role.kind == "actor_server"]
        self.slots = [Slot(*key) for key in groups]
        self.parts: dict[str, Part] = {}
        self.publication: Publication | None = None  # of the main thread; see ``_present``
        self.snapshot = Snapshot()  # of the main thread; groups that it lacks save themselves
        self.elastic = config.min_env_workers is not None
        self.supervision = Supervision(
            dict.fromkeys(self.roles, 0),
            config.patience,
            running_s(),
            operation_s={LEARNER: config.update_timeout_s},
            start_s=dict.fromkeys(self.workers, math.inf) if self.elastic else None,
        )
        self._enough_s = running_s()  # when enough workers were up last
        self.track = Track("controller", "wait_events")
        self.trace = trace
        self.ready = threading.Event()  # set once all parts that are needed have been up
        self.prior_restarts: Counter[str] = Counter()  # how often a worker was replaced in earlier sessions of the run
        self._dead_totals: defaultdict[str, Counter[str]] = defaultdict(Counter)  # of processes that are gone
        self._seen: dict[str, tuple[str, int]] = {}  # what each part did at its last sign of life
        self._best_iteration = 0  # iterations of the learner that made most of them
        self._idle = False
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = False

    def totals(self, name: str) -> Counter[str]:
        """Return what the tracks of all processes of a worker or server have counted, up to its last fragment."""
        part, totals = self.parts.get(name), Counter(self._dead_totals[name])
        totals.update({} if part is None else part.totals)
        return totals

    def seed_incarnation(self, name: str) -> int:
        """Return how often a worker was replaced, in earlier sessions of the run too."""
        return self.prior_restarts[name] + self.supervision.incarnation(name)

    def post(self, event: Callable[[], None] = lambda: None) -> None:
        """Let the thread call ``event``, and then look what can be given out."""
        self._events.put(event)

    def learned(self, incarnation: int, iteration: int) -> None:
        """Count an update as useful work of the learner, unless it repeats one; in the controller's thread."""
        if iteration > self._best_iteration:
            self._best_iteration = iteration
            self.supervision.worked(LEARNER, incarnation)

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self.post()

    def end_parts(self, timeout_s: float) -> None:
        """Let the workers close their envs, and end all processes; the thread has ended."""
        built = [part for name, part in self.parts.items() if name in self.workers and part.built]
        closing = [part.handle.close.remote() for part in built]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=timeout_s)
        for part in self.parts.values():
            kill(part.handle)
        self.parts.clear()

    def run(self) -> None:
        """Handle events until ``stop``. Raise what ends the run."""
        while not self._stopped:
            self.track.enter("decide")
            self._carry_out(self.supervision.tick(running_s()))
            self._check_workers(running_s())
            self._assign()
            self.track.enter("wait_events")
            try:
                event = self._events.get(timeout=max(0.0, self.supervision.due_s - running_s()))
            except queue.Empty:
                continue
            self.track.enter("decide")
            event()

    @property
    def num_up(self) -> int:
        """Number of env workers that are up."""
        return sum(map(self.supervision.is_up, self.workers))

    def renew(self, name: str) -> None:
        """Replace a worker that a checkpoint has no state for, so that it has new episodes; in this thread."""
        cause = Unsaved(f"{name} was not there at the checkpoint or is not there yet, so it has new episodes")
        self._carry_out(self.supervision.failed(name, self.supervision.incarnation(name), running_s(), cause))

    def _check_workers(self, now_s: float) -> None:
        """Raise Unresponsive if too few env workers have been up for ``start_timeout_s``.

        Without ``min_env_workers`` all are needed, and each has this limit by itself.
        """
        if not self.elastic:
            return
        needed = self.config.needed_workers(len(self.workers))
        if self.num_up >= needed:
            self._enough_s = now_s
        elif now_s - self._enough_s > self.config.start_timeout_s:
            raise Unresponsive(
                f"for {self.config.start_timeout_s:g} s only {self.num_up} env workers have been up; "
                f"runtime.min_env_workers={needed}"
            )

    # ---------------------------------------------------------------------------------------------------- decisions
    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Start):
                self._start(decision)
            elif isinstance(decision, Ask):
                handle = self.parts[decision.part].handle
                tracing = self.trace is not None and self.trace.recording
                self._call(handle.pulse.remote(tracing), decision.part, decision.incarnation, self._on_pulse)
            elif isinstance(decision, Kill):
                cause = f"{type(decision.cause).__name__}: {one_line(decision.cause)}"
                log.warning("%s is replaced: %s", decision.part, cause[:500])
                self._remove(decision.part, decision.incarnation)
            elif isinstance(decision, End):
                decision.cause.add_note(f"(raised in the {decision.part})")
                raise decision.cause

    def _start(self, start: Start) -> None:
        self.board.set(start.part, "starts")
        self._idle &= start.part != LEARNER  # a new one takes the others to be busy
        role, incarnation = self.roles[start.part], self.prior_restarts[start.part] + start.incarnation
        part = self.parts[start.part] = Part(start.incarnation, self.creator(role, incarnation))
        self._call(part.handle.build.remote(), start.part, start.incarnation, self._on_built)

    def _remove(self, name: str, incarnation: int) -> None:
        """End the process of a part. Give back the tickets of a worker; wake who waits for a batch for the learner."""
        part = self.parts.pop(name)
        assert part.incarnation == incarnation
        self.board.set(name, "is replaced")
        kill(part.handle)
        self._dead_totals[name].update(part.totals)
        if name in self.workers:
            worker = self.workers.index(name)
            self.ledger.release_worker(worker, incarnation)
            for slot in self.slots:
                if slot.worker == worker:
                    slot.ticket, slot.calling = None, False
        elif name == LEARNER:
            self.channel.empty(incarnation + 1)

    # ---------------------------------------------------------------------------------------------------- tickets
    def _assign(self) -> None:
        """Give every resting group of a worker that is up something to do, if there is something."""
        for slot in self.slots:
            name, snapshot = self.workers[slot.worker], self.snapshot
            unsaved = snapshot.lacks(slot.key)
            if not self.supervision.is_up(name):
                if self.elastic and unsaved:
                    snapshot.put(slot.key, None)
                continue
            if slot.calling:
                continue
            part = self.parts[name]
            if slot.ticket is None and unsaved:
                self._save(slot, part, snapshot)
                continue
            publication, server = self._present(), self._server_of(slot.worker)
            if publication is None or server is None:
                continue
            if slot.ticket is None:
                slot.ticket = self.ledger.try_acquire(slot.worker, part.incarnation, slot.group)
            if slot.ticket is not None:
                self._sample(slot, slot.ticket, part, server, publication)
        self._set_others_idle(not any(slot.calling for slot in self.slots))

    def _sample(self, slot: Slot, ticket: Ticket, part: Part, server: str, publication: Publication) -> None:
        slot.calling = True
        host, timeout_s = self.parts[server].handle, 2 * self.config.operation_timeout_s
        summary, fragment = part.handle.sample.options(num_returns=2).remote(ticket, host, publication, timeout_s)
        sampled = partial(self._on_sampled, slot, ticket, fragment, server, self.parts[server].incarnation)
        self._call(summary, self.workers[slot.worker], ticket.incarnation, sampled)

    def _present(self) -> Publication | None:
        """Return the newest weights, if the learner that published them is still up."""
        newest = self.publication
        return newest if newest is not None and self.supervision.is_up(LEARNER, newest.learner) else None

    def _server_of(self, worker: int) -> str | None:
        """Return the actor server of a worker: one that is up, on its own node if there is one; None if none is."""
        up = [name for name in self.servers if self.supervision.is_up(name)]
        near = [name for name in up if self.parts[name].node == self.parts[self.workers[worker]].node]
        choice = near or up
        return choice[worker % len(choice)] if choice else None

    def _set_others_idle(self, idle: bool) -> None:
        """Tell the learner when all workers begin or cease to wait for it."""
        if idle != self._idle and self.supervision.is_up(LEARNER):
            self._idle = idle
            self.parts[LEARNER].handle.set_others_idle.remote(idle)

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def _save(self, slot: Slot, part: Part, snapshot: Snapshot) -> None:
        slot.calling = True
        saved = partial(self._on_saved, slot, snapshot)
        self._call(part.handle.state_dict.remote(slot.group), self.workers[slot.worker], part.incarnation, saved)

    def _on_saved(self, slot: Slot, snapshot: Snapshot, name: str, incarnation: int, state: Any) -> None:
        if self.supervision.is_up(name, incarnation):
            slot.calling = False
            snapshot.put(slot.key, state)

    # ---------------------------------------------------------------------------------------------------- answers
    def _call(self, reference: Any, name: str, incarnation: int, then: Callable[..., None]) -> None:
        """Have ``then(name, incarnation, answer)`` called when there is one; ``fail`` if the call fails."""

        def answer(future: Future[Any]) -> None:
            self.post(partial(self._on_answer, name, incarnation, then, future))

        reference.future().add_done_callback(answer)

    def _on_answer(self, name: str, incarnation: int, then: Callable[..., None], future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            then(name, incarnation, future.result())
        elif isinstance(error, RayTaskError) and isinstance(error.cause, ServerLost):
            then(name, incarnation, error.cause)
        else:
            self.fail(name, incarnation, error)

    def fail(self, name: str, incarnation: int, error: BaseException) -> None:
        """A part died, or raised something; in the controller's thread."""
        if self.supervision.incarnation(name) != incarnation:
            return
        if not isinstance(error, RayError):
            raise error
        cause = own_cause(error)
        never_built = incarnation == 0 and isinstance(error, RayTaskError) and self.parts[name].built is None
        curable = not isinstance(cause, UserError) and not never_built
        self._carry_out(self.supervision.failed(name, incarnation, running_s(), cause, curable))

    def _on_built(self, name: str, incarnation: int, built: Built) -> None:
        if self.supervision.incarnation(name) != incarnation:
            return
        self.parts[name].built = built
        self._carry_out(self.supervision.started(name, incarnation, running_s()))
        self.board.set(name, "is up")
        others = self.roles.keys() - self.workers
        needed = self.config.needed_workers(len(self.workers))
        if all(map(self.supervision.is_up, others)) and self.num_up >= needed:
            self.ready.set()

    def _on_pulse(self, name: str, incarnation: int, pulse: Pulse) -> None:
        if self.trace is not None:
            self.trace.add(name, pulse.spans)
        if self._seen.get(name) != (pulse.doing, pulse.done):
            self._seen[name] = (pulse.doing, pulse.done)
            self.board.set(name, pulse.doing)
        self._carry_out(self.supervision.answered(name, incarnation, running_s(), pulse.busy_s))

    def _on_sampled(
        self, slot: Slot, ticket: Ticket, fragment: Any, server: str, served_by: int, name: str, incarnation: int,
        answer: Summary | ServerLost,
    ) -> None:  # fmt: skip
        if slot.ticket == ticket:
            slot.calling = False
        if isinstance(answer, ServerLost):  # the group keeps its ticket and goes on with another server
            cause = answer.cause
            lost = (LEARNER, cause.learner) if isinstance(cause, WeightsLost) else (server, served_by)
            self._carry_out(self.supervision.failed(*lost, running_s(), cause, not isinstance(cause, UserError)))
            return
        if slot.ticket == ticket:
            slot.ticket = None
        if not self.ledger.deliver(ticket):
            log.warning("dropped a late fragment of %s, incarnation %d", name, incarnation)
            return
        try:
            self.channel.put(Delivery.of(answer, fragment))
        except Closed:
            return
        self.parts[name].totals = answer.totals
        self.supervision.worked(name, incarnation)
        if self.supervision.is_up(server, served_by):
            latest = (answer.server_totals, self.parts[server].totals)
            self.parts[server].totals = max(latest, key=lambda totals: totals.get("infer_s", 0.0))
            self.supervision.worked(server, served_by)
