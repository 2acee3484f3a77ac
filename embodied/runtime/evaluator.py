"""How good a policy is: full-length episodes from fixed initial states, deterministic actions, one episode per env.

    weights to deploy ──► evaluate(policy, env, episodes, seed) ──► {success_at_end, ...}

In a local run it has a thread of its own and judges the weights to deploy whenever ``eval_every`` iterations have
passed and it is free; in a sync run it is pumped between iterations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.protocols import Policy, VecEnv
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.statistics import wilson_interval
from embodied.core.types import EnvSpec, EpisodeStats
from embodied.runtime.api import RuntimeConfig


@torch.no_grad()
def evaluate(
    policy: Policy, env: VecEnv, episodes: int, seed: int, stop: threading.Event | None = None
) -> dict[str, Any]:
    """Run the first episode of each of the ``episodes`` envs of ``env`` to its end.

    Env i starts from state i of the seed; no two seeds share a state. Returns task, episodes, success_once,
    success_at_end, success_at_end_ci95 (Wilson), return_mean, episode_length_mean (control steps) and seed; where
    instructions are in several splits also splits (see ``summary``). An empty dict if ``stop`` was set meanwhile. The
    policy must not be changed by other threads meanwhile.
    """
    assert env.num_envs == episodes, f"one episode per env: {env.num_envs} envs, {episodes} episodes"
    assert isinstance(policy, nn.Module)
    device = next(policy.parameters()).device
    obs = env.reset(first_env_seed(Purpose.EVALUATION, seed))
    running = torch.ones(episodes, dtype=torch.bool)
    ended: list[EpisodeStats] = []
    while running.any():
        if stop is not None and stop.is_set():
            return {}
        sample = policy.act({key: value.to(device) for key, value in obs.items()}, None)
        step = env.step(sample.action_NHA[:, : policy.execute].cpu())
        stats = step.episodes
        first = running[stats.env_id_M]
        ended.append(EpisodeStats(*(getattr(stats, name)[first] for name in EpisodeStats.__slots__)))
        running[stats.env_id_M] = False
        obs = step.obs
    return summary(EpisodeStats.concatenate(ended), env.spec, seed)


def summary(stats: EpisodeStats, spec: EnvSpec, seed: int) -> dict[str, Any]:
    """Means over the M episodes of ``stats``, in the words of the eval command.

    Where the instructions of ``spec`` are in several splits, ``splits`` has the same rates for each of them, and under
    ``goals`` for each of its goals, over all paraphrases.
    """
    result = {
        "task": spec.task,
        **success_rates(stats, torch.arange(len(stats.env_id_M))),
        "return_mean": round(float(stats.return_M.double().mean()), 4),
        "episode_length_mean": round(float(stats.length_M.double().mean()), 4),
        "seed": seed,
    }
    if len(set(spec.instruction_splits)) > 1:
        result["splits"] = _by_split(stats, spec)
    return result


def _by_split(stats: EpisodeStats, spec: EnvSpec) -> dict[str, Any]:
    rows: dict[str, dict[str, list[int]]] = {split: {} for split in spec.instruction_splits}  # by split and goal
    for row, i in enumerate(stats.instruction_M.tolist()):
        rows[spec.instruction_splits[i]].setdefault(spec.instruction_goals[i], []).append(row)
    return {
        split: {
            **success_rates(stats, torch.tensor([row for group in goals.values() for row in group])),
            "goals": {goal: success_rates(stats, torch.tensor(group)) for goal, group in sorted(goals.items())},
        }
        for split, goals in rows.items()
        if goals
    }


def success_rates(stats: EpisodeStats, rows: Tensor) -> dict[str, Any]:
    """How many of the episodes ``rows`` (one at least) succeeded, with a Wilson interval."""
    episodes, successes = len(rows), int(stats.success_at_end_M[rows].sum())
    return {
        "episodes": episodes,
        "success_once": int(stats.success_once_M[rows].sum()) / episodes,
        "success_at_end": successes / episodes,
        "success_at_end_ci95": list(wilson_interval(successes, episodes)),
    }


class Evaluator:
    """A policy copy and evaluation envs (built when first needed) for ``evaluate`` on published weights."""

    def __init__(self, policy: Policy, make_env: Callable[[], VecEnv], config: RuntimeConfig) -> None:
        assert isinstance(policy, nn.Module)
        policy.eval()
        self.policy: Policy = policy
        self.make_env = make_env
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
        result = evaluate(self.policy, self.env, self.config.eval_episodes, self.config.eval_seed, stop)
        return {**result, "iteration": iteration, "env_steps": env_steps} if result else {}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None
