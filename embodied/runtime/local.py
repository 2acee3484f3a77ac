"""The parts as threads of one process: arrays are shared, nothing is copied or pickled.

    thread per env worker      thread of the actor server        main thread: learner      thread of the evaluator
    ledger.acquire             inbox: all waiting requests  ┐    channel.take(v)           weights to deploy, when due
    start/advance ── request ► actor.act(merged)            │    learner.learn             evaluate ──► results
    inbox ◄──────── reply ──── to each worker's inbox  ◄────┘    publish, consumed_batch
    fragment ──► channel

A worker steps a group as soon as its actions arrive, while the actor serves its other group. A single group's worker
calls the actor in its own thread. When anything stops, every wait ends: each inbox gets None.
"""

import queue
from collections.abc import Sequence
from functools import partial
from typing import Any

from embodied.core.algorithm import Metrics
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.channel import Snapshot
from embodied.runtime.collecting.actor_server import ActReply, ActRequest
from embodied.runtime.recipe import Recipe
from embodied.runtime.sync import OneProcess


class LocalRuntime(OneProcess):
    """Parts in threads, from the first iteration to ``close``. Between iterations they go on sampling."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._requests: queue.SimpleQueue[ActRequest | None] = queue.SimpleQueue()
        self._replies: list[queue.SimpleQueue[ActReply | None]] = [queue.SimpleQueue() for _ in self.workers]
        self._snapshot = Snapshot()
        self._merges = len(self.groups) > 1
        self.opened.callback(self.threads.join)

    def _start(self) -> None:
        super()._start()
        if self.threads.started:
            return
        if self._merges:
            self.threads.spawn("actor server", self._serve)
        for index in range(len(self.workers)):
            self.threads.spawn(f"env worker {index}", partial(self._work, index))

    def learn(self, batch: Sequence[Fragment]) -> Metrics:
        with threads.using_idle_cores(self.budget.learner, self.budget.learner_alone, self._others_idle):
            return self.learner.learn(batch)

    def _group_states(self) -> Sequence[dict[str, Any] | None]:
        """Wait until each worker has saved each of its groups between two fragments; workers go on afterwards."""
        if not self.threads.started:
            return super()._group_states()
        self._snapshot = snapshot = Snapshot(self.groups)
        while not snapshot.complete.wait(0.01):
            self.threads.check_running()
            self.ledger.wake()
        self._snapshot = Snapshot()
        return [snapshot.states[key] for key in self.groups]

    def _others_idle(self) -> bool:
        return not self.evaluator.busy and self.ledger.waiting == len(self.workers)

    def _end_waits(self) -> None:
        super()._end_waits()
        self._requests.put(None)
        for inbox in self._replies:
            inbox.put(None)

    def _send(self, request: ActRequest) -> None:
        """Hand a request to the actor. With a single group there is nothing to merge: its worker's thread acts."""
        if self._merges:
            self._requests.put(request)
            return
        for reply in self.actor.act([request]):
            self._replies[reply.worker].put(reply)

    def _serve(self) -> None:
        threads.use(self.budget.actor)
        while True:
            requests = [self._requests.get()]
            while not self._requests.empty():
                requests.append(self._requests.get())
            batch = [request for request in requests if request is not None]
            if len(batch) < len(requests):
                return
            for reply in self.actor.act(batch):
                self._replies[reply.worker].put(reply)

    def _work(self, index: int) -> None:
        threads.use(1 if self._merges else self.budget.actor)
        worker = self.workers[index]
        resting = set(range(len(worker.rollouts)))
        while not self.threads.stopping.is_set():
            for group in sorted(resting):
                if (snapshot := self._snapshot).lacks((index, group)):
                    snapshot.put((index, group), worker.rollouts[group].state_dict())
                all_rest = len(resting) == len(worker.rollouts)
                ticket = (self.ledger.acquire if all_rest else self.ledger.try_acquire)(index, group=group)
                if ticket is not None:
                    self._send(worker.start(ticket))
                    resting.remove(group)
            if len(resting) == len(worker.rollouts):
                continue
            reply = self._replies[index].get()
            if reply is None:
                return
            result = worker.advance(reply)
            if isinstance(result, ActRequest):
                self._send(result)
                continue
            resting.add(result.group)
            if self.ledger.deliver(worker.rollouts[result.group].ticket):
                self.channel.put(result)
