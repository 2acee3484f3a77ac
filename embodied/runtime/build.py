"""Build the runtime that the config names, from the factories of its parts.

config, factories ──► Recipe ──► RUNTIMES[config.name].assemble ──► runtime, ready to iterate or to load a state
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from embodied.core.device import resolve_device
from embodied.core.errors import UserError
from embodied.core.protocols import Algorithm, Policy
from embodied.core.spec import EnvSpec
from embodied.runtime import threads
from embodied.runtime.api import Runtime, RuntimeConfig
from embodied.runtime.base import RUNTIMES
from embodied.runtime.recipe import EnvFactory, PlanFactory, Recipe, Relabel, SamplerFactory


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
    runtime = RUNTIMES[config.name].build
    runtime.check(config)
    device = resolve_device(config.device)
    recipe = Recipe(
        config=config,
        budget=thread_budget(config, device),
        device=device,
        sizes=group_sizes(num_envs, config.num_env_workers, groups_per_worker(config, device)),
        seed=seed,
        make_env=make_env,
        make_sampler=make_sampler,
        make_policy=make_policy,
        make_algorithm=make_algorithm,
        make_eval_env=make_eval_env,
        eval_plans=eval_plans,
        relabel=relabel,
    )
    return runtime.assemble(recipe)


def thread_budget(config: RuntimeConfig, device: torch.device) -> threads.ThreadBudget:
    """Return the thread budget of the runtime that ``config`` names."""
    runtime = RUNTIMES[config.name].build
    return threads.plan(config, device, overlaps=runtime.overlaps, evaluates_aside=runtime.evaluates_aside)


def groups_per_worker(config: RuntimeConfig, device: torch.device) -> int:
    """Return the number of env groups of each worker; device: that of the actor."""
    runtime = RUNTIMES[config.name].build
    apart = runtime.separate_processes or (runtime.overlaps and device.type == "cuda")
    return config.groups_per_worker or (2 if apart and config.max_staleness > 0 else 1)


def group_sizes(num_envs: int, num_env_workers: int, groups_per_worker: int) -> list[list[int]]:
    """Return the envs of each group of each worker, as even as possible, without empty groups and workers.

    >>> group_sizes(10, 2, 2), group_sizes(1, 1, 2)
    ([[3, 3], [2, 2]], [[1]])
    """
    groups = num_env_workers * groups_per_worker
    sizes = [num_envs // groups + (index < num_envs % groups) for index in range(groups)]
    workers = [sizes[first : first + groups_per_worker] for first in range(0, groups, groups_per_worker)]
    filled = [[size for size in worker if size] for worker in workers]
    return [worker for worker in filled if worker]
