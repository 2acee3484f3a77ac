"""Checks of a whole environment, for the tests of a new simulator.

check_env(lambda num_envs: MySimulator(num_envs))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.core.contract import check_obs, check_timestep
from embodied.core.episodes import PlanList
from embodied.core.errors import UserError
from embodied.core.protocols import ExactResume, VecEnv
from embodied.core.spec import Discrete, EnvSpec
from embodied.core.types import Timestep
from envs.common.sampler import SamplerSetup, UniformConfig, UniformSampler, first_episodes

CHUNK = 3  # actions per chunk


def check_env(make: Callable[[int], VecEnv], num_envs: int = 4, seed: int = 0) -> None:
    """Check that an environment keeps the contract of a ``VecEnv``; UserError with the rule that it breaks.

    make: builds an env of so many copies. Checked are shapes and types, ends of episodes and SAME_STEP autoreset, time
    limits, bad actions, and exact resume if the env has it. An episode must depend only on its plan and actions.
    """
    env = make(num_envs)
    steps = 2 * env.spec.max_episode_steps // CHUNK + 2
    actions = [random_actions(env.spec, num_envs, CHUNK, t) for t in range(steps)]
    done = _rollout(env, actions, seed)
    lengths = [int(length) for step in done for length in step.episodes.length_M]
    _require(env, bool(lengths), f"no episode ended in {steps * CHUNK} control steps, more than twice the time limit")
    _require(env, max(lengths) <= env.spec.max_episode_steps, "an episode lasted longer than its time limit")
    _check_plans(make, env, actions, done, seed)
    _check_bad_actions(env)
    if isinstance(env, ExactResume):
        again, resumed = make(num_envs), make(num_envs)
        assert isinstance(again, ExactResume)
        assert isinstance(resumed, ExactResume)
        _check_resume(again, resumed, actions, seed)
    env.close()


def random_actions(spec: EnvSpec, num_envs: int, num_actions: int, seed: int) -> Tensor:
    """Draw chunks from the action space, [N, E, A]; a function of the arguments."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_envs, num_actions, spec.action_dim)
    if isinstance(spec.action, Discrete):
        return torch.randint(spec.action.n, shape, generator=generator)
    return 2 * torch.rand(shape, generator=generator) - 1


def _sampler(env: VecEnv, seed: int) -> UniformSampler:
    """Return a uniform sampler for an env."""
    return UniformSampler(env.spec, UniformConfig(), SamplerSetup(env.num_envs, seed))


def _rollout(env: VecEnv, actions: list[Tensor], seed: int) -> list[Timestep]:
    """Reset an env, execute the chunks, and check the contract of all observations and timesteps."""
    check_obs(env, env.reset(_sampler(env, seed)), env.num_envs, "reset()")
    done = []
    for action in actions:
        done.append(env.step(action))
        check_timestep(env, done[-1], action.shape[1])
    return done


def _check_plans(
    make: Callable[[int], VecEnv], env: VecEnv, actions: list[Tensor], done: list[Timestep], seed: int
) -> None:
    """Check that the first episode of the last env is the same without the other envs."""
    last = env.num_envs - 1
    alone = make(1)
    alone.reset(PlanList(first_episodes(env.spec, 1, seed + last), 1))
    for action, step in zip(actions, done, strict=True):
        mine = alone.step(action[last:])
        same = torch.equal(mine.reward_NE[0], step.reward_NE[last])
        _require(env, same, "an episode must be a function of its plan and actions, whatever the other envs do")
        if len(mine.final_ids):
            break
    alone.close()


def _check_bad_actions(env: VecEnv) -> None:
    """Check that ``step`` raises ValueError for chunks of a wrong shape and for NaN."""
    good = random_actions(env.spec, env.num_envs, CHUNK, 0)
    bad = {"one row too few": good[1:], "one entry too many": torch.cat([good, good[..., :1]], -1)}
    if not isinstance(env.spec.action, Discrete):
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
    drawing, resumed = _sampler(env, seed), _sampler(other, seed)
    env.reset(drawing)
    for action in actions[:half]:
        env.step(action)
    resumed.load_state_dict(drawing.state_dict())
    other.load_state_dict(env.state_dict(), resumed)
    for action in actions[half:]:
        same = torch.equal(env.step(action).reward_NE, other.step(action).reward_NE)
        _require(env, same, "an env that has loaded a state must go on exactly")


def _require(env: VecEnv, kept: bool, rule: str) -> None:
    """Raise UserError with the rule unless the env keeps it."""
    if not kept:
        raise UserError(f"environment '{env.spec.task}' breaks the contract of a VecEnv: {rule}")
