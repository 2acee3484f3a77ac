"""Inference beside the control loop, and the loop's clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.runner import Planner


class Clock(Protocol):
    """The time of a control loop, s."""

    def now(self) -> float:
        """Return the time."""
        ...

    def sleep_until(self, time_s: float) -> None:
        """Wait until the time is ``time_s``; return at once if it has passed."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, time_s: float) -> None:
        left_s = time_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class Inference:
    """Plans of one policy, at most one at a time.

    added_s: latency that is added to every inference, as of a slower machine or a network. simulated: plan at once, and
    let the result arrive ``added_s`` later on the loop's clock; otherwise a thread plans.
    """

    def __init__(self, planner: Planner, clock: Clock, added_s: float = 0.0, simulated: bool = False) -> None:
        if not 0 <= added_s <= 10:
            raise UserError(f"latency: got {added_s} s, allowed: 0 to 10 s")
        self.planner, self.clock, self.added_s = planner, clock, added_s
        self.latencies_s: list[float] = []
        self._pool = None if simulated else ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._future: Future[NDArray[np.float32]] | None = None
        self._began_s = 0.0

    def submit(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Begin to plan."""
        self._began_s = self.clock.now()
        if self._pool is None:
            self._future = Future()
            self._future.set_result(self.planner.plan(inputs))
        else:
            self._future = self._pool.submit(self._plan, inputs)

    def _plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        chunk = self.planner.plan(inputs)
        left_s = self._began_s + self.added_s - self.clock.now()
        if left_s > 0:
            time.sleep(left_s)
        return chunk

    def take(self, wait_s: float = 0.0) -> tuple[NDArray[np.float32], float] | None:
        """Return the chunk [H, A] and its latency once it is there, else None. Errors of the planner are raised here.

        wait_s: longest wait of this thread.
        """
        if self._future is None or (self._pool is None and self.clock.now() < self._began_s + self.added_s - 1e-9):
            return None
        try:
            chunk = self._future.result(wait_s)
        except FutureTimeout:
            return None
        self._future = None
        latency_s = self.clock.now() - self._began_s
        self.latencies_s.append(latency_s)
        return chunk[0], latency_s

    def drop(self) -> None:
        """Wait for a plan that is under way, and forget it."""
        if self._future is not None and self._pool is not None:
            self._future.exception()
        self._future = None

    def close(self) -> None:
        """Wait for the thread and end it."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
