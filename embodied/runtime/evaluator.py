"""Evaluation of a policy: fixed episodes at full length, actions without exploration.

    weights to deploy ──► evaluate(policy, env, plans, seed) ──► {success_at_end, ...}

A runtime polls its evaluator between two iterations. If ``eval_every`` iterations have passed, it evaluates at once, or
in a thread while training goes on, and has the result at a later poll.

The best of many evaluations on the same episodes is too good by chance. So one that reaches ``confirm_at`` is followed
by a second evaluation of the same weights, on twice as many episodes, which no other evaluation has.
"""

import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from embodied.core.algorithm import Metrics
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeStats
from embodied.core.execution import EvalRollout
from embodied.core.policy import Policy
from embodied.core.seeds import SEEDS
from embodied.core.spec import SUCCESS, TRAIN, EnvSpec
from embodied.core.statistics import wilson_interval
from embodied.runtime import threads
from embodied.runtime.config import EvalNoise, RuntimeConfig
from embodied.runtime.episode_records import ActionHashes, records
from embodied.runtime.threads import ThreadGroup
from embodied.runtime.watch import Track

CONFIRMED_BY = 2  # times the episodes of another evaluation: fewer confirm a policy that is worse too often
MAX_EVAL_ENVS = 512  # more envs cost memory and save no time
Weights = Mapping[str, Tensor]


