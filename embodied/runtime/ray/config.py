"""Options of the Ray runtime. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import field

from embodied.core.errors import UserError
from embodied.core.options import NonNegative, NonNegativeInt, Positive, PositiveInt, Text, config_dataclass
from embodied.runtime.config import RuntimeConfig
from embodied.runtime.ray.supervision import Patience


@config_dataclass
class Placement:
    """Where Ray may create a part."""

    resources: dict[str, NonNegative] = field(default_factory=dict)
    """Amounts that each such part reserves on its node, by Ray's names: {CPU: 4, GPU: 0.5, my_resource: 1}. Without CPU
    none is reserved. Without GPU, parts that compute on one share it: half for the learner, half for all servers, or a
    third each with a simulator on the GPU. Of several learner processes each reserves a GPU of its own."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that the node must have, by Ray's grammar of label selectors: {market-type: "!spot"}."""


@config_dataclass
class RayConfig(RuntimeConfig):
    """Options of a run on Ray: the cluster, the parts and their places, and how long a part may be silent."""

    overlaps = True
    separate_processes = True

    name: str = "ray"
    max_staleness: NonNegativeInt = 1
    """Most versions by which the weights that drew a decision may be older than the learner's. 0 is synchronous PPO."""
    address: Text | None = None
    """Address host:port of an existing Ray cluster, or auto for that of the variable RAY_ADDRESS, or without it the one
    on this machine. null starts one on this machine that only listens on its loopback interface and ends with the
    run."""
    min_env_workers: PositiveInt | None = None
    """Env workers that are enough to begin and to go on. The others join whenever the cluster has room for them, and
    may leave again. null: all of num_env_workers. Fewer than all need max_staleness >= 1."""
    num_actor_servers: PositiveInt = 1
    """Actor servers. An env worker uses one on its own node if there is one."""
    env_worker: Placement = field(default_factory=Placement)
    """Place of each env worker."""
    actor_server: Placement = field(default_factory=Placement)
    """Place of each actor server."""
    num_learners: PositiveInt = 1
    """Learner processes. Each update is made by all, every one with its share of the fragments, and is that of one
    process up to rounding. At most as many as env groups."""
    learner: Placement = field(default_factory=Placement)
    """Place of each learner process."""
    start_timeout_s: Positive = 300.0
    """Seconds in which a part must start."""
    answer_timeout_s: Positive = 15.0
    """Seconds without a sign of life after which a part is replaced."""
    operation_timeout_s: Positive = 120.0
    """Seconds after which a simulator step or an inference that has not ended counts as hung."""
    update_timeout_s: Positive = 1800.0
    """Seconds after which an update, or another operation of the learner, that has not ended counts as hung."""
    max_failures: NonNegativeInt = 3
    """Failures of a part in a row, without useful work in between, that are cured by a restart. One more ends the run
    with the first exception."""
    max_failures_per_hour: NonNegativeInt = 20
    """Failures of a part within an hour, whatever work it does in between, that are cured by a restart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if ":" in self.device:
            raise UserError(f"device: got {self.device}, allowed with runtime=ray: auto, cpu, cuda")
        if self.min_env_workers is not None and self.min_env_workers > self.num_env_workers:
            raise UserError(
                f"min_env_workers={self.min_env_workers} is more than runtime.num_env_workers={self.num_env_workers}"
            )
        if self.min_env_workers not in (None, self.num_env_workers) and not self.max_staleness:
            raise UserError(
                f"min_env_workers={self.min_env_workers} needs max_staleness of at least 1, got 0: a batch "
                f"then has one fragment of every env group, so all {self.num_env_workers} env workers are needed"
            )

    @classmethod
    def of(cls, config: RuntimeConfig) -> RayConfig:
        assert isinstance(config, cls), "``build_runtime`` has checked it"
        return config

    def needed_workers(self, num: int) -> int:
        """Return how many of ``num`` env workers must be up."""
        return num if self.min_env_workers is None else min(num, self.min_env_workers)

    @property
    def patience(self) -> Patience:
        return Patience(
            start_s=self.start_timeout_s,
            answer_s=self.answer_timeout_s,
            operation_s=self.operation_timeout_s,
            max_failures=self.max_failures,
            max_in_window=self.max_failures_per_hour,
        )

    def resources_of(self, kind: str, on_gpu: bool, envs_on_gpu: bool = False) -> dict[str, float]:
        """Return the amounts that a part of this kind (env_worker, actor_server, learner) reserves.

        on_gpu: whether actor servers and learner have a GPU. envs_on_gpu: whether env workers simulate on it too.
        """
        placement: Placement = getattr(self, kind)
        resources = dict(placement.resources)
        share = 0.33 if envs_on_gpu else 0.5  # of the GPU that parts have together by default
        number = {"actor_server": self.num_actor_servers, "env_worker": self.num_env_workers, "learner": 1}[kind]
        if kind == "learner" and self.num_learners > 1:
            share = 1.0  # NCCL has one process a GPU
        if on_gpu and (kind != "env_worker" or envs_on_gpu):
            resources.setdefault("GPU", share / number)
        return resources
