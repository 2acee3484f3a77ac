"""Who may use how many cores.

torch collapses when its threads have to share cores, the simulator's threads do not (docs/architecture.md). torch keeps
its number of threads per calling thread, so each part sets its own (``use``).

Policy, on C cores:

- Phases alternate (sync, or local with max_staleness=0): simulation, inference and learning use all C cores.
- They overlap (local with max_staleness>0): the simulator has C threads, fixed when a VecEnv is built, and yields to
  whoever computes; the learner has max(1, C // 2), the actor server max(1, C // 4). When every env worker waits for
  the learner, which it does until the update ends, the learner takes their cores too (``borrowing``). With a GPU the
  learner and the actor server need one thread each to feed it.
- An evaluation that runs beside training has one thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from embodied.runtime.api import RuntimeConfig


@dataclass(frozen=True, slots=True)
class ThreadBudget:
    """Threads of: each VecEnv of a worker, the actor server, the learner, the learner while nobody else computes, the
    evaluator (its VecEnv and torch)."""

    sim: int
    actor: int
    learner: int
    learner_alone: int
    evaluator: int


def available_cores() -> int:
    """Cores that this process may use: affinity, and the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def plan(
    config: RuntimeConfig, device: torch.device, *, overlaps: bool, evaluates_aside: bool, cores: int | None = None
) -> ThreadBudget:
    """The budget of a run; numbers in the config other than 0 win.

    overlaps, evaluates_aside: of the runtime's class. cores: None is all that this process may use.
    """
    cores = cores or available_cores()
    overlapping = overlaps and config.max_staleness > 0
    on_gpu = device.type == "cuda"
    learner = 1 if on_gpu else max(1, cores // 2) if overlapping else cores
    actor = 1 if on_gpu else max(1, cores // 4) if overlapping else cores
    return ThreadBudget(
        sim=config.sim_threads or max(1, cores // config.num_workers),
        actor=config.actor_threads or actor,
        learner=config.learner_threads or learner,
        learner_alone=config.learner_threads or (1 if on_gpu else cores),
        evaluator=1 if evaluates_aside else cores,
    )


def use(num_threads: int) -> None:
    """Let torch use so many threads for what the calling thread computes.

    The first question for the number of threads in a thread resets it to what any thread set last (ATen
    initialises it lazily, torch 2.13); so that question is asked here, before setting it.
    """
    torch.get_num_threads()
    torch.set_num_threads(num_threads)


@contextmanager
def borrowing(own: int, everything: int, others_idle: Callable[[], bool]) -> Iterator[None]:
    """``own`` threads for the calling thread, ``everything`` from the first optimiser step on that finds others idle.

    Asks after every step of any torch optimiser in this thread, so it works with every algorithm.
    """
    owner = threading.get_ident()

    def after_step(*_: Any) -> None:
        if threading.get_ident() == owner:
            use(everything if others_idle() else own)

    use(own)
    hook = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        hook.remove()
        use(own)
