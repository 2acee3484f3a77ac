"""Build the parts and hand them to the runtime that the config names.

make_env ──► VecEnv per group ──► EnvWorker ┐
make_policy(spec) ──► policy ──copy──► ActorServer ├──► SyncRuntime | LocalRuntime
                         └► make_algorithm ► Learner ┘
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, closing

import torch
from torch import nn

from embodied.core.episodes import EpisodePlans, EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.protocols import Algorithm, Policy, VecEnv
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import EnvSpec
from embodied.runtime import threads
from embodied.runtime.actor_server import ActorServer
from embodied.runtime.api import Runtime, RuntimeConfig
from embodied.runtime.base import RUNTIMES, Relabel
from embodied.runtime.env_worker import EnvWorker
from embodied.runtime.evaluator import MAX_EVAL_ENVS, Evaluator
from embodied.runtime.learner import Learner
from embodied.runtime.ledger import Ledger
from embodied.runtime.weight_store import WeightStore

EnvFactory = Callable[[int, int], VecEnv]
"""(num_envs, num_threads) -> VecEnv"""
SamplerFactory = Callable[[EnvSpec, int, int], EpisodeSampler]
"""(spec, num_envs, first_seed) -> sampler of the training episodes of one env group; first_seed: of its first env"""
PlanFactory = Callable[[EnvSpec, int, int], EpisodePlans]
"""(spec, episodes, seed) -> the fixed episodes of an evaluation"""


def build_runtime(
    config: RuntimeConfig,
    *,
    num_envs: int,
    seed: int,
    make_env: EnvFactory,
    make_sampler: SamplerFactory,
    make_policy: Callable[[EnvSpec], Policy],
    make_algorithm: Callable[[Policy], Algorithm],
    make_eval_env: EnvFactory | None = None,
    eval_plans: PlanFactory | None = None,
    relabel: Relabel | None = None,
) -> Runtime:
    """Build a runtime that is ready to iterate or to load a state.

    num_envs: over all workers and groups. make_env, make_sampler: build training envs and the samplers of their
    episodes. make_eval_env, eval_plans: build the envs and episodes of evaluations. relabel: rewrites the rewards of a
    batch before the learner gets it, for instance by a learned reward. ``torch.manual_seed(seed)`` is called before
    make_policy; exploration noise depends on ``seed``, worker and group.
    UserError if num_envs < 1, or for ``device=cuda`` without a CUDA device.
    """
    if num_envs < 1:
        raise UserError(f"num_envs: got {num_envs}, allowed: at least 1")
    if config.eval_every and make_eval_env is None:
        raise UserError("eval_every needs evaluation environments, and this task gives none")
    device = resolve_device(config.device)
    budget = thread_budget(config, device)
    sizes = group_sizes(num_envs, config.num_workers, config.groups_per_worker)
    with ExitStack() as opened:  # closes the envs if anything is refused
        envs = [[opened.enter_context(closing(make_env(size, budget.sim))) for size in worker] for worker in sizes]
        torch.manual_seed(seed)
        spec = envs[0][0].spec
        policy = make_policy(spec)
        actor_policy, eval_policy = copy.deepcopy(policy), copy.deepcopy(policy)
        _module(policy).to(device)
        store = WeightStore()
        evaluator = None
        if make_eval_env is not None and eval_plans is not None:
            plans = eval_plans(spec, config.eval_episodes, config.eval_seed)
            num_eval_envs = min(config.eval_episodes, MAX_EVAL_ENVS)
            evaluator = Evaluator(eval_policy, lambda: make_eval_env(num_eval_envs, budget.evaluator), plans, config)
        entry = RUNTIMES[config.name]
        entry.build.check(config)
        runtime = entry.build(
            config,
            budget,
            spec=spec,
            workers=_workers(envs, config, policy, make_sampler, seed),
            actor=ActorServer(actor_policy, store, device, merge=config.max_staleness > 0),
            learner=Learner(make_algorithm(policy), store),
            ledger=Ledger(sum(map(len, envs)), config.max_staleness),
            store=store,
            evaluator=evaluator,
            relabel=relabel,
        )
        opened.pop_all()
        return runtime


def _workers(
    envs: list[list[VecEnv]], config: RuntimeConfig, policy: Policy, make_sampler: SamplerFactory, seed: int
) -> list[EnvWorker]:
    """Build the env workers, whose groups have consecutive env seeds."""
    first_seed, workers = first_env_seed(Purpose.TRAINING, seed), []
    for index, groups in enumerate(envs):
        sampled = []
        for env in groups:
            sampled.append((env, make_sampler(env.spec, env.num_envs, first_seed)))
            first_seed += env.num_envs
        workers.append(EnvWorker(sampled, index, config.decisions, policy.execute, policy.noise_shape, seed))
    return workers


def thread_budget(config: RuntimeConfig, device: torch.device) -> threads.ThreadBudget:
    """Return the thread budget of the runtime that ``config`` names."""
    runtime = RUNTIMES[config.name].build
    return threads.plan(config, device, overlaps=runtime.overlaps, evaluates_aside=runtime.evaluates_aside)


def group_sizes(num_envs: int, num_workers: int, groups_per_worker: int) -> list[list[int]]:
    """Return the envs of each group of each worker, as even as possible, without empty groups and workers.

    >>> group_sizes(10, 2, 2), group_sizes(1, 1, 2)
    ([[3, 3], [2, 2]], [[1]])
    """
    groups = num_workers * groups_per_worker
    sizes = [num_envs // groups + (index < num_envs % groups) for index in range(groups)]
    workers = [sizes[first : first + groups_per_worker] for first in range(0, groups, groups_per_worker)]
    filled = [[size for size in worker if size] for worker in workers]
    return [worker for worker in filled if worker]


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; auto is CUDA if there is one. UserError for cuda without a CUDA device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but this machine (or this build of torch) has no CUDA device; use device=auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _module(policy: Policy) -> nn.Module:
    assert isinstance(policy, nn.Module), "a Policy is a torch module (embodied.core.protocols)"
    return policy
