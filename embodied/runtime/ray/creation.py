"""Creation of the parts as actors of Ray, where the configuration places them."""

from dataclasses import replace
from typing import Any

import ray
import torch

from embodied.core.spec import EnvSpec
from embodied.runtime.ray.cluster import Cluster
from embodied.runtime.ray.config import Placement, RayConfig
from embodied.runtime.ray.hosts import ServerHost, WorkerHost
from embodied.runtime.ray.learner_host import LearnerHost
from embodied.runtime.ray.wire import nbytes, share_tensors
from embodied.runtime.recipe import Recipe

MAX_CALLS = 10_000
"""Calls that a host may have open; each waits in its event loop and costs no thread."""


class Creator:
    """Creates the actors of a run. policy: the initial one, on the CPU. UserError if the cluster does not fit."""

    def __init__(self, cluster: Cluster, recipe: Recipe, spec: EnvSpec) -> None:
        self.recipe, self.config = recipe, RayConfig.of(recipe.config)
        parts = roles(self.config, self.config.needed_workers(len(recipe.sizes)))
        demands = [(name, *self._demand(kind)) for name, (kind, _) in parts.items()]
        cluster.check(demands + [("learner", *self._demand("learner"))] * (self.config.num_learners - 1))
        cluster.check_code()
        self.policy = recipe.initial_policy(spec)
        cluster.check_room(nbytes(self.policy.state_dict()))
        self.budget = recipe.budget_of(self.policy, spec)
        self._rng_state = torch.get_rng_state()
        share_tensors()
        self._recipe, self._policy = ray.put(recipe), ray.put(self.policy)

    def __call__(self, kind: str, index: int, incarnation: int) -> list[Any]:
        """Return a part's new processes, not built yet. incarnation: of a worker's seeds or a learner's weights."""
        resources, labels = self._demand(kind)
        config, budget = self.config, self.budget
        own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # in Ray's options, beside other resources
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_restarts": 0, "max_concurrency": MAX_CALLS}
        options |= {own[name]: amount for name, amount in resources.items() if name in own}
        options["resources"] = {name: amount for name, amount in resources.items() if name not in own}
        if labels:
            options["label_selector"] = dict(labels)
        if not resources:
            options["scheduling_strategy"] = "SPREAD"  # parts that reserve nothing would all go to one node
        cpus = int(resources.get("CPU", 0))
        if kind == "env_worker":
            num_threads = config.sim_threads or cpus or budget.sim
            shape = (self.policy.execute, self.policy.noise_shape)
            host = ray.remote(WorkerHost).options(**options)
            return [host.remote(self._recipe, index, incarnation, *shape, num_threads)]
        if kind == "actor_server":
            num_threads = config.actor_threads or cpus or budget.actor
            server = ray.remote(ServerHost).options(**options)
            return [server.remote(self._recipe, self._policy, index, num_threads)]
        num = config.num_learners
        if (cpus or num > 1) and not config.learner_threads:
            each = cpus or max(1, budget.learner // num)
            budget = replace(budget, learner=each, learner_alone=each)
        learner = ray.remote(LearnerHost).options(**options)
        given = (self._recipe, incarnation, self._policy, self._rng_state, budget)
        return [learner.remote(*given, rank) for rank in range(num)]

    def _demand(self, kind: str) -> tuple[dict[str, float], dict[str, str]]:
        placement: Placement = getattr(self.config, kind)
        on_gpu, envs_on_gpu = self.recipe.device.type == "cuda", self.recipe.envs_on_gpu
        return self.config.resources_of(kind, on_gpu, envs_on_gpu), placement.labels


def roles(config: RayConfig, num_env_workers: int) -> dict[str, tuple[str, int]]:
    """Return all parts of a run by name: the key of its placement, and its number among its kind."""
    servers = {f"actor server {index}": ("actor_server", index) for index in range(config.num_actor_servers)}
    workers = {f"env worker {index}": ("env_worker", index) for index in range(num_env_workers)}
    return {"learner": ("learner", 0), **servers, **workers}
