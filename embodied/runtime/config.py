"""Options of a runtime. Nothing here imports torch."""

from typing import ClassVar, Literal

from embodied.core.errors import UserError
from embodied.core.options import DeviceName, NonNegative, NonNegativeInt, PositiveInt, Seed, config_dataclass

EvalNoise = Literal["zero", "seeded"]
"""Noise that a deployed decision starts from. zero: none, the policy is deterministic. seeded: standard normals that
are a function of the episode's plan. A flow policy with two ways of acting then takes one of them, and a Gaussian draws
from its standard deviation."""


@config_dataclass
class RuntimeConfig:
    """Options of all runtimes: their parts, staleness and threads, and evaluations during training."""

    overlaps: ClassVar[bool] = False
    """Whether simulation and learning overlap if ``max_staleness`` allows it, and evaluations with training."""
    separate_processes: ClassVar[bool] = False
    """Whether actor and simulator are in processes of their own, each with cores of its own."""

    name: str = "sync"
    """Runtime. sync: one thread, exact and debuggable. local: threads of one process, learning overlaps simulation."""
    num_env_workers: PositiveInt = 1
    """Env workers. The envs are split evenly over num_env_workers * groups_per_worker groups, each one VecEnv."""
    groups_per_worker: NonNegativeInt = 0
    """Env groups per worker. With two, a worker steps one group while the other waits for its actions. 0 is two if
    max_staleness is at least 1 and the actor has a GPU, without simulators on it, or, on Ray, cores of its own.
    Otherwise it is one. With max_staleness=0 all runtimes then train the same bit for bit; on shared cores fewer,
    larger batches cost less."""
    decisions: PositiveInt = 32
    """Decisions T per fragment. A batch is as many fragments as there are groups; with max_staleness=0 one of each."""
    noise_hold: PositiveInt = 1
    """Decisions for which every fourth env of a group keeps its noise of exploration, 128 times as training begins, or
    until an episode of it terminates; 1: none does. Noise that is held moves what white noise only
    shakes. The likelihood is that of each decision alone."""
    max_staleness: NonNegativeInt = 0
    """Most versions by which the weights that drew a decision may be older than the learner's. 0 is synchronous PPO;
    sync allows only 0."""
    order: Literal["ticket", "arrival"] = "ticket"
    """Fragments of a batch. ticket: those admitted next, so one slow env group holds up all. arrival: the first that
    are complete; decisions that are older than max_staleness by then are masked. It needs max_staleness >= 1."""
    sim_threads: NonNegativeInt = 0
    """Threads of the simulation; 0 lets ``threads.plan`` choose."""
    actor_threads: NonNegativeInt = 0
    """Threads of the actor; 0 lets ``threads.plan`` choose."""
    learner_threads: NonNegativeInt = 0
    """Threads of the learner; 0 lets ``threads.plan`` choose."""
    device: DeviceName = "auto"
    """Device of actor and learner: auto, cpu, cuda or cuda:<index>; auto is CUDA if there is one."""
    watchdog_s: NonNegative = 60.0
    """Seconds without progress after which a local run logs which part waits for which; 0 is never."""
    trace: bool = False
    """Record what each part does in the first 60 seconds, for Perfetto: trace.json.gz in the run directory."""
    eval_every: NonNegativeInt = 0
    """Iterations between two evaluations of the weights to deploy; 0 is never."""
    eval_episodes: PositiveInt = 50
    """Episodes per evaluation."""
    eval_seed: Seed = 0
    """Seed of the initial states of evaluations; final evaluations have others, even with the same seed."""
    eval_noise: EvalNoise = "zero"
    """Noise of evaluated policies. zero: deterministic. seeded: random, drawn from the seed of each episode."""

    def __post_init__(self) -> None:
        if self.max_staleness and not self.overlaps:
            raise UserError(
                f"max_staleness={self.max_staleness} needs runtime=local, runtime=ray; "
                f"runtime={self.name} allows only 0"
            )
        if self.order == "arrival" and not self.max_staleness:
            raise UserError("order=arrival needs max_staleness of at least 1, got 0: allowed with 0 is order=ticket")

    @property
    def mask_above(self) -> int | None:
        """Age, versions, above which the learner masks decisions; None if the ledger lets none become older."""
        return self.max_staleness if self.order == "arrival" else None

    def groups_of_worker(self, on_gpu: bool, envs_on_gpu: bool = False) -> int:
        """Return the env groups of each worker. on_gpu, envs_on_gpu: whether a GPU acts and learns, and simulates."""
        beside = not (on_gpu and envs_on_gpu) and (self.separate_processes or (self.overlaps and on_gpu))
        return self.groups_per_worker or (2 if beside and self.max_staleness > 0 else 1)


@config_dataclass
class LocalConfig(RuntimeConfig):
    """Options of a run in threads of one process."""

    overlaps = True

    name: str = "local"
