"""Checks of a whole environment, for the tests of a new simulator.

check_env(lambda num_envs: MySimulator(num_envs))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from embodied.core.contract import check_obs, check_timestep
from embodied.core.episodes import EpisodePlans, EpisodeStats, Ints, PlanList
from embodied.core.errors import UserError
from embodied.core.protocols import Delayed, ExactResume, VecEnv
from embodied.core.spec import Box, EnvSpec
from embodied.core.types import Obs, Timestep
from envs.common.actions import random_actions
from envs.common.sampler import SamplerSetup, UniformConfig, UniformSampler

CHUNK = 3  # actions per chunk
TOLERANCE = 1e-4  # a simulator may round differently for another number of envs
FUNCTION_OF_ITS_PLAN = "an episode must be a function of its plan and actions, whatever the other envs do"


def check_env(make: Callable[[int], VecEnv], num_envs: int = 4, seed: int = 0) -> None:
    """Check that an environment keeps the contract of a ``VecEnv``; UserError with the rule that it breaks.

    make: builds an env of so many copies. Checked are shapes and types, ends of episodes and SAME_STEP autoreset, plans
    (time limits vary from episode to episode), bad actions, and exact resume if the env has it. An episode must depend
    only on its plan and actions: the rewards, ends and observations of each env's second episode must come again when
    that episode runs alone.
    """
    with ExitStack() as opened:

        def build(count: int) -> VecEnv:
            return opened.enter_context(closing(make(count)))

        env = build(num_envs)
        steps = 4 * env.spec.max_episode_steps // CHUNK + 4
        actions = [random_actions(env.spec.action, num_envs, CHUNK, t) for t in range(steps)]
        rollout = _run(env, actions, _Recording(env.spec, num_envs, seed))
        for k in range(num_envs):
            _check_again(build(1), rollout, actions, k)
        _check_bad_actions(env)
        if isinstance(env, ExactResume):
            again, resumed = build(num_envs), build(num_envs)
            assert isinstance(again, ExactResume)
            assert isinstance(resumed, ExactResume)
            _check_resume(again, resumed, actions, seed)


def _executed(env: VecEnv) -> int:
    """Return the control steps of a chunk."""
    return env.execute if isinstance(env, Delayed) else CHUNK


class _Recording(UniformSampler):
    """Draws episodes of all instructions, stages and time limits, and remembers what it drew and what it heard."""

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int) -> None:
        super().__init__(spec, UniformConfig(), SamplerSetup(num_envs, seed, stages=True))
        self.given = EpisodePlans.empty(num_envs)
        self.heard: list[list[int]] = []

    def start(self) -> EpisodePlans:
        plans = super().start()
        self.given = EpisodePlans.concatenate([plans])
        return plans

    def next(self, ended: EpisodeStats, steps_left_N: Tensor) -> EpisodePlans:
        self.heard.append(ended.env_id_M.tolist())
        plans = super().next(ended, steps_left_N)
        self.given.put(ended.env_id_M.numpy(), plans)
        return plans

    def _draw(self, ids: Ints, stagger: bool = False) -> EpisodePlans:
        return super()._draw(ids, stagger=True)


@dataclass(frozen=True, slots=True)
class _Rollout:
    """First observations and results of a run."""

    obs: Obs
    steps: list[Timestep]

    def before(self, t: int) -> Obs:
        """Return the observations that chunk t was executed on."""
        return self.steps[t - 1].obs if t else self.obs


def _run(env: VecEnv, actions: list[Tensor], sampler: _Recording) -> _Rollout:
    """Reset an env, execute the chunks, and check observations, timesteps and plans."""
    obs = env.reset(sampler)
    check_obs(env, obs, env.num_envs, "reset()")
    rollout = _Rollout(_copy(obs), [])
    for action in actions:
        given = EpisodePlans.concatenate([sampler.given])  # of the episodes in progress
        sampler.heard.clear()
        step = env.step(action)
        check_timestep(env, step, _executed(env))
        _check_ends(env, step, given, sampler)
        rollout.steps.append(step)
    ends = torch.stack([step.terminated_N | step.truncated_N for step in rollout.steps]).sum(0)
    _require(env, bool((ends >= 2).all()), f"no two episodes of an env ended in {len(actions) * CHUNK} control steps")
    return rollout


def _check_ends(env: VecEnv, step: Timestep, given: EpisodePlans, sampler: _Recording) -> None:
    """Check that the ended episodes are those that the sampler planned, and that it was asked for the next ones."""
    ids, stats = step.final_ids.numpy(), step.episodes
    planned = given.rows(ids)
    same = all((getattr(stats.plans, f.name) == getattr(planned, f.name)).all() for f in fields(EpisodePlans))
    _require(env, same, "an episode that ended must have the plan that the sampler drew for it")
    _require(env, sampler.heard == ([ids.tolist()] if len(ids) else []), "sampler.next must be called once per end")
    limit_M = torch.from_numpy(planned.time_limit_n)
    _require(env, bool((stats.length_M <= limit_M).all()), "an episode lasted longer than its plan's time limit")


def _check_again(env: VecEnv, rollout: _Rollout, actions: list[Tensor], k: int) -> None:
    """Check that the second episode of env k is the same when it runs alone, in ``env``."""
    ends = [t for t, step in enumerate(rollout.steps) if k in step.final_ids.tolist()]
    last = rollout.steps[ends[1]]
    row = last.final_ids.tolist().index(k)
    obs = env.reset(PlanList(last.episodes.plans.rows(slice(row, row + 1)), 1))
    for t in range(ends[0] + 1, ends[1] + 1):
        _require(env, _alike(obs, _rows(rollout.before(t), k)), FUNCTION_OF_ITS_PLAN)
        mine, theirs = env.step(actions[t][k : k + 1]), rollout.steps[t]
        same = torch.allclose(mine.reward_NE[0], theirs.reward_NE[k], atol=TOLERANCE)
        for name in ("terminated_N", "truncated_N", "num_steps_N"):
            same &= bool(getattr(mine, name)[0] == getattr(theirs, name)[k])
        _require(env, same, FUNCTION_OF_ITS_PLAN)
        obs = mine.obs
    _require(env, _alike(mine.final_obs, _rows(last.final_obs, row)), FUNCTION_OF_ITS_PLAN + " (see its final_obs)")


def _check_bad_actions(env: VecEnv) -> None:
    """Check that ``step`` raises ValueError for chunks of a wrong shape and for NaN."""
    good = random_actions(env.spec.action, env.num_envs, CHUNK, 0)
    bad = {"one row too few": good[1:], "one entry too many": torch.cat([good, good[..., :1]], -1)}
    if isinstance(env.spec.action, Box):
        bad["a NaN"] = torch.full_like(good, torch.nan)
    for fault, action in bad.items():
        try:
            env.step(action)
        except ValueError:
            continue
        _require(env, False, f"step must raise a ValueError for an action with {fault}")


def _check_resume(env: ExactResume, other: ExactResume, actions: list[Tensor], seed: int) -> None:
    """Check that ``other`` continues exactly from a state of ``env`` in the middle of the run."""
    half = len(actions) // 2
    drawing, resumed = (_Recording(env.spec, env.num_envs, seed) for _ in range(2))
    env.reset(drawing)
    for action in actions[:half]:
        env.step(action)
    resumed.load_state_dict(drawing.state_dict())
    other.load_state_dict(env.state_dict(), resumed)
    for action in actions[half:]:
        mine, theirs = env.step(action), other.step(action)
        same = torch.equal(mine.reward_NE, theirs.reward_NE) and _alike(mine.obs, theirs.obs, tolerance=0.0)
        _require(env, same, "an env that has loaded a state must go on exactly")


def _alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> bool:
    """Return whether two observations are equal but for rounding; images are bytes, so one level may differ."""
    if a.keys() != b.keys():
        return False
    for key, value in a.items():
        allowed = 1.0 if tolerance and value.dtype == torch.uint8 else tolerance
        if not bool(((value.double() - b[key].double()).abs() <= allowed).all()):
            return False
    return True


def _rows(obs: Obs, row: int) -> Obs:
    """Return one row of observations, [1, ...]."""
    return {key: value[row : row + 1] for key, value in obs.items()}


def _copy(obs: Obs) -> Obs:
    """Return observations that the env cannot overwrite."""
    return {key: value.clone() for key, value in obs.items()}


def _require(env: VecEnv, kept: bool, rule: str) -> None:
    """Raise UserError with the rule unless the env keeps it."""
    if not kept:
        raise UserError(f"environment '{env.spec.task}' breaks the contract of a VecEnv: {rule}")
