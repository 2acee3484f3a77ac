"""All parts in one thread, pumped in turn: exact, and debuggable with a breakpoint anywhere.

every group: start ──► [ actor.act(all requests) ──► every group: advance ] x (T + 1) ──► batch ──► learn
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embodied.core.algorithm import Metrics
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.collecting.actor_server import ActorServer
from embodied.runtime.collecting.env_worker import EnvWorker
from embodied.runtime.collecting.messages import ActRequest
from embodied.runtime.config import RuntimeConfig
from embodied.runtime.learner import Learner
from embodied.runtime.ledger import Ticket
from embodied.runtime.loop import RUNTIMES, Runtime
from embodied.runtime.recipe import Recipe
from embodied.runtime.watch.track import Track


@RUNTIMES.register("sync", config=RuntimeConfig)
class SyncRuntime(Runtime):
    """Parts in one thread. The batches are the same as those of ``LocalRuntime`` with max_staleness=0."""

    workers: list[EnvWorker]
    actor: ActorServer
    learner: Learner

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._parts = parts = recipe.build()
        self.spec, self.workers, self.actor = parts.spec, parts.workers, parts.actor
        self.learner, self.evaluator = parts.learner, parts.evaluator
        self.evaluation = self.evaluator
        self.opened.callback(parts.opened.close)

    def collect(self) -> list[Fragment]:
        threads.use(self.budget.actor)
        requests: list[ActRequest] = []
        for worker, group in self.groups:
            ticket = self.ledger.try_acquire(worker, group=group)
            assert ticket is not None, "one thread: nothing else can be in flight"
            requests.append(self.workers[worker].start(ticket))
        batch: list[Fragment] = []
        while requests:
            results = [self.workers[reply.worker].advance(reply) for reply in self.actor.act(requests)]
            requests = [result for result in results if isinstance(result, ActRequest)]
            batch += [result for result in results if isinstance(result, Fragment)]
        for fragment in batch:
            admitted = self.ledger.deliver(Ticket.of(fragment))
            assert admitted
        return batch

    def learn(self, batch: Sequence[Fragment]) -> Metrics:
        threads.use(self.budget.learner)
        return self.learner.learn(batch)

    def _group_states(self) -> list[dict[str, Any]]:
        return [self.workers[worker].state_dict(group) for worker, group in self.groups]

    def _tracks(self) -> dict[str, list[Track]]:
        return self._parts.tracks
