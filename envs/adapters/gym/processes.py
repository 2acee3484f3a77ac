"""Environments of gymnasium in processes of their own, for those whose Python code is slow.

    GymEnv ─ actions ─► shared memory ─► process: steps its rows ─► shared memory ─ results ─► GymEnv
           ─ call of ``step(ids)`` ─► Worker.step

Every process has a range of the N envs, and each call names those to step: an env that has ended waits. The memory has
no name, and processes end with their parent (``embodied.core.process.child``), so nothing stays behind.
"""

import mmap
import os
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from embodied.core.errors import UserError
from embodied.core.process.child import ChildDied, ChildObject
from embodied.envs.adapters.gym.rows import Arrays, Ints, LocalRows
from embodied.envs.adapters.gym.source import Source
from embodied.envs.adapters.gym.spaces import Pixels

WORKER = "embodied.envs.adapters.gym.processes:Worker"
Layout = dict[str, tuple[tuple[int, ...], str]]
"""The arrays of N environments: shape of a row and type, by key."""
ALIGNMENT = 64  # bytes


def allocate(layout: Layout, num_envs: int, descriptor: int | None = None) -> Arrays:
    """Return the arrays [N, ...], views of one piece of memory. descriptor: of memory that processes share."""
    begins, end = [], 0
    for shape, dtype in layout.values():
        begins.append(end)
        size = num_envs * int(np.prod(shape)) * np.dtype(dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    size = max(end, ALIGNMENT)
    if descriptor is not None:
        os.ftruncate(descriptor, size)
    memory = bytearray(size) if descriptor is None else mmap.mmap(descriptor, size)
    return {
        key: np.ndarray((num_envs, *shape), dtype, memory, begin)
        for (key, (shape, dtype)), begin in zip(layout.items(), begins, strict=True)
    }


def is_portable(source: Source) -> bool:
    """Return whether another process can build the environments: what builds them can be imported by name."""
    try:
        pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    creator = source.registration.entry_point or source.registration.vector_entry_point
    return getattr(creator, "__module__", "") != "__main__"


class ProcessRows:
    """Rows of several processes, with the methods of ``LocalRows``. UserError for what goes wrong in one of them."""

    def __init__(self, source: Source, layout: Layout, num_envs: int, processes: int, render: bool) -> None:
        self.source = source
        memory = os.memfd_create("gym_rows")
        shares = [share.tolist() for share in np.array_split(np.arange(num_envs), min(processes, num_envs))]
        self.workers: list[ChildObject] = []
        self.first_n = np.array([share[0] for share in shares])
        try:
            self.arrays = allocate(layout, num_envs, memory)
            for _ in shares:
                self.workers.append(ChildObject(WORKER, bare="embodied.envs", pass_fds=[memory], log=False))
            self._call({k: ("build", source, layout, num_envs, ids, render, memory) for k, ids in enumerate(shares)})
        except BaseException:
            for worker in self.workers:
                worker.kill()
            raise
        finally:
            os.close(memory)

    def start(self, ids: Ints, seeds: Ints) -> None:
        self._call({k: ("start", ids[mine], seeds[mine]) for k, mine in self._shares(ids)})

    def step(self, ids: Ints) -> None:
        self._call({k: ("step", ids[mine]) for k, mine in self._shares(ids)})

    def render(self, width: int, height: int) -> Pixels:
        return np.concatenate(self._call(dict.fromkeys(range(len(self.workers)), ("render", width, height))))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _shares(self, ids: Ints) -> Iterable[tuple[int, Any]]:
        """Return the processes that have some of ``ids``, with the places in ``ids`` of those that they have."""
        owners = np.searchsorted(self.first_n, ids, side="right") - 1
        return [(k, owners == k) for k in np.unique(owners).tolist()]

    def _call(self, calls: dict[int, tuple[Any, ...]]) -> list[Any]:
        """Call a method in processes. UserError for the first process that failed, after all have answered."""
        results, failure = [], None
        for k, call in calls.items():
            try:
                self.workers[k].send(*call)
            except ChildDied as death:
                raise self._dead(k, death) from None
        for k in calls:
            try:
                results.append(self.workers[k].receive())
            except ChildDied as death:
                failure = failure or self._dead(k, death)
            except UserError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return results

    def _dead(self, k: int, death: ChildDied) -> UserError:
        first, end = [*self.first_n, len(self.arrays["reward"])][k : k + 2]
        what = f"task {self.source.name}: the process of envs {first} to {end - 1} ended {death.how}"
        return UserError(f"{what}; what it printed is above. sim.processes=0 steps them in this process")


class Worker:
    """The environments of one process. It imports neither torch nor MuJoCo."""

    rows: LocalRows | None = None

    def build(
        self, source: Source, layout: Layout, num_envs: int, ids: Sequence[int], render: bool, memory: int
    ) -> None:
        """Build envs ``ids`` of the N. memory: descriptor of the memory that holds the arrays of all."""
        self.rows = LocalRows(source, allocate(layout, num_envs, memory), ids, render)
        self.start, self.step, self.render = self.rows.start, self.rows.step, self.rows.render

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()
