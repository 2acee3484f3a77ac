"""Thread budget, and threads that stop together.

torch slows down sharply when its threads share cores, the simulator does not. So each part sets the number of torch's
threads for its own thread (``use``); docs/architecture.md has the table of all numbers.

what each part does, and since when ──► watchdog: warns if nothing has changed for a while
part raises ──► ThreadGroup keeps the first exception ──► runs the stop callback ──► ``check`` raises it in the caller
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from embodied.core.clock import running_s
from embodied.core.device import available_cores as available_cores
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.runtime.config import RuntimeConfig

log = logging.getLogger(__name__)
SMALL, FEW = 2**20, 2  # weights of a small policy are fewer; threads of torch for it


@dataclass(frozen=True, slots=True)
class ThreadBudget:
    """Threads of a worker's VecEnvs and of torch elsewhere. learner_alone: while no other part computes."""

    sim: int
    actor: int
    learner: int
    learner_alone: int
    evaluator: int


def torch_cores(cores: int | None = None) -> int:
    """Return how many of ``cores`` torch uses by default: at most ``OMP_NUM_THREADS``. None is all of this process."""
    cores = cores or available_cores()
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is of nested regions
    return min(cores, int(outermost)) if outermost.isdecimal() and int(outermost) else cores


def is_small(policy: Policy, spec: EnvSpec) -> bool:
    """Return whether an operation of the policy is over before many threads have met."""
    return not spec.cameras and sum(weight.numel() for weight in policy.parameters()) < SMALL


def sim_threads(config: RuntimeConfig, cores: int | None = None) -> int:
    """Return the threads of a worker's VecEnvs, which do not depend on the policy. cores: see ``plan``."""
    return config.sim_threads or max(1, (cores or available_cores()) // config.num_env_workers)


def plan(config: RuntimeConfig, device: torch.device, cores: int | None = None, small: bool = False) -> ThreadBudget:
    """Return the budget of a run; numbers in the config take precedence. cores: None is all of this process.

    small: of the policy (``is_small``): on 16 cores a step of PPO took 8 ms with 8 threads (docs/gpu.md).
    """
    cores = cores or available_cores()
    most = min(torch_cores(cores), FEW) if small else torch_cores(cores)
    overlapping = config.overlaps and config.max_staleness > 0
    on_gpu = device.type == "cuda"
    learner = 1 if on_gpu else min(most, max(1, cores // 2)) if overlapping else most
    actor = 1 if on_gpu else min(most, max(1, cores // 4)) if overlapping else most
    return ThreadBudget(
        sim=sim_threads(config, cores),
        actor=config.actor_threads or actor,
        learner=config.learner_threads or learner,
        learner_alone=config.learner_threads or (1 if on_gpu else most),
        evaluator=1 if config.overlaps else most,
    )


def use(num_threads: int) -> None:
    """Set the number of torch's threads for the calling thread, which torch 2.13 has to read first."""
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


Doing = Mapping[str, tuple[str, float]]
"""What each part does now, and when that began (``running_s``)."""


class ThreadGroup:
    """Owner of a run's threads.

    on_stop: called once, at the first stop; it must end every wait. doing: reads for the watchdog what all parts do.
    """

    def __init__(self, watchdog_s: float, on_stop: Callable[[], None], doing: Callable[[], Doing] = dict) -> None:
        self.stopping = threading.Event()
        self._watchdog_s, self._on_stop, self._doing = watchdog_s, on_stop, doing
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def started(self) -> bool:
        return bool(self._threads)

    def spawn(self, name: str, run: Callable[[], None]) -> None:
        """Run ``run`` in a new thread; an exception in it stops all threads. The first thread starts the watchdog."""
        watched = self.started or self._watchdog_s <= 0
        for title, function in [(name, run)] if watched else [("watchdog", self._watch), (name, run)]:
            thread = threading.Thread(target=self._guard, args=(title, function), name=f"embodied {title}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guard(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # of any kind: ``check`` raises it again
            with self._lock:
                if self._failure is None and not self.stopping.is_set():
                    error.add_note(f"(raised in the thread of the {name})")
                    self._failure = error
            self.stop()

    def stop(self) -> None:
        """Signal every thread to end; return at once."""
        with self._lock:
            if self.stopping.is_set():
                return
            self.stopping.set()
        self._on_stop()

    def check(self) -> None:
        """Raise the exception of the first part that failed, if one did, with its traceback."""
        if self._failure is not None:
            raise self._failure

    def check_running(self) -> None:
        """Raise the exception of the first part that failed, or RuntimeError if the threads have been stopped."""
        stopping = self.stopping.is_set()  # read before ``check``: a failure is set before ``stopping``
        self.check()
        if stopping:
            raise RuntimeError("the runtime is closed")

    def join(self) -> None:
        """Stop and wait for all threads. Every 10 seconds, log a thread that has not ended."""
        self.stop()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(10.0)
                if thread.is_alive():
                    log.warning("waiting for the thread '%s' to end\n%s", thread.name, self._report())

    def _watch(self) -> None:
        watchdog_s, reported_at = self._watchdog_s, 0.0
        while not self.stopping.wait(min(watchdog_s / 4, 1.0)):
            idle_s = running_s() - max((since for _, since in self._doing().values()), default=running_s())
            if idle_s >= watchdog_s and running_s() - reported_at >= watchdog_s:
                reported_at = running_s()
                log.warning("no progress for %.0f s:\n%s", idle_s, self._report())

    def _report(self) -> str:
        now, entries = running_s(), sorted(self._doing().items())
        return "\n".join(f"  {part}: {doing} for {now - since:.1f} s" for part, (doing, since) in entries)
