"""Controller of a run on Ray: one thread that hands out tickets, supervises the parts and passes references on.

    answers of parts ─┐
    batches consumed ─┼─► queue of events ──► thread: Supervision decides, Ledger admits ──► calls of parts
    time             ─┘
    fragment by reference ──► Ledger.deliver ──► Channel ──► main thread, which calls the learner

Only this thread touches the states of parts and groups; it waits for no call of a part, whose answer is an event. A
fragment whose actor server was lost keeps its ticket and goes on with another server; one whose worker was lost gives
its ticket back. If the learner is lost, all tickets are void.
"""

import logging
import math
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from embodied.core.clock import running_s
from embodied.core.errors import UserError, one_line
from embodied.runtime.channel import Closed, Snapshot
from embodied.runtime.ledger import Ticket
from embodied.runtime.loop import Runtime
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.ray.creation import Creator, roles
from embodied.runtime.ray.hosts import Built, Delivery, Pulse, ServerLost
from embodied.runtime.ray.supervision import Ask, Decision, End, Kill, Start, Supervision, Unresponsive
from embodied.runtime.ray.wire import Publication, WeightsLost, is_fault, own_cause
from embodied.runtime.watch import Totals, Track

log = logging.getLogger(__name__)

LEARNER = "learner"


@dataclass(slots=True)
class Slot:
    """An env group."""

    worker: int
    group: int  # index in its worker
    ticket: Ticket | None = None  # of its present fragment; None between two fragments
    calling: bool = False  # whether its worker has a call for it


@dataclass(slots=True)
class Part:
    """The present processes of a part."""

    incarnation: int  # how often the part was replaced before
    processes: list[Any]  # Ray's handles of its actors: several of a learner that shares its updates, otherwise one
    built: Built | None = None  # what it said when it was ready; None before
    totals: Totals = field(default_factory=dict)  # of its track, as of the last fragment

    @property
    def handle(self) -> Any:
        return self.processes[0]  # the one that answers

    def kill(self) -> None:
        for process in self.processes:
            ray.kill(process)


