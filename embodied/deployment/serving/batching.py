"""One thread that plans for many: whatever waits becomes one batch.

await plan(row) ─┐
await plan(row) ─┼─► queue ─► thread: take all that waits, at most max_batch ─► planner.plan ─► one reply each
await plan(row) ─┘
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle.runner import Planner

Inputs = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Planned:
    """The chunk of one row."""

    chunk_HA: NDArray[np.float32]
    """Actions, physical units."""
    infer_ms: float
    """Time that the planner took for the batch."""
    batch: int
    """Rows of the batch."""


@dataclass(frozen=True, slots=True)
class _Job:
    inputs: Inputs
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Planned]


class Batcher:
    """Plans rows of several requests in one call of the planner, in a thread of its own.

    max_batch: largest number of rows in a call; 1 plans one request after the other.
    """

    def __init__(self, planner: Planner, max_batch: int) -> None:
        self.planner, self.max_batch = planner, max_batch
        self.batches = self.largest_batch = 0
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    async def plan(self, inputs: Inputs) -> Planned:
        """Return the chunk of one row; the inputs must have been checked. Errors of the planner are raised here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Planned] = loop.create_future()
        self._queue.put(_Job(inputs, loop, future))
        return await future

    def waiting(self) -> int:
        """Return the number of requests that no batch has taken yet."""
        return self._queue.qsize()

    def close(self) -> None:
        """Plan what waits, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            jobs: list[_Job] = [job]
            while len(jobs) < self.max_batch and not self._queue.empty():
                other = self._queue.get()
                if other is None:
                    self._queue.put(None)
                    break
                jobs.append(other)
            self._plan(jobs)

    def _plan(self, jobs: Sequence[_Job]) -> None:
        """Plan a batch. If the planner refuses it, plan its rows alone, so that only the rows at fault fail."""
        self.batches, self.largest_batch = self.batches + 1, max(self.largest_batch, len(jobs))
        began_s = time.perf_counter()
        try:
            chunk = self.planner.plan(_stack([job.inputs for job in jobs]))
        except Exception as error:  # whatever ONNX Runtime raises must not end the thread
            if len(jobs) > 1:
                for job in jobs:
                    self._plan([job])
                return
            if not isinstance(error, UserError):
                traceback.print_exc(file=sys.stderr)
            _deliver(jobs, error)
            return
        infer_ms = 1e3 * (time.perf_counter() - began_s)
        _deliver(jobs, [Planned(row_HA, infer_ms, len(jobs)) for row_HA in chunk])


def _stack(rows: Sequence[Inputs]) -> Inputs:
    """Return the rows of all inputs as one batch."""
    if len(rows) == 1:
        return rows[0]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _deliver(jobs: Sequence[_Job], outcome: Sequence[Planned] | Exception) -> None:
    """Hand results, or an error, to the event loop of the requests; those whose client has gone are dropped."""

    def set_all() -> None:
        for i, job in enumerate(jobs):
            if job.future.done():
                continue
            if isinstance(outcome, Exception):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome[i])

    jobs[0].loop.call_soon_threadsafe(set_all)
