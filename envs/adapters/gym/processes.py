"""Environments of gymnasium in processes of their own, for those whose Python code is slow.

    GymEnv ─ actions ─► shared memory ─► process: steps its rows ─► shared memory ─ results ─► GymEnv
           ─ ("step", ids) ─► pipe                       pipe ◄─ ("done", None)

Every process has a range of the N envs, and is told which of them to step: an env that has ended waits. The memory has
no name, and a process ends when the pipes of its parent close, so nothing stays behind, however the parent ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

import numpy as np

from embodied.core.errors import UserError
from embodied.envs.adapters.gym.rows import Ints, Layout
from embodied.envs.adapters.gym.source import Source
from embodied.envs.adapters.pixels import Pixels
from embodied.envs.base.forks import Builder

WORKER = Path(__file__).with_name("worker.py")
PATIENCE_S = 10.0  # for the envs of a process to close


def is_portable(source: Source) -> bool:
    """Return whether another process can build the environments: what builds them can be imported by name."""
    try:
        pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    creator = source.registration.entry_point or source.registration.vector_entry_point
    return getattr(creator, "__module__", "") != "__main__"


class ProcessRows:
    """Rows of several processes; see ``rows.Rows``. UserError for what goes wrong in one of them."""

    def __init__(self, source: Source, layout: Layout, num_envs: int, processes: int, render: bool) -> None:
        """Start the processes, and wait until each has built its envs."""
        self.source = source
        size = layout.offsets(num_envs)[1]
        memory = os.memfd_create("gym_rows")
        os.ftruncate(memory, size)
        self.arrays = layout.arrays(num_envs, mmap.mmap(memory, size))
        shares = [share.tolist() for share in np.array_split(np.arange(num_envs), min(processes, num_envs))]
        self.workers: list[_Worker] = []
        self.first_n = np.array([share[0] for share in shares])
        self._builder = Builder()
        self._end = weakref.finalize(self, _kill, self.workers, self._builder)
        try:
            for _ in shares:
                self.workers.append(_Worker(memory))
            for worker, share in zip(self.workers, shares, strict=True):
                worker.orders.send((source, layout, num_envs, share, render))
            self._collect(range(len(self.workers)))
        except BaseException:
            self._end()
            raise
        finally:
            os.close(memory)

    def start(self, ids: Ints, seeds: Ints) -> None:
        owners = self._owners(ids)
        self._order({k: ("start", ids[owners == k], seeds[owners == k]) for k in np.unique(owners).tolist()})

    def step(self, ids: Ints) -> None:
        owners = self._owners(ids)
        self._order({k: ("step", ids[owners == k]) for k in np.unique(owners).tolist()})

    def render(self, width: int, height: int) -> Pixels:
        return np.concatenate(self._order(dict.fromkeys(range(len(self.workers)), ("render", width, height))))

    def close(self) -> None:
        for worker in self.workers:
            worker.orders.close()
        for worker in self.workers:
            worker.wait()
        self._end()

    def _owners(self, ids: Ints) -> Ints:
        """Return the index of the process of each of ``ids``."""
        return np.searchsorted(self.first_n, ids, side="right") - 1

    def _order(self, orders: dict[int, tuple[Any, ...]]) -> list[Any]:
        """Give orders to processes and return their results."""
        self._builder.check()
        for k, order in orders.items():
            try:
                self.workers[k].orders.send(order)
            except (BrokenPipeError, OSError):
                raise self._dead(k) from None
        return self._collect(orders)

    def _collect(self, indices: Sequence[int] | range | dict[int, Any]) -> list[Any]:
        """Wait for the results of processes. UserError for the first that failed, after all have answered."""
        results, failure = [], None
        for k in indices:
            try:
                outcome, result = self.workers[k].orders.recv()
            except (EOFError, ConnectionError):
                failure = failure or self._dead(k)
                continue
            if outcome == "failed":
                failure = failure or UserError(result)
            results.append(result)
        if failure is not None:
            raise failure
        return results

    def _dead(self, k: int) -> UserError:
        """Return the error for a process that has ended by itself."""
        code = self.workers[k].wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        last = len(self.arrays["reward"]) if k + 1 == len(self.workers) else int(self.first_n[k + 1])
        return UserError(
            f"task {self.source.name}: the process of envs {self.first_n[k]} to {last - 1} ended {how}; what it "
            "printed is above. sim.processes=0 steps them in this process"
        )


class _Worker:
    """A process and the pipes to it."""

    def __init__(self, memory: int) -> None:
        ours, theirs = socketpair()
        watched, self.lifeline = os.pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(theirs.fileno()), str(watched), str(memory)],
                pass_fds=(theirs.fileno(), watched, memory),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what environments print is no result of a command
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the parent, which still needs it
            )
        except BaseException:
            os.close(self.lifeline)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(watched)
        self.orders = Connection(ours.detach())

    def wait(self) -> int:
        """Wait until the process has ended, end it if it does not, and return its exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def kill(self) -> None:
        """End the process at once and close the pipes."""
        self.process.kill()
        self.process.wait()
        self.orders.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1


def _kill(workers: list[_Worker], builder: Builder) -> None:
    for worker in workers if builder.here else ():
        worker.kill()
