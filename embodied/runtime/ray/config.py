"""Options of the Ray runtime."""

from __future__ import annotations

from dataclasses import field

import torch

from embodied.core.options import Count, Natural, NonNegative, Positive, Text, config_dataclass
from embodied.runtime.api import RuntimeConfig


@config_dataclass
class Placement:
    """Where Ray may create a part."""

    resources: dict[str, NonNegative] = field(default_factory=dict)
    """Amounts that each such part reserves on its node, by Ray's names: {CPU: 4, GPU: 0.5, my_resource: 1}. Without CPU
    none is reserved. Without GPU, parts that compute on one share it: half for the learner, half for all servers."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that the node must have, by Ray's grammar of label selectors: {market-type: "!spot"}."""


@config_dataclass
class RayConfig(RuntimeConfig):
    """Options of a run on Ray: the cluster, the parts and their places, and how long a part may be silent."""

    name: str = "ray"
    max_staleness: Natural = 1
    """Most versions by which the weights that drew a decision may be older than the learner's. 0 is synchronous PPO."""
    address: Text | None = None
    """Address host:port of an existing Ray cluster, or auto for the one on this machine. null starts one on this
    machine that only listens on its loopback interface and ends with the run."""
    num_actor_servers: Count = 1
    """Actor servers. An env worker uses one on its own node if there is one."""
    env_worker: Placement = field(default_factory=Placement)
    """Place of each env worker."""
    actor_server: Placement = field(default_factory=Placement)
    """Place of each actor server."""
    learner: Placement = field(default_factory=Placement)
    """Place of the learner."""
    start_timeout_s: Positive = 300.0
    """Seconds in which a part must start."""
    answer_timeout_s: Positive = 15.0
    """Seconds without a sign of life after which an env worker or actor server is replaced, or the run ended if it is
    the learner."""
    operation_timeout_s: Positive = 120.0
    """Seconds after which a simulator step or an inference that has not ended counts as hung."""
    max_failures: Natural = 3
    """Failures of a part, without useful work in between, after which it is restarted once more. After one more the run
    ends with the first exception."""

    def resources_of(self, kind: str, device: torch.device) -> dict[str, float]:
        """Return the amounts that a part of this kind reserves: env_worker, actor_server or learner."""
        placement: Placement = getattr(self, kind)
        resources = dict(placement.resources)
        if device.type == "cuda" and kind != "env_worker":
            resources.setdefault("GPU", 0.5 if kind == "learner" else 0.5 / self.num_actor_servers)
        return resources
