"""What runs in the simulated processes: env workers, actor servers and the learner, reduced to their counters.

    Session ── sample(ticket) ──► worker ── request ──► server (newest weights) ── reply ──► worker … ──► Sampled
    Session ── learn(batch) ────► learner: the real Learner on an algorithm that counts its updates

A worker's noise and episodes are reduced to a position in the stream of their incarnation. Functions have the process
in which they run as first argument and keep what they know in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from embodied.runtime.channel import Channel
from embodied.runtime.learner import Learner
from embodied.runtime.ledger import Ledger, Ticket
from embodied.runtime.supervision import Patience, Supervision
from embodied.runtime.weight_store import Weights, WeightStore
from tests.runtime.protocol.world import Process, World


class Violation(AssertionError):
    """The protocol did what it must not do."""


class Died(Exception):
    """The learner's process was killed between its optimiser step and the publication."""


@dataclass(frozen=True, slots=True)
class Components:
    """Classes under test. Tests put broken ones in their places."""

    ledger: type[Ledger] = Ledger
    channel: type[Channel] = Channel
    store: type[WeightStore] = WeightStore
    learner: type[Learner] = Learner
    supervision: type[Supervision] = Supervision


class Ended(Exception):
    """The session has ended: it must be resumed."""


@dataclass(slots=True)
class Slot:
    """An env group."""

    name: str
    worker: int
    group: int
    ticket: Ticket | None = None
    calling: bool = False


PATIENCE = Patience(
    start_s=8.0, ask_s=3.0, answer_s=2.0, operation_s=3.0, max_failures=3, backoff_s=0.25, max_backoff_s=1.0
)

Stream: TypeAlias = tuple[int, int]
"""Seed's incarnation of an env group, and how many fragments it has sampled since."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What stands for a fragment."""

    worker: int
    group: int
    incarnation: int
    sequence: int
    stream: Stream
    steps: tuple[int, ...]
    """Control steps of each decision."""
    versions: tuple[int, ...]
    """Of the weights that drew each decision."""
    num_steps_TN: Tensor = field(repr=False)
    """``steps``, as the learner reads and masks them."""

    @property
    def version_TN(self) -> Tensor:
        """``versions``, as the learner reads them."""
        return torch.tensor(self.versions).unsqueeze(1)

    @property
    def num_env_steps(self) -> int:
        """Control steps of the decisions that count."""
        return int(self.num_steps_TN.sum())

    def counting(self, oldest: int) -> list[int]:
        """Return the control steps of each decision; 0 if it or a later one is of older weights than ``oldest``."""
        return [steps if min(self.versions[t:]) >= oldest else 0 for t, steps in enumerate(self.steps)]


class Weight(nn.Module):
    """A policy whose only weight counts the updates."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = torch.zeros(1)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        self.updates.copy_(state["updates"])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())


class Counting:
    """An algorithm that changes the weight in place, as an optimiser does. policy: begins anew."""

    def __init__(self, policy: Weight) -> None:
        policy.updates.zero_()
        self.policy = self.deployed = policy
        self.killed = False
        self.steps = 0
        self.batch: Sequence[Sampled] = ()  # of the last update

    def update(self, fragments: Sequence[Sampled], version: int) -> dict[str, float]:
        self.batch = fragments
        self.policy.updates += 1
        self.steps += 1
        if self.killed:
            raise Died
        return {}

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]


# ------------------------------------------------------------------------------------------------------ actor server
class Servers:
    """Calls of actor servers. A call that its server does not answer, because it died, fails."""

    def __init__(self, world: World, store: WeightStore) -> None:
        self.world, self.store = world, store
        self._pending: dict[int, list[Callable[[], None]]] = {}  # by id of the process

    def act(self, server: Process, reply: Callable[[int], None], lost: Callable[[], None]) -> None:
        """Ask for a decision: ``reply(version)``, or ``lost()`` if the process is dead or dies before."""
        if not (server.alive and server.wanted):
            self.world.after(self.world.takes_s(0.02), lost)
            return
        self._pending.setdefault(id(server), []).append(lost)
        self.world.send(server, 0.02, self._act, reply)

    def died(self, server: Process) -> None:
        """Let the callers know, in their time."""
        for lost in self._pending.pop(id(server), ()):
            self.world.after(self.world.takes_s(0.05), lost)

    def _act(self, server: Process, reply: Callable[[int], None]) -> None:
        loaded: Weights | None = server.memory.get("weights")
        before = -1 if loaded is None else loaded.version
        if loaded is None or self.store.version > before:
            loaded = server.memory["weights"] = self.store.latest()
            if loaded.version < before:
                raise Violation(f"{server.part} went back from weights {before} to {loaded.version}")
        if int(loaded.tensors["updates"]) != loaded.version:  # a reader may keep what was published
            raise Violation(f"version {loaded.version} holds {int(loaded.tensors['updates'])} updates")
        reply(loaded.version)


# ------------------------------------------------------------------------------------------------------ env worker
class Sampling:
    """One call ``sample(ticket)`` at a worker: asks for decisions and steps, until the fragment is whole.

    After ``lost`` the fragment stays in the worker's memory, and the next call goes on with it.
    """

    def __init__(
        self, world: World, servers: Servers, decisions: int, done: Callable[..., None], lost: Callable[..., None]
    ) -> None:
        self.world, self.servers, self.decisions = world, servers, decisions
        self.done, self.lost = done, lost

    def begin(self, worker: Process, ticket: Ticket, server: Process) -> None:
        versions = worker.memory.setdefault(("begun", ticket.group), (ticket, []))
        if versions[0] != ticket:
            raise Violation(f"{worker.part} was given {ticket} in the middle of {versions[0]}")
        self._ask(worker, ticket, server)

    def _ask(self, worker: Process, ticket: Ticket, server: Process) -> None:
        open_ = [True]  # only the first of reply and loss counts, as with a future

        def reply(version: int) -> None:
            if open_.pop() if open_ else False:
                self.world.send(worker, 0.1, self._step, ticket, server, version)

        def lost() -> None:
            if (open_.pop() if open_ else False) and worker.alive:
                self.world.after(self.world.takes_s(0.02), self.lost, ticket, server)

        self.servers.act(server, reply, lost)

    def _step(self, worker: Process, ticket: Ticket, server: Process, version: int) -> None:
        _, versions = worker.memory["begun", ticket.group]
        versions.append(version)
        if len(versions) < self.decisions:
            self._ask(worker, ticket, server)
            return
        del worker.memory["begun", ticket.group]
        incarnation, position = worker.memory[ticket.group]
        worker.memory[ticket.group] = incarnation, position + 1
        first = position * 7 + ticket.worker * 3 + ticket.group + incarnation
        steps = tuple(1 + (first + t) % 5 for t in range(self.decisions))
        sampled = Sampled(
            ticket.worker, ticket.group, ticket.incarnation, ticket.sequence, (incarnation, position), steps,
            tuple(versions), torch.tensor(steps).unsqueeze(1),
        )  # fmt: skip
        self.world.answer(0.02, self.done, ticket, server, sampled)
