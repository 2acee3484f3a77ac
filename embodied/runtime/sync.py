"""All parts in one thread, pumped in turn: exact, and debuggable with a breakpoint anywhere.

every group: start ──► [ actor.act(all requests) ──► every group: advance ] x (T + 1) ──► batch ──► learn
"""

from collections.abc import Sequence

from embodied.core.algorithm import Metrics
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.collecting.actor_server import ActRequest
from embodied.runtime.config import RuntimeConfig
from embodied.runtime.ledger import Ticket
from embodied.runtime.loop import RUNTIMES
from embodied.runtime.one_process import OneProcess
from embodied.runtime.recipe import Recipe


@RUNTIMES.register("sync", config=RuntimeConfig)
class SyncRuntime(OneProcess):
    """Parts in one thread. The batches are the same as those of ``LocalRuntime`` with max_staleness=0."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.evaluation = self.evaluator

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
