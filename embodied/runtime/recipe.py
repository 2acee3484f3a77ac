"""Recipe of a run: the factories of its parts and what they are built with. A runtime decides where it builds which.

make_env ──► VecEnv per group ──► EnvWorker ┐
make_policy(spec) ──► policy ──copy──► ActorServer ├──► a runtime
                         └► make_algorithm ► Learner ┘
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from embodied.core.device import CPU
from embodied.core.episodes import EpisodePlans, EpisodeSampler
from embodied.core.protocols import Algorithm, Policy, VecEnv
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment
from embodied.runtime.api import RuntimeConfig
from embodied.runtime.env_worker import EnvWorker
from embodied.runtime.evaluator import MAX_EVAL_ENVS, Evaluator

if TYPE_CHECKING:
    from embodied.runtime.threads import ThreadBudget

EnvFactory = Callable[[int, int], VecEnv]
"""(num_envs, num_threads) -> VecEnv"""
SamplerFactory = Callable[[EnvSpec, int, int, int], EpisodeSampler]
"""(spec, num_envs, first_seed, incarnation) -> sampler of the training episodes of one env group; first_seed: of its
first env; incarnation: how often its worker was replaced"""
PlanFactory = Callable[[EnvSpec, int, int], EpisodePlans]
"""(spec, episodes, seed) -> the fixed episodes of an evaluation"""
Relabel = Callable[[list[Fragment]], list[Fragment]]
"""Stage between workers and learner: returns the fragments of a batch with other rewards."""


@dataclass(frozen=True)
class Recipe:
    """What the parts of a run are built from; no part is built yet."""

    config: RuntimeConfig
    """Options of the runtime."""
    budget: ThreadBudget
    """Threads of each part."""
    device: torch.device
    """Of actor servers and learner."""
    sizes: list[list[int]]
    """Envs of each group of each worker."""
    seed: int
    """Of the run."""
    make_env: EnvFactory
    """Builds training envs."""
    make_sampler: SamplerFactory
    """Builds the sampler of a group."""
    make_policy: Callable[[EnvSpec], Policy]
    """Builds the policy on the CPU."""
    make_algorithm: Callable[[Policy], Algorithm]
    """Builds the algorithm of a policy on its device."""
    make_eval_env: EnvFactory | None
    """Builds the envs of evaluations."""
    eval_plans: PlanFactory | None
    """Draws the episodes of evaluations."""
    relabel: Relabel | None
    """Rewrites the rewards of batches."""

    @property
    def num_groups(self) -> int:
        """Env groups over all workers."""
        return sum(map(len, self.sizes))

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
        return EnvWorker(groups, worker, self.config.decisions, execute, noise_shape, self.seed, incarnation, device)

    def initial_policy(self, spec: EnvSpec) -> Policy:
        """Build the policy on the CPU from the run's seed, which it sets in torch's global generator."""
        torch.manual_seed(self.seed)
        policy = self.make_policy(spec)
        assert isinstance(policy, nn.Module), "a Policy is a torch module (embodied.core.protocols)"
        return policy

    def evaluator(self, policy: Policy, spec: EnvSpec) -> Evaluator | None:
        """Build the evaluator, or None if there are no evaluation envs. policy: a copy that no other part uses."""
        make_env, config = self.make_eval_env, self.config
        if make_env is None or self.eval_plans is None:
            return None
        plans = self.eval_plans(spec, config.eval_episodes, config.eval_seed)
        num_envs, num_threads = min(config.eval_episodes, MAX_EVAL_ENVS), self.budget.evaluator
        return Evaluator(policy, lambda: make_env(num_envs, num_threads), plans, config)
