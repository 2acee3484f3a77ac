"""Plan in a thread alongside the control loop; the loop's clock."""

import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.deployment.bundle.runner import Planner

TIMEOUT_S = 5.0  # default of the longest plan

Inputs = Mapping[str, NDArray[Any]]
Plan = tuple[NDArray[np.float32], float]  # a chunk or chunks, and a time


class Clock:
    """The time of a control loop, s: the machine's monotonic clock, unless a subclass has another one."""

    def now(self) -> float:
        """Return the time."""
        return time.monotonic()

    def sleep_until(self, time_s: float) -> None:
        """Wait until the time is ``time_s``; return at once if it has passed."""
        time.sleep(max(0.0, time_s - time.monotonic()))


class Inference:
    """Plans of one policy, at most one at a time.

    added_s: latency that is added to every inference, as of a slower machine or a network. simulated: plan at once, and
    let the result arrive ``added_s`` later on the loop's clock, which ``take`` moves; otherwise a thread plans.
    timeout_s: longest plan, without ``added_s``; a policy that takes longer hangs. The thread is a daemon: it never
    keeps the process alive.
    """

    def __init__(
        self, planner: Planner, clock: Clock, added_s: float = 0.0, simulated: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.planner, self.clock, self.added_s, self.timeout_s = planner, clock, added_s, timeout_s
        self.latencies_s: list[float] = []
        self._simulated = simulated
        self._jobs: queue.SimpleQueue[tuple[Inputs, Future[Plan]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        if not simulated:
            self._thread.start()
        self._future: Future[Plan] | None = None
        self._began_s = 0.0

    def submit(self, inputs: Inputs) -> None:
        self._began_s, self._future = self.clock.now(), Future()
        if self._simulated:
            self._future.set_result((self.planner.plan(inputs), self._began_s + self.added_s))
        else:
            self._jobs.put((inputs, self._future))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            inputs, future = job
            try:
                chunk = self.planner.plan(inputs)
                time.sleep(self.added_s)
                future.set_result((chunk, self.clock.now()))
            except BaseException as error:  # raised again by take(); it must not end the thread
                future.set_exception(error)

    def take(self, wait_s: float = 0.0) -> Plan | None:
        """Return the chunk [H, A] and its latency once it is there, else None. Errors of the planner are raised here.

        wait_s: longest wait. The latency ends when the chunk was planned, not when it is taken. ConnectionError for a
        policy that hangs.
        """
        if self._future is None:
            return None
        if self._simulated:
            arrives_s, until_s = self._began_s + self.added_s, self.clock.now() + wait_s
            self.clock.sleep_until(min(arrives_s, until_s))
            if arrives_s > until_s + 1e-9:
                return None
        try:
            chunk, ended_s = self._future.result(wait_s)
        except FutureTimeout:
            if self._future.done():
                raise
            if self._left_s() < 0:
                raise ConnectionError(f"the policy hangs: no chunk after {self.timeout_s:g} s") from None
            return None
        self._future = None
        self.latencies_s.append(ended_s - self._began_s)
        return chunk[0], ended_s - self._began_s

    def _left_s(self) -> float:
        return self._began_s + self.added_s + self.timeout_s - self.clock.now()

    def drop(self) -> None:
        """Wait for a plan that is under way, unless it hangs, and forget it."""
        if self._future is not None and not self._simulated:
            with suppress(FutureTimeout):
                self._future.exception(max(0.0, self._left_s()))
        self._future = None

    def close(self) -> None:
        """End the thread, and wait for it unless it hangs."""
        if not self._simulated:
            self._jobs.put(None)
            self._thread.join(self.timeout_s)
