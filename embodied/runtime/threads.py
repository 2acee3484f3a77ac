"""Thread budget: how many cores each part may use.

torch slows down sharply when its threads share cores, the simulator does not (docs/architecture.md). So if phases
overlap, the simulator has all cores and yields to the others, and each part sets the number of torch's threads for its
own thread (``use``). While every env worker waits for the learner, the learner uses all cores.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from embodied.runtime.config import RuntimeConfig


@dataclass(frozen=True, slots=True)
class ThreadBudget:
    """Number of threads of each part."""

    sim: int
    """Of each VecEnv of a worker."""
    actor: int
    """Of torch in the actor server."""
    learner: int
    """Of torch in the learner."""
    learner_alone: int
    """Of torch in the learner while no other part computes."""
    evaluator: int
    """Of torch in the evaluator, and of its VecEnv."""


def available_cores() -> int:
    """Return the number of cores that this process may use: by affinity and by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def torch_cores(cores: int | None = None) -> int:
    """Return how many of ``cores`` torch uses by default: at most ``OMP_NUM_THREADS``. None is all of this process."""
    cores = cores or available_cores()
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is of nested regions
    return min(cores, int(outermost)) if outermost.isdecimal() and int(outermost) else cores


def plan(config: RuntimeConfig, device: torch.device, cores: int | None = None) -> ThreadBudget:
    """Return the budget of a run; numbers in the config other than 0 take precedence.

    cores: None is all that this process may use.
    """
    cores = cores or available_cores()
    most = torch_cores(cores)
    overlapping = config.overlaps and config.max_staleness > 0
    on_gpu = device.type == "cuda"
    learner = 1 if on_gpu else min(most, max(1, cores // 2)) if overlapping else most
    actor = 1 if on_gpu else min(most, max(1, cores // 4)) if overlapping else most
    return ThreadBudget(
        sim=config.sim_threads or max(1, cores // config.num_env_workers),
        actor=config.actor_threads or actor,
        learner=config.learner_threads or learner,
        learner_alone=config.learner_threads or (1 if on_gpu else most),
        evaluator=1 if config.evaluates_in_background else most,
    )


def use(num_threads: int) -> None:
    """Set the number of torch's threads for the calling thread.

    It is read before it is set: the first read in a thread resets it to what any thread set last (torch 2.13).
    """
    torch.get_num_threads()
    torch.set_num_threads(num_threads)


@contextmanager
def using_idle_cores(own: int, everything: int, others_idle: Callable[[], bool]) -> Iterator[None]:
    """Use ``own`` threads in the calling thread, but ``everything`` after each optimiser step if others are idle then.

    It checks after every step of any torch optimiser in this thread, so it works with every algorithm.
    """
    owner = threading.get_ident()

    def after_step(*_: object) -> None:
        if threading.get_ident() == owner:
            use(everything if others_idle() else own)

    use(own)
    hook = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        hook.remove()
        use(own)