class Controller:
    """States of a runtime's parts and groups. ``run`` is the thread; ``post`` and properties are for any thread."""

    def __init__(self, runtime: Runtime, config: RayConfig, creator: Creator) -> None:
        self.config, self.creator, self.trace = config, creator, runtime.trace
        self.ledger, self.channel = runtime.ledger, runtime.channel
        self.roles = roles(config, len({worker for worker, _ in runtime.groups}))
        self.workers = [name for name, (kind, _) in self.roles.items() if kind == "env_worker"]
        self.servers = [name for name, (kind, _) in self.roles.items() if kind == "actor_server"]
        self.needed_workers = config.needed_workers(len(self.workers))
        self.slots = [Slot(*key) for key in runtime.groups]
        self.parts: dict[str, Part] = {}
        self.publication: Publication | None = None  # of the main thread: the newest weights
        self.snapshot = Snapshot()  # of the main thread; groups that it lacks save themselves
        self.elastic = config.min_env_workers is not None
        operation_s = {LEARNER: config.update_timeout_s}
        start_s = dict.fromkeys(self.workers, math.inf) if self.elastic else {}
        self.supervision = Supervision(self.roles, config.patience, running_s(), operation_s, start_s)
        self.track = Track("controller", "wait_events")
        self.ready = threading.Event()  # set once all parts that are needed have been up
        self.prior_restarts: Counter[str] = Counter()  # how often a worker was replaced in earlier sessions of the run
        self._enough_s = running_s()  # when enough workers were up last
        self._dead_totals: defaultdict[str, Counter[str]] = defaultdict(Counter)  # of processes that are gone
        self.doing: dict[str, tuple[str, float]] = {}  # what each part does, and when that was first seen
        self._done: dict[str, int] = {}  # operations of each part at its last sign of life
        self._best_iteration = 0  # iterations of the learner that made most of them
        self._idle = False
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = False

    # ---------------------------------------------------------------------------------------------------- any thread
    def totals(self, name: str) -> Totals:
        """Return the totals of all processes of a worker or server, up to its last fragment."""
        part, totals = self.parts.get(name), Counter(self._dead_totals[name])
        totals.update({} if part is None else part.totals)
        return totals

    @property
    def num_up(self) -> int:
        return sum(map(self.supervision.is_up, self.workers))

    def post(self, event: Callable[[], None] = lambda: None) -> None:
        """Let the thread call ``event``, and then look what can be given out."""
        self._events.put(event)

    def stop(self) -> None:
        self._stopped = True
        self.post()

    def end_parts(self, timeout_s: float) -> None:
        """Let the workers close their envs, and end all processes; the thread has ended."""
        built = [part for name, part in self.parts.items() if name in self.workers and part.built]
        if built:
            ray.wait([part.handle.close.remote() for part in built], num_returns=len(built), timeout=timeout_s)
        for part in self.parts.values():
            part.kill()
        self.parts.clear()

    # ---------------------------------------------------------------------------------------------------- the thread
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

    def learned(self, incarnation: int, iteration: int) -> None:
        """Count an update as useful work of the learner, unless it repeats one."""
        if iteration > self._best_iteration:
            self._best_iteration = iteration
            self.supervision.worked(LEARNER, incarnation)

    def renew(self, name: str) -> None:
        """Replace a worker that a checkpoint has no state for, so that it has new episodes."""
        cause = LookupError(f"{name} was not there at the checkpoint or is not there yet, so it has new episodes")
        self._carry_out(self.supervision.failed(name, self.supervision.incarnation(name), running_s(), cause))

    def _check_workers(self, now_s: float) -> None:
        """Raise Unresponsive if fewer than ``min_env_workers`` have been up for ``start_timeout_s``."""
        if not self.elastic or self.num_up >= self.needed_workers:
            self._enough_s = now_s
        elif now_s - self._enough_s > self.config.start_timeout_s:
            few = f"for {self.config.start_timeout_s:g} s only {self.num_up} env workers have been up"
            raise Unresponsive(f"{few}; runtime.min_env_workers={self.needed_workers}")

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            name = decision.part
            if isinstance(decision, Start):
                self._say(name, "starts")
                self._idle &= name != LEARNER  # a new one takes the others to be busy
                processes = self.creator(*self.roles[name], self.prior_restarts[name] + decision.incarnation)
                part = self.parts[name] = Part(decision.incarnation, processes)
                self._call(part.handle.build.remote(processes[1:]), name, decision.incarnation, self._on_built)
            elif isinstance(decision, Ask):
                tracing = self.trace is not None and self.trace.recording
                pulse = self.parts[name].handle.pulse.remote(tracing)
                self._call(pulse, name, decision.incarnation, self._on_pulse)
            elif isinstance(decision, Kill):
                cause = f"{type(decision.cause).__name__}: {one_line(decision.cause)}"
                log.warning("%s is replaced: %s", name, cause[:500])
                self._remove(name, decision.incarnation)
            elif isinstance(decision, End):
                decision.cause.add_note(f"(raised in the {name})")
                raise decision.cause

    def _remove(self, name: str, incarnation: int) -> None:
        """End the processes of a part. Give back a worker's tickets; wake who waits for a batch for the learner."""
        part = self.parts.pop(name)
        assert part.incarnation == incarnation
        self._say(name, "is replaced")
        part.kill()
        self._dead_totals[name].update(part.totals)
        if name in self.workers:
            worker = self.workers.index(name)
            self.ledger.release_worker(worker, incarnation)
            for slot in self.slots:
                if slot.worker == worker:
                    slot.ticket, slot.calling = None, False
        elif name == LEARNER:
            self.channel.empty(incarnation + 1)

    def _assign(self) -> None:
        """Give every resting group of a worker that is up something to do, if there is something."""
        for slot in self.slots:
            name, snapshot = self.workers[slot.worker], self.snapshot
            unsaved = snapshot.lacks((slot.worker, slot.group))
            if not self.supervision.is_up(name):
                if self.elastic and unsaved:
                    snapshot.put((slot.worker, slot.group), None)
                continue
            if slot.calling:
                continue
            part = self.parts[name]
            if slot.ticket is None and unsaved:
                slot.calling = True
                saved = partial(self._on_saved, slot, snapshot)
                self._call(part.handle.state_dict.remote(slot.group), name, part.incarnation, saved)
                continue
            newest, server = self.publication, self._server_of(slot.worker)
            if newest is None or server is None or not self.supervision.is_up(LEARNER, newest.learner):
                continue
            if slot.ticket is None:
                slot.ticket = self.ledger.try_acquire(slot.worker, part.incarnation, slot.group)
            if slot.ticket is not None:
                slot.calling = True
                host, ticket, timeout_s = self.parts[server], slot.ticket, 2 * self.config.operation_timeout_s
                sample = part.handle.sample.options(num_returns=2)
                delivery, fragment = sample.remote(ticket, host.handle, newest, timeout_s)
                sampled = partial(self._on_sampled, slot, ticket, fragment, server, host.incarnation)
                self._call(delivery, name, ticket.incarnation, sampled)
        idle = not any(slot.calling for slot in self.slots)
        if idle != self._idle and self.supervision.is_up(LEARNER):
            self._idle = idle
            self.parts[LEARNER].handle.set_others_idle.remote(idle)

    def _server_of(self, worker: int) -> str | None:
        """Return the actor server of a worker: one that is up, on its own node if there is one; None if none is."""
        nodes = {name: part.built.node for name, part in self.parts.items() if part.built is not None}
        up = [name for name in self.servers if self.supervision.is_up(name)]
        choice = [name for name in up if nodes[name] == nodes[self.workers[worker]]] or up
        return choice[worker % len(choice)] if choice else None

    # ---------------------------------------------------------------------------------------------------- answers
    def _call(self, reference: Any, name: str, incarnation: int, then: Callable[..., None]) -> None:
        """Have ``then(name, incarnation, answer)`` called when there is one; ``fail`` if the call fails."""

        def handle(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                then(name, incarnation, future.result())
            elif isinstance(error, RayTaskError) and isinstance(error.cause, ServerLost):
                then(name, incarnation, error.cause)
            else:
                self.fail(name, incarnation, error)

        reference.future().add_done_callback(lambda future: self.post(partial(handle, future)))

    def fail(self, name: str, incarnation: int, error: BaseException) -> None:
        if self.supervision.incarnation(name) != incarnation:
            return
        if not isinstance(error, RayError):
            raise error
        cause = own_cause(error)
        never_built = incarnation == 0 and self.parts[name].built is None and not is_fault(error)
        curable = not isinstance(cause, UserError) and not never_built
        self._carry_out(self.supervision.failed(name, incarnation, running_s(), cause, curable))

    def _on_built(self, name: str, incarnation: int, built: Built) -> None:
        if self.supervision.incarnation(name) != incarnation:
            return
        self.parts[name].built = built
        self.supervision.started(name, incarnation, running_s())
        self._say(name, "is up")
        if all(map(self.supervision.is_up, [LEARNER, *self.servers])) and self.num_up >= self.needed_workers:
            self.ready.set()

    def _say(self, name: str, doing: str) -> None:
        self.doing[name] = (doing, running_s())

    def _on_pulse(self, name: str, incarnation: int, pulse: Pulse) -> None:
        if self.trace is not None:
            self.trace.add(name, pulse.spans)
        if (self.doing[name][0], self._done.get(name)) != (pulse.doing, pulse.done):
            self._done[name] = pulse.done
            self._say(name, pulse.doing)
        self._carry_out(self.supervision.answered(name, incarnation, running_s(), pulse.busy_s))

    def _on_saved(self, slot: Slot, snapshot: Snapshot, name: str, incarnation: int, state: Any) -> None:
        if self.supervision.is_up(name, incarnation):
            slot.calling = False
            snapshot.put((slot.worker, slot.group), state)

    def _on_sampled(
        self, slot: Slot, ticket: Ticket, fragment: Any, server: str, served_by: int, name: str, incarnation: int,
        answer: Delivery | ServerLost,
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
            self.channel.put(replace(answer, fragment=fragment))
        except Closed:
            return
        self.parts[name].totals = answer.totals
        self.supervision.worked(name, incarnation)
        if self.supervision.is_up(server, served_by):
            latest = (answer.server_totals, self.parts[server].totals)
            self.parts[server].totals = max(latest, key=lambda totals: totals.get("infer_s", 0.0))
            self.supervision.worked(server, served_by)
