"""Evaluations in a thread of their own, while training goes on.

main thread ── exchange: weights of an iteration, when due ──► Evaluator ── result ──► a later exchange
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embodied.runtime import threads
from embodied.runtime.evaluator import Evaluator
from embodied.runtime.thread_group import Supervisor


@dataclass(frozen=True, slots=True)
class Job:
    """Weights to be evaluated."""

    weights: dict[str, Tensor]
    """By name, on the CPU."""
    iteration: int
    """Batches that trained them."""
    env_steps: int
    """Control steps that trained them."""


class Aside:
    """Evaluator with a thread; one evaluation at a time. ``end`` ends the thread."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._given = False
        self._after: int | None = None

    @property
    def busy(self) -> bool:
        """Whether it evaluates now."""
        return self._given and self._results.empty()

    def begin(self, supervisor: Supervisor, num_threads: int) -> None:
        """Start the thread. num_threads: of torch."""
        supervisor.spawn("evaluator", lambda: self._judge(supervisor, num_threads))

    def exchange(
        self, weights: Callable[[], dict[str, Tensor]], iteration: int, env_steps: int
    ) -> dict[str, Any] | None:
        """Return a finished result and start the next evaluation if it is due, without waiting.

        weights: returns a copy of those to deploy. iteration, env_steps: that trained them.
        """
        result = None
        if not self._results.empty():
            result, self._given = self._results.get(), False
            if self._after is not None:
                result, self.evaluator.last_iteration, self._after = None, self._after, None
        if not self._given and self.evaluator.due(iteration):
            self._jobs.put(Job(weights(), iteration, env_steps))
            self._given = True
        return result

    def forget(self, last_iteration: int) -> None:
        """Drop the result under way: its weights are lost. last_iteration: of the last evaluation that counts."""
        self.evaluator.last_iteration = last_iteration
        self._after = last_iteration if self._given else None

    def end(self) -> None:
        """Make the thread end after its present evaluation; the supervisor's ``stopping`` cuts that short."""
        self._jobs.put(None)

    def _judge(self, supervisor: Supervisor, num_threads: int) -> None:
        threads.use(num_threads)
        while (job := self._jobs.get()) is not None:
            supervisor.board.set("evaluator", f"judges the weights of iteration {job.iteration}")
            result = self.evaluator.run(job.weights, job.iteration, job.env_steps, supervisor.stopping)
            if result:
                self._results.put(result)
            supervisor.board.set("evaluator", "has nothing to do")
