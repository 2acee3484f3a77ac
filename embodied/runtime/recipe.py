"""Recipe of a run: the factories of its parts and what they are built with. A runtime decides where it builds which.

make_env ──► VecEnv per group ──► EnvWorker ┐
make_policy(spec) ──► policy ──copy──► ActorServer ├──► a runtime
                         └► make_algorithm ► Learner ┘
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

import torch

from embodied.core.algorithm import Algorithm
from embodied.core.device import CPU, resolve_device
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import EnvSpec
from embodied.runtime import threads
from embodied.runtime.collecting.env_worker import EnvWorker
from embodied.runtime.config import RuntimeConfig
from embodied.runtime.evaluator import MAX_EVAL_ENVS, Evaluator
from embodied.runtime.threads import ThreadBudget, ThreadGroup

EnvFactory = Callable[[int, int], VecEnv]
"""(num_envs, num_threads) -> VecEnv"""
SamplerFactory = Callable[[EnvSpec, int, int, int], EpisodeSampler]
"""(spec, num_envs, first_seed, incarnation) -> sampler of the training episodes of one env group"""
PlanFactory = Callable[[EnvSpec, int, int], EpisodePlans]
"""(spec, episodes, seed) -> the fixed episodes of an evaluation"""


@dataclass
class Recipe:
    """What the parts of a run are built from; no part is built yet.

    UserError if num_envs < 1, or for a device that this machine lacks.
    """

    config: RuntimeConfig
    num_envs: int
    """Over all workers and groups."""
    seed: int
    """Of the run. Exploration noise depends on it, on the worker and on the group."""
    make_env: EnvFactory
    make_sampler: SamplerFactory
    """Build the training envs and the sampler of a group."""
    make_policy: Callable[[EnvSpec], Policy]
    """Builds the policy on the CPU; ``torch.manual_seed(seed)`` is called before."""
    make_algorithm: Callable[[Policy], Algorithm]
    """Builds the algorithm of a policy on its device."""
    make_eval_env: EnvFactory
    eval_plans: PlanFactory
    """Build the envs of evaluations, and draw their episodes."""
    envs_on_gpu: bool = False
    """Whether the envs need a GPU if the policy has one; Ray then reserves a share of it for env workers."""
    confirm_at: float | None = None
    """Success of an evaluation that a second one, of fresh episodes, is to confirm; None: of none."""

    device: torch.device = field(init=False)
    """Of actor servers and learner. Those of Ray resolve a CUDA device where they run."""
    sizes: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        if self.num_envs < 1:
            raise UserError(f"num_envs: got {self.num_envs}, allowed: at least 1")
        self.device = device_of(config)
        groups_of_worker = config.groups_of_worker(self.device.type == "cuda", self.envs_on_gpu)
        self.sizes = group_sizes(self.num_envs, config.num_env_workers, groups_of_worker)

    def budget_of(self, policy: Policy, spec: EnvSpec) -> ThreadBudget:
        """Return the threads of each part, on the cores of this process."""
        return threads.plan(self.config, self.device, small=threads.is_small(policy, spec))

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Worker and group of each env group, over all workers."""
        return [(worker, group) for worker, sizes in enumerate(self.sizes) for group in range(len(sizes))]

    def open_envs(self, worker: int, num_threads: int) -> list[VecEnv]:
        """Build the envs of one worker, a VecEnv per group; none stays open if one cannot be built."""
        with ExitStack() as opened:
            envs = [opened.enter_context(closing(self.make_env(size, num_threads))) for size in self.sizes[worker]]
            opened.pop_all()
            return envs

    def env_worker(
        self,
        worker: int,
        envs: list[VecEnv],
        execute: int,
        noise_shape: tuple[int, ...],
        incarnation: int = 0,
        device: torch.device = CPU,
    ) -> EnvWorker:
        """Build one worker of the envs of ``open_envs``. All groups of a run have consecutive env seeds.

        execute, noise_shape: those of the policy. device: see ``EnvWorker``.
        """
        seed = first_env_seed(Purpose.TRAINING, self.seed) + sum(map(sum, self.sizes[:worker]))
        groups = []
        for env in envs:
            groups.append((env, self.make_sampler(env.spec, env.num_envs, seed, incarnation)))
            seed += env.num_envs
        decisions, hold = self.config.decisions, self.config.noise_hold
        return EnvWorker(groups, worker, decisions, execute, noise_shape, self.seed, incarnation, device, hold)

    def initial_policy(self, spec: EnvSpec) -> Policy:
        """Build the policy on the CPU from the run's seed, which it sets in torch's global generator."""
        torch.manual_seed(self.seed)
        return self.make_policy(spec)

    def evaluator(self, policy: Policy, spec: EnvSpec, budget: ThreadBudget, group: ThreadGroup) -> Evaluator:
        """Build the evaluator. policy: a copy that no other part uses. group: of its thread, if it has one."""
        config, plans = self.config, partial(self.eval_plans, spec)
        beside, sim_threads = (group, 1) if config.overlaps else (None, budget.sim)
        make_env = partial(self.make_eval_env, min(config.eval_episodes, MAX_EVAL_ENVS), sim_threads)
        return Evaluator(policy, make_env, plans, config, budget.evaluator, self.confirm_at, beside)


def device_of(config: RuntimeConfig) -> torch.device:
    """Return the device of a run's policy. UserError if it has to be on this machine and is not."""
    elsewhere = config.separate_processes and config.device != "auto"
    return torch.device(config.device) if elsewhere else resolve_device(config.device)


def group_sizes(num_envs: int, num_env_workers: int, groups_per_worker: int) -> list[list[int]]:
    """Return the envs of each group of each worker, as even as possible, without empty groups and workers.

    >>> group_sizes(10, 2, 2), group_sizes(1, 1, 2)
    ([[3, 3], [2, 2]], [[1]])
    """
    groups = num_env_workers * groups_per_worker
    sizes = [num_envs // groups + (index < num_envs % groups) for index in range(min(groups, num_envs))]
    return [sizes[first : first + groups_per_worker] for first in range(0, len(sizes), groups_per_worker)]
