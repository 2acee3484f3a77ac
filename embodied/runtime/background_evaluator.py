"""Evaluations in a thread of their own, while training goes on.

main thread ── poll: weights of an iteration, when due ──► Evaluator ── result ──► a later poll
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embodied.runtime import threads
from embodied.runtime.evaluator import Evaluator
from embodied.runtime.thread_group import ThreadGroup


@dataclass(frozen=True, slots=True)
class Job:
    """Weights to be evaluated."""

    weights: Mapping[str, Tensor]
    """By name, on the CPU."""
    iteration: int
    """Batches that trained them."""
    env_steps: int
    """Control steps that trained them."""


class BackgroundEvaluator:
    """Evaluator with a thread of a group; one evaluation at a time. ``end`` ends the thread."""

    def __init__(self, evaluator: Evaluator, group: ThreadGroup) -> None:
        self.evaluator, self._group = evaluator, group
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._given = False
        self._after: int | None = None

    @property
    def busy(self) -> bool:
        """Whether it evaluates now."""
        return self._given and self._results.empty()

    def begin(self) -> None:
        """Start the thread."""
        self._group.spawn("evaluator", self._evaluate)

    def poll(
        self, weights: Callable[[], Mapping[str, Tensor]], iteration: int, env_steps: int, stop: threading.Event
    ) -> dict[str, Any] | None:
        """Return a finished result and start the next evaluation if it is due, without waiting.

        weights: returns a copy of those to deploy. iteration, env_steps: that trained them. stop: not needed here.
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
        """Make the thread end after its present evaluation; ``stopping`` of the group cuts that short."""
        self._jobs.put(None)

    def _evaluate(self) -> None:
        threads.use(self.evaluator.num_threads)
        board = self._group.board
        while (job := self._jobs.get()) is not None:
            board.set("evaluator", f"judges the weights of iteration {job.iteration}")
            result = self.evaluator.run(job.weights, job.iteration, job.env_steps, self._group.stopping)
            if result:
                self._results.put(result)
            board.set("evaluator", "has nothing to do")