def evaluate(
    policy: Policy,
    env: VecEnv,
    plans: EpisodePlans,
    seed: int,
    noise: EvalNoise = "zero",
    stop: threading.Event | None = None,
    watch: Callable[[float], None] | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Run the episodes ``plans`` to their ends, one at a time in each env (which must not be more than the plans).

    Return ``summary`` with ``noise``, or {} if ``stop`` was set meanwhile. seed: only reported. watch: gets the share
    that is done. keep: ``records`` then has a record of each episode.
    """
    hashes = ActionHashes(env) if keep else None
    ended = run_episodes(policy, env, plans, noise, stop, watch, hashes)
    if ended is None:
        return {}
    kept = {} if hashes is None else {"records": records(ended, env.spec, hashes)}
    return summary(ended, env.spec, seed) | {"noise": noise} | kept


def run_episodes(
    policy: Policy,
    env: VecEnv,
    plans: EpisodePlans,
    noise: EvalNoise = "zero",
    stop: threading.Event | None = None,
    watch: Callable[[float], None] | None = None,
    hashes: ActionHashes | None = None,
) -> EpisodeStats | None:
    """Run the episodes ``plans`` as ``evaluate`` does; return them in the order of their seeds, or None if stopped.

    Every plan is run once, in the env that is free first, so short episodes do not count more. Fillers are not awaited.
    """
    rollout = EvalRollout(policy, env, plans, seeded=noise == "seeded")
    parts: list[EpisodeStats] = []
    while sum(map(len, parts)) < int((~plans.filler_n).sum()):
        if stop is not None and stop.is_set():
            return None
        step = rollout.step()
        parts.append(step.episodes.counted())
        if hashes is not None:
            hashes.add(rollout.action, step)
        if watch is not None:
            watch(rollout.share)
    ended = EpisodeStats.concatenate(parts)
    return ended.rows(torch.from_numpy(ended.plans.seed_n).argsort(stable=True))


def summary(stats: EpisodeStats, spec: EnvSpec, seed: int) -> dict[str, Any]:
    """Summarise M episodes: task, ``rates``, return_mean, episode_length_mean (control steps), seed.

    If the instructions are in several splits, ``splits`` has the rates per split, and under ``goals`` per goal of that
    split, over all paraphrases.
    """
    result = {
        "task": spec.task,
        **rates(stats),
        "return_mean": rounded(float(stats.return_M.double().mean())),
        "episode_length_mean": round(float(stats.length_M.double().mean()), 4),
        "seed": seed,
    }
    if len(set(spec.splits)) > 1:
        rows: dict[str, dict[str, list[int]]] = {split: {} for split in spec.splits}  # by split and goal
        for row, i in enumerate(stats.plans.instruction_n.tolist()):
            rows[spec.splits[i]].setdefault(spec.goals[i], []).append(row)
        result["splits"] = {
            split: {
                **rates(stats.rows(torch.tensor([row for group in goals.values() for row in group]))),
                "goals": {goal: rates(stats.rows(torch.tensor(group))) for goal, group in sorted(goals.items())},
            }
            for split, goals in rows.items()
            if goals
        }
    return result


def rounded(value: float) -> float:
    """Return the value with four decimals, or with four digits if these would be 0."""
    return round(value, 4) if abs(value) >= 1e-3 else float(f"{value:.4g}")


def rates(stats: EpisodeStats) -> dict[str, Any]:
    """Return the number of episodes (at least one) and the share of them in which each outcome held.

    Keys: episodes, <outcome>_once, <outcome>_at_end, and the Wilson interval success_at_end_ci95.
    """
    episodes = len(stats)
    found: dict[str, Any] = {"episodes": episodes}
    for name in stats.at_end:
        found[f"{name}_once"] = int(stats.once[name].sum()) / episodes
        found[f"{name}_at_end"] = int(stats.at_end[name].sum()) / episodes
    if SUCCESS in stats.at_end:
        found["success_at_end_ci95"] = list(wilson_interval(int(stats.success_at_end_M.sum()), episodes))
    return found


def trained_rates(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``rates`` of an evaluation on instructions that are trained on: all, unless some are held out."""
    rates: Mapping[str, Any] = result.get("splits", {}).get(TRAIN, result)
    return rates


def rollout_metrics(episodes: EpisodeStats, spec: EnvSpec) -> Metrics:
    """Return means over the episodes that began as the task begins, and under ``rollout/other_starts`` over the others.

    If ``spec`` has several goals, also the success of each, over the first kind. See ``Iteration.metrics``.
    """
    own_M = torch.from_numpy(episodes.plans.own_n(spec.max_episode_steps))
    metrics: Metrics = {}
    for prefix, rows_M in (("rollout", own_M), ("rollout/other_starts", ~own_M)):
        if rows_M.any():
            kind = episodes.rows(rows_M)
            metrics[f"{prefix}/return_mean"] = float(kind.return_M.mean())
            metrics |= {f"{prefix}/{name}_once": float(held_M.float().mean()) for name, held_M in kind.once.items()}
            metrics |= {f"{prefix}/{name}_at_end": float(held_M.float().mean()) for name, held_M in kind.at_end.items()}
            metrics[f"{prefix}/episode_length_mean"] = float(kind.length_M.float().mean())
    if own_M.any() and spec.has_success and len(set(spec.goals)) > 1:
        own = episodes.rows(own_M)
        solved: defaultdict[str, list[bool]] = defaultdict(list)
        for i, success in zip(own.plans.instruction_n.tolist(), own.success_at_end_M.tolist(), strict=True):
            solved[re.sub(r"\W+", "_", spec.goals[i])].append(success)
        metrics |= {f"rollout/goals/{goal}/success_at_end": fmean(values) for goal, values in sorted(solved.items())}
    return metrics


class Evaluator:
    """Evaluates published weights by a copy of the policy; the envs are built at the first evaluation.

    plans: a number of episodes of a seed. num_threads: of torch. confirm_at: success, on instructions that are trained
    on, from which the result has a ``confirmation``: the result on fresh episodes, whose seed is above those of users.
    group: in a thread of it one evaluation at a time goes on beside training, until the group ends; None: ``poll``
    evaluates.
    """

    def __init__(
        self,
        policy: Policy,
        make_env: Callable[[], VecEnv],
        plans: Callable[[int, int], EpisodePlans],
        config: RuntimeConfig,
        num_threads: int = 1,
        confirm_at: float | None = None,
        group: ThreadGroup | None = None,
    ) -> None:
        self.policy, self.make_env, self.plans = policy.eval(), make_env, plans
        self.config, self.num_threads, self.confirm_at = config, num_threads, confirm_at
        self.env: VecEnv | None = None
        self.last_iteration = 0  # of the last evaluation that began
        self.evaluated_at = 0  # of the last one that has given a result
        self.weights: Weights = {}  # that the last result is of
        self.track = Track("evaluator", "idle")
        self._group = group
        self._results: queue.SimpleQueue[tuple[dict[str, Any], Weights]] = queue.SimpleQueue()
        self._given = False  # an evaluation, whose result was not taken yet
        self._after: int | None = None

    @property
    def busy(self) -> bool:
        """Whether it evaluates now."""
        return self._given and self._results.empty()

    def poll(
        self, weights: Callable[[], Weights], iteration: int, env_steps: int, stop: threading.Event
    ) -> dict[str, Any] | None:
        """Return the result of an evaluation that has finished, else None, also if it was stopped; begin one when due.

        weights: returns a copy of those to deploy. iteration, env_steps: that trained them. stop: ends an evaluation in
        this call.
        """
        result = self._take()
        if not self._given and 0 < self.config.eval_every <= iteration - self.last_iteration:
            self._given = True
            if self._group is None:
                self._evaluate(weights(), iteration, env_steps, stop)
                return self._take()
            evaluate = partial(self._evaluate, weights(), iteration, env_steps, self._group.stopping)
            self._group.spawn("evaluator", evaluate)
        return result

    def forget(self, last_iteration: int) -> None:
        """Drop the result under way: its weights are lost. last_iteration: of the last evaluation that counts."""
        self.last_iteration = self.evaluated_at = last_iteration
        self._after = last_iteration if self._given else None

    def _take(self) -> dict[str, Any] | None:
        """Return the result of a finished evaluation whose weights were not lost; None if there is none."""
        if self._results.empty():
            return None
        (result, self.weights), self._given = self._results.get(), False
        if self._after is not None:
            result, self.last_iteration, self._after = {}, self._after, None
        self.evaluated_at = result.get("iteration", self.evaluated_at)
        return result or None

    def _evaluate(self, weights: Weights, iteration: int, env_steps: int, stop: threading.Event) -> None:
        """Evaluate weights, and put the result with their iteration and env_steps, or {} if ``stop`` was set."""
        self.last_iteration = iteration
        threads.use(self.num_threads)
        with self.track.during("evaluate"):
            self.policy.load_state_dict(weights)
            if self.env is None:
                self.env = self.make_env()
            noise, seed, fresh = self.config.eval_noise, self.config.eval_seed, SEEDS + iteration
            episodes = self.config.eval_episodes
            result = evaluate(self.policy, self.env, self.plans(episodes, seed), seed, noise, stop)
            if result and self.confirm_at is not None and trained_rates(result)["success_at_end"] >= self.confirm_at:
                plans = self.plans(CONFIRMED_BY * episodes, fresh)
                confirmation = evaluate(self.policy, self.env, plans, fresh, noise, stop)
                result = result | {"confirmation": confirmation} if confirmation else {}
        self._results.put(({**result, "iteration": iteration, "env_steps": env_steps} if result else {}, weights))

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None
