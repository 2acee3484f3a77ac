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
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle.runner import Planner

Inputs = dict[str, NDArray[Any]]


Reply = tuple[NDArray[np.float32], dict[str, float]]
"""Chunk [H, A] of a row, physical units; time of the planner for its batch, ms, and rows of that."""
Job = tuple[Inputs, Future[Reply]]


class Batcher:
    """Plans rows of several requests in one call of the planner, in a thread of its own.

    max_batch: largest number of rows in a call; 1 plans one request after the other.
    """

    def __init__(self, planner: Planner, max_batch: int) -> None:
        self.planner, self.max_batch = planner, max_batch
        self.batches = self.largest_batch = 0
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    async def plan(self, inputs: Inputs) -> Reply:
        """Return the chunk of one row; the inputs must have been checked. Errors of the planner are raised here."""
        future: Future[Reply] = Future()
        self.queue.put((inputs, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Plan what waits, then end the thread."""
        self.queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self.queue.get()) is not None:
            jobs = [job]
            while len(jobs) < self.max_batch and not self.queue.empty():
                other = self.queue.get()
                if other is None:
                    self.queue.put(None)
                    break
                jobs.append(other)
            jobs = [job for job in jobs if job[1].set_running_or_notify_cancel()]  # not of clients that have gone
            if jobs:
                self._plan(jobs)

    def _plan(self, jobs: Sequence[Job]) -> None:
        """Plan a batch. If the planner refuses it, plan its rows alone, so that only the rows at fault fail."""
        self.batches, self.largest_batch = self.batches + 1, max(self.largest_batch, len(jobs))
        rows = [inputs for inputs, _ in jobs]
        began_s = time.perf_counter()
        try:
            chunk = self.planner.plan({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
        except Exception as error:  # whatever ONNX Runtime raises must not end the thread
            if len(jobs) > 1:
                for job in jobs:
                    self._plan([job])
                return
            if not isinstance(error, UserError):
                traceback.print_exc(file=sys.stderr)
            jobs[0][1].set_exception(error)
            return
        infer_ms = 1e3 * (time.perf_counter() - began_s)
        for (_, future), row_HA in zip(jobs, chunk, strict=True):
            future.set_result((row_HA, {"infer_ms": infer_ms, "batch": len(jobs)}))
