"""What runs in the simulated processes: env workers, actor servers and the learner, reduced to their counters.

    Session ── sample(ticket) ──► worker ── request ──► server (pulls weights) ── reply ──► worker … ──► Sampled
    Session ── learn(batch) ────► learner: the real Learner on an algorithm that counts its updates ──► Publication

A worker's noise and episodes are reduced to a position in the stream of their incarnation. Functions have the process
in which they run as first argument and keep what they know in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from embodied.runtime.channel import Channel, Weights, WeightStore
from embodied.runtime.learner import Learner
from embodied.runtime.ledger import Ledger, Ticket
from embodied.runtime.ray.supervision import Patience, Supervision
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
    start_s=8.0, ask_s=3.0, answer_s=2.0, operation_s=3.0, max_failures=3, window_s=20.0, max_in_window=5,
    backoff_s=0.25, max_backoff_s=1.0,
)  # fmt: skip
UPDATE_S = 6.0
"""Most time in one operation of the learner."""

Reply: TypeAlias = Callable[[tuple[int, int]], None]
"""learner and version of the weights that decided -> None"""
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
    learners: tuple[int, ...]
    """Incarnations that published the weights of each decision."""
    versions: tuple[int, ...]
    """Of these weights."""
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


@dataclass(frozen=True, slots=True)
class Publication:
    """Weights that a learner's process holds until they are pulled."""

    process: Process
    weights: Weights

    @property
    def age(self) -> tuple[int, int]:
        """Incarnation of the learner, and version."""
        return self.process.incarnation, self.weights.version


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
    """Calls of actor servers. A call fails if its server dies, or the learner before its weights are pulled."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._pending: dict[int, list[Callable[[], None]]] = {}  # by id of the process

    def act(self, server: Process, newest: Publication, reply: Reply, lost: Callable[[Process], None]) -> None:
        """Ask for a decision by these weights or newer ones: ``reply(age)``, or ``lost(who died)``."""
        if not (server.alive and server.wanted):
            self.world.after(self.world.takes_s(0.02), lost, server)
            return
        self._pending.setdefault(id(server), []).append(partial(lost, server))
        self.world.send(server, 0.02, self._act, newest, reply, lost)

    def died(self, server: Process) -> None:
        """Let the callers know, in their time."""
        for lost in self._pending.pop(id(server), ()):
            self.world.after(self.world.takes_s(0.05), lost)

    def _act(self, server: Process, offered: Publication, reply: Reply, lost: Callable[[Process], None]) -> None:
        newest = max(offered, server.memory.get("offered", offered), key=lambda publication: publication.age)
        server.memory["offered"] = newest
        if server.memory.get("pulled") is not newest:
            if not newest.process.alive:
                lost(newest.process)
                return
            server.memory["pulled"] = newest
        weights = newest.weights
        if int(weights.tensors["updates"]) != weights.version:  # a reader may keep what was published
            raise Violation(f"version {weights.version} holds {int(weights.tensors['updates'])} updates")
        reply(newest.age)


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

    def begin(self, worker: Process, ticket: Ticket, server: Process, newest: Publication) -> None:
        versions = worker.memory.setdefault(("begun", ticket.group), (ticket, []))
        if versions[0] != ticket:
            raise Violation(f"{worker.part} was given {ticket} in the middle of {versions[0]}")
        self._ask(worker, ticket, server, newest)

    def _ask(self, worker: Process, ticket: Ticket, server: Process, newest: Publication) -> None:
        open_ = [True]  # only the first of reply and loss counts, as with a future

        def reply(age: tuple[int, int]) -> None:
            if open_.pop() if open_ else False:
                self.world.send(worker, 0.1, self._step, ticket, server, newest, age)

        def lost(died: Process) -> None:
            if (open_.pop() if open_ else False) and worker.alive:
                self.world.after(self.world.takes_s(0.02), self.lost, ticket, died)

        self.servers.act(server, newest, reply, lost)

    def _step(
        self, worker: Process, ticket: Ticket, server: Process, newest: Publication, age: tuple[int, int]
    ) -> None:
        _, versions = worker.memory["begun", ticket.group]
        versions.append(age)
        if len(versions) < self.decisions:
            self._ask(worker, ticket, server, newest)
            return
        del worker.memory["begun", ticket.group]
        incarnation, position = worker.memory[ticket.group]
        worker.memory[ticket.group] = incarnation, position + 1
        first = position * 7 + ticket.worker * 3 + ticket.group + incarnation
        steps = tuple(1 + (first + t) % 5 for t in range(self.decisions))
        learners, numbers = zip(*versions, strict=True)
        sampled = Sampled(
            ticket.worker, ticket.group, ticket.incarnation, ticket.sequence, (incarnation, position), steps,
            learners, numbers, torch.tensor(steps).unsqueeze(1),
        )  # fmt: skip
        self.world.answer(0.02, self.done, ticket, server, sampled)
