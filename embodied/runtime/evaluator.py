"""How good a policy is: fixed episodes at full length, deterministic actions.

    weights to deploy ──► evaluate(policy, env, plans, seed) ──► {success_at_end, ...}

In a local run it has a thread of its own and judges the weights to deploy whenever ``eval_every`` iterations have
passed and it is free; in a sync run it is pumped between iterations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.episodes import EpisodePlans, EpisodeStats, PlanList
from embodied.core.protocols import Policy, VecEnv
from embodied.core.spec import SUCCESS, EnvSpec
from embodied.core.statistics import wilson_interval
from embodied.runtime.api import RuntimeConfig

MAX_EVAL_ENVS = 512  # envs of an evaluation with more episodes; more of them cost memory and gain no time


@torch.no_grad()
def evaluate(
    policy: Policy, env: VecEnv, plans: EpisodePlans, seed: int, stop: threading.Event | None = None
) -> dict[str, Any]:
    """Run the episodes ``plans`` to their ends, as many at a time as ``env`` has envs (at most as many as plans).

    Every plan is run once, whichever env is free first, so short episodes do not count more. Returns ``summary`` of
    them; seed is only reported. An empty dict if ``stop`` was set meanwhile. The policy must not be changed by other
    threads meanwhile.
    """
    assert isinstance(policy, nn.Module)
    device = next(policy.parameters()).device
    obs = env.reset(PlanList(plans, env.num_envs))
    parts: list[EpisodeStats] = []
    while sum(map(len, parts)) < len(plans):
        if stop is not None and stop.is_set():
            return {}
        chunk = policy.plan({key: value.to(device) for key, value in obs.items()})
        step = env.step(chunk[:, : policy.execute].cpu())
        parts.append(PlanList.without_repeats(step.episodes))
        obs = step.obs
    ended = EpisodeStats.concatenate(parts)
    return summary(ended.rows(torch.from_numpy(ended.plans.seed_n).argsort(stable=True)), env.spec, seed)


def summary(stats: EpisodeStats, spec: EnvSpec, seed: int) -> dict[str, Any]:
    """Means over the M episodes of ``stats``: task, episodes, return_mean, episode_length_mean (control steps), seed.

    Where ``spec`` has success also success_once, success_at_end and its Wilson interval success_at_end_ci95; other
    outcomes as <name>_once and <name>_at_end. Where the instructions are in several splits, ``splits`` has the same
    rates for each of them, and under ``goals`` for each of its goals, over all paraphrases.
    """
    result = {
        "task": spec.task,
        **rates(stats),
        "return_mean": round(float(stats.return_M.double().mean()), 4),
        "episode_length_mean": round(float(stats.length_M.double().mean()), 4),
        "seed": seed,
    }
    if len(set(spec.splits)) > 1:
        result["splits"] = _by_split(stats, spec)
    return result


def _by_split(stats: EpisodeStats, spec: EnvSpec) -> dict[str, Any]:
    rows: dict[str, dict[str, list[int]]] = {split: {} for split in spec.splits}  # by split and goal
    for row, i in enumerate(stats.plans.instruction_n.tolist()):
        rows[spec.splits[i]].setdefault(spec.goals[i], []).append(row)
    return {
        split: {
            **rates(stats.rows(torch.tensor([row for group in goals.values() for row in group]))),
            "goals": {goal: rates(stats.rows(torch.tensor(group))) for goal, group in sorted(goals.items())},
        }
        for split, goals in rows.items()
        if goals
    }


def rates(stats: EpisodeStats) -> dict[str, Any]:
    """How many episodes there are (one at least), and in what share of them each outcome held.

    The success at the end comes with its Wilson interval.
    """
    episodes = len(stats)
    found: dict[str, Any] = {"episodes": episodes}
    for name in stats.at_end:
        found[f"{name}_once"] = int(stats.once[name].sum()) / episodes
        found[f"{name}_at_end"] = int(stats.at_end[name].sum()) / episodes
    if SUCCESS in stats.at_end:
        found["success_at_end_ci95"] = list(wilson_interval(int(stats.success_at_end_M.sum()), episodes))
    return found


class Evaluator:
    """A policy copy and evaluation envs (built when first needed) for ``evaluate`` on published weights."""

    def __init__(
        self, policy: Policy, make_env: Callable[[], VecEnv], plans: EpisodePlans, config: RuntimeConfig
    ) -> None:
        assert isinstance(policy, nn.Module)
        policy.eval()
        self.policy: Policy = policy
        self.make_env = make_env
        self.plans = plans
        self.config = config
        self.env: VecEnv | None = None
        self.last_iteration = 0

    def due(self, iteration: int) -> bool:
        """Whether eval_every iterations have passed since the last evaluation began."""
        return self.config.eval_every > 0 and iteration - self.last_iteration >= self.config.eval_every

    def run(
        self, weights: Mapping[str, Tensor], iteration: int, env_steps: int, stop: threading.Event | None = None
    ) -> dict[str, Any]:
        """``evaluate``'s result with iteration and env_steps of the weights; empty if ``stop`` was set meanwhile."""
        self.last_iteration = iteration
        self.policy.load_state_dict(weights)
        if self.env is None:
            self.env = self.make_env()
        result = evaluate(self.policy, self.env, self.plans, self.config.eval_seed, stop)
        return {**result, "iteration": iteration, "env_steps": env_steps} if result else {}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None
