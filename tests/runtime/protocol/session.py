"""One session of a run: the controller, from its start or from a checkpoint until something ends it.

It does with the real ledger, channel, weight store, learner and supervision what the controller of a runtime in
processes does with them. Answers are events; none is waited for. ``Checks`` sees every change. The loop is in
``loop.py``.
"""

from __future__ import annotations

from typing import Any, cast

from embodied.runtime.ledger import Ticket
from embodied.runtime.ray.supervision import Ask, Decision, End, Kill, Start
from tests.runtime.protocol.checks import Checks
from tests.runtime.protocol.loop import Loop
from tests.runtime.protocol.parts import PATIENCE, UPDATE_S, Components, Ended, Sampled, Sampling, Servers, Slot
from tests.runtime.protocol.world import FOREVER_S, Fault, Plan, Process, World


class Session(Loop):
    """checkpoint: what to continue from, or None."""

    def __init__(
        self, world: World, plan: Plan, components: Components, checks: Checks, checkpoint: dict[str, Any] | None
    ) -> None:
        self.world, self.plan, self.checks, self.components = world, plan, checks, components
        self.ledger = components.ledger(plan.batch_fragments, plan.max_staleness)
        self.channel = components.channel(plan.batch_fragments, plan.max_staleness, plan.order)
        self.workers = [f"env worker {index}" for index in range(plan.workers)]
        self.servers = [f"actor server {index}" for index in range(plan.servers)]
        self.names = [*self.workers, *self.servers, "learner"]
        self.supervision = components.supervision(
            dict.fromkeys(self.names, 0), PATIENCE, world.now_s, {"learner": UPDATE_S},
            dict.fromkeys(self.workers, FOREVER_S) if plan.needed < plan.workers else None,
        )  # fmt: skip
        self.slots = [Slot(name, w, g) for w, name in enumerate(self.workers) for g in range(plan.groups)]
        self.processes: dict[str, Process] = {}
        self.calls = Servers(world)
        self.sampling = Sampling(world, self.calls, plan.decisions, self._on_sampled, self._on_lost)
        self.prior_restarts = [0] * plan.workers
        self._restored: dict[tuple[int, int], tuple[int, int]] = {}
        self._due_s = self.supervision.due_s
        self._up_servers: list[str] = []
        self._up_workers: set[str] = set()
        self.begin(checkpoint, checks.policy)
        if checkpoint is not None:
            self._restored = dict(checkpoint["groups"])
            self.prior_restarts = list(checkpoint["incarnations"])
            self.ledger.continue_after(checkpoint["ledger"]["version"], 0)
        checks.begin(self, checkpoint)

    def run(self, until_s: float) -> int:
        """Handle messages and deadlines until a time, or the last batch; return their number."""
        world, ledger, checks, steps = self.world, self.ledger, self.checks, 0
        while ledger.version < self.plan.batches:
            next_s, due_s = world.next_s, self._due_s
            if min(next_s, due_s) > until_s:
                break
            if due_s <= next_s:
                world.now_s = max(world.now_s, due_s)
                self._carry_out(self.supervision.tick(world.now_s))
            else:
                world.deliver_next()
            checks.progresses(world.now_s)
            steps += 1
        return steps

    def look(self) -> None:
        """Something changed in the controller: do what is possible now, and check."""
        self._assign()
        self.advance()
        self.checks.after_step()

    def _look_at_parts(self) -> None:
        """Do so after a part has started or was given up."""
        is_up = self.supervision.is_up
        self._up_servers = [name for name in self.servers if is_up(name)]
        self._up_workers = {name for name in self.workers if is_up(name)}
        self.look()

    def suffer(self, fault: Fault) -> None:
        """Let a fault happen. Ended if it kills the controller."""
        self.world.note("FAULT", fault)
        if fault.part == len(self.names):
            raise Ended("the controller was killed")
        process = self.processes.get(self.names[fault.part])
        if process is None:
            return
        if fault.kind == "kill":
            self.dies(process)
        elif fault.kind == "kill_in_update":
            self.algorithm.killed = True
        else:
            process.stop(fault.kind, self.world.now_s, fault.for_s)

    def dies(self, process: Process) -> None:
        if process.alive:
            process.alive = False
            self.calls.died(process)
            self.world.answer(0.1, self._on_death, process.part, process.incarnation)

    # ---------------------------------------------------------------------------------------------------- parts
    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self.world.note(decision)
            self.checks.decided(decision)
            if isinstance(decision, Start):
                process = self.processes[decision.part] = Process(decision.part, decision.incarnation)
                self.world.send(process, 0.3, self._place)
            elif isinstance(decision, Ask):
                process = self.processes[decision.part]
                if process.alive:
                    self.world.after(self.world.takes_s(0.05), self._pulse, process)
            elif isinstance(decision, Kill):
                self._remove(decision)
            elif isinstance(decision, End):
                raise Ended(f"{decision.part}: {decision.cause}")
        self._due_s = self.supervision.due_s
        for decision in decisions:
            if not isinstance(decision, Ask):
                self._look_at_parts()
                break

    def _place(self, process: Process) -> None:
        """Begin where there is room, or once there is."""
        worker = self.workers.index(process.part) if process.part in self.workers else None
        joins_s = 0.0 if worker is None else self.plan.joins_s[worker]
        if joins_s > self.world.now_s:
            self.world.after(joins_s - self.world.now_s, self._place, process)
        elif process.alive:
            self._build(process)

    def _build(self, process: Process) -> None:
        if process.part in self.workers:
            worker = self.workers.index(process.part)
            for group in range(self.plan.groups):
                new = self.prior_restarts[worker] + process.incarnation, 0
                process.memory[group] = new if process.incarnation else self._restored.get((worker, group), new)
        self.world.answer(0.02, self._on_built, process.part, process.incarnation)

    def _pulse(self, process: Process) -> None:
        now_s = self.world.now_s
        if not process.alive:
            return
        if process.hung_until_s > now_s:
            if process.hung_until_s < FOREVER_S:
                self.world.after(process.hung_until_s - now_s, self._pulse, process)
            return
        busy_s = now_s - process.stuck_since_s if process.free_s > now_s else 0.0
        self.world.answer(0.02, self._on_pulse, process.part, process.incarnation, busy_s)

    def _remove(self, kill: Kill) -> None:
        process = self.processes.pop(kill.part)
        process.wanted = False
        if self.world.draw() >= self.plan.zombies:
            process.alive = False
        process.free_s = min(process.free_s, self.world.now_s + self.world.draw())  # it may wake now
        self.calls.died(process)  # for its callers it is gone either way
        if kill.part in self.workers:
            worker = self.workers.index(kill.part)
            released = self.ledger.release_worker(worker, kill.incarnation)
            self.checks.released(worker, kill.incarnation, released)
            for slot in self.slots:
                if slot.worker == worker:
                    slot.ticket, slot.calling = None, False
        elif kill.part == "learner":
            self.channel.empty(kill.incarnation + 1)
            self.checks.emptied()
            self.lose_learner()

    # ---------------------------------------------------------------------------------------------------- tickets
    def _assign(self) -> None:
        up, newest = self._up_servers, self.present()
        for slot in self.slots:
            if slot.calling or slot.name not in self._up_workers:
                continue
            process = self.processes[slot.name]
            if slot.ticket is None:
                if self.saving is not None and (slot.worker, slot.group) not in self.saving:
                    slot.calling = True
                    self.world.send(process, 0.02, self._save, slot, self.saving)
                    continue
                if newest is None or not up:
                    continue
                slot.ticket = self.ledger.try_acquire(slot.worker, process.incarnation, slot.group)
                self.checks.acquired(slot.worker, process.incarnation, slot.group, slot.ticket)
            if slot.ticket is not None and up and newest is not None:
                slot.calling = True
                server = self.processes[up[slot.worker % len(up)]]
                self.world.send(process, 0.02, self.sampling.begin, slot.ticket, server, newest)

    def _slot(self, ticket: Ticket) -> Slot:
        return self.slots[ticket.worker * self.plan.groups + ticket.group]

    def _save(self, process: Process, slot: Slot, saving: dict[Any, tuple[int, int]]) -> None:
        self.world.answer(0.02, self._on_saved, slot, process.incarnation, process.memory[slot.group], saving)

    # ---------------------------------------------------------------------------------------------------- answers
    def _on_built(self, part: str, incarnation: int) -> None:
        self.supervision.started(part, incarnation, self.world.now_s)
        self._look_at_parts()

    def _on_pulse(self, part: str, incarnation: int, busy_s: float) -> None:
        self._carry_out(self.supervision.answered(part, incarnation, self.world.now_s, busy_s))

    def _on_death(self, part: str, incarnation: int) -> None:
        error = RuntimeError("died")
        decisions = self.supervision.failed(part, incarnation, self.world.now_s, error)
        self.checks.heard(part, incarnation, decisions)
        self._carry_out(decisions)

    def _on_lost(self, ticket: Ticket, died: Process) -> None:
        slot = self._slot(ticket)
        if slot.ticket == ticket:
            slot.calling = False
        self._on_death(died.part, died.incarnation)
        self.look()

    def _on_sampled(self, ticket: Ticket, server: Process, sampled: Sampled) -> None:
        slot = self._slot(ticket)
        if slot.ticket == ticket:
            slot.ticket, slot.calling = None, False
        accepted = self.ledger.deliver(ticket)
        self.checks.delivered(ticket, accepted)
        if accepted:
            self.channel.put(cast(Any, sampled))
            self.worked(self.workers[ticket.worker], ticket.incarnation)
            self.worked(server.part, server.incarnation)
        self.look()

    def worked(self, part: str, incarnation: int) -> None:
        self.supervision.worked(part, incarnation)
        self.checks.worked(part, incarnation)

    def _on_saved(
        self, slot: Slot, incarnation: int, stream: tuple[int, int], saving: dict[Any, tuple[int, int]]
    ) -> None:
        if self.supervision.is_up(slot.name, incarnation) and (slot.worker, slot.group) not in saving:
            slot.calling = False
            saving[slot.worker, slot.group] = stream
            self.look()
