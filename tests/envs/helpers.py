"""What tests of environments share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from embodied.core.types import Obs, Timestep
from embodied.envs import SamplerSetup, make_pool, make_sampler
from embodied.envs.base.episodic import EpisodicEnv
from embodied.envs.mujoco.config import ControlConfig
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.robots.panda import Panda

PANDA = Panda(ControlConfig())
TASK_NAMES = ("reach", "detour", "push", "lift", "pick_place", "stack", "tabletop")


def pool(task: str = "lift", num_envs: int = 4, max_episode_steps: int | None = None, **options: Any) -> MujocoPool:
    """A pool on one thread whose first episodes have begun.

    config: further options of the task. options: those of make_pool, and fields of ``SamplerSetup``.
    """
    config = dict(options.pop("config", {}))
    if max_episode_steps is not None:
        config["max_episode_steps"] = max_episode_steps
    setup = {field.name: options.pop(field.name) for field in fields(SamplerSetup) if field.name in options}
    env = make_pool(task, config, num_envs=num_envs, **{"num_threads": 1, **options})
    restart(env, **{"seed": 0, **setup})
    return env


def restart(env: MujocoPool, seed: int | None = None, **setup: Any) -> Obs:
    """New episodes everywhere: the first ones of seeds from ``seed`` on, or the next ones."""
    if seed is None:
        assert env.sampler is not None
        return env.reset(env.sampler)
    return env.reset(make_sampler(env, seed, **setup))


def actions(seeds: list[int], steps: int, action_dim: int, salt: int = 0) -> Tensor:
    """Random actions [N, steps, A], a function of each env's seed (and salt) alone."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(1000 * salt + seed)
        rows.append(torch.rand(steps, action_dim, generator=generator) * 2 - 1)
    return torch.stack(rows)


def assert_same(
    a: Timestep, b: Timestep, rows_a: slice | Tensor = slice(None), rows_b: slice | Tensor = slice(None)
) -> None:
    """Bit-equality of what two pools returned for some of their envs."""
    for key in a.obs:
        torch.testing.assert_close(a.obs[key][rows_a], b.obs[key][rows_b], rtol=0, atol=0)
    for name in ("reward_NE", "terminated_N", "truncated_N", "num_steps_N"):
        torch.testing.assert_close(getattr(a, name)[rows_a], getattr(b, name)[rows_b], rtol=0, atol=0)


def cut_after_three(env: EpisodicEnv, steps: int, in_a_row_N: Tensor, other: EpisodicEnv | None = None) -> int:
    """Let the expert act, and ``other`` do the same: episodes end, as truncations, where three steps in a row succeed.

    Those of every eighth env seed do not. in_a_row_N: successful steps so far, int64; goes on counting. Return the
    number of episodes that ended.
    """
    cut = 0
    for _ in range(steps):
        action, may_cut_N = env.expert(), torch.from_numpy(env.plans.seed_n % 8 > 0)
        step = env.step(action)
        in_a_row_N.add_(1).mul_(step.info["success"])
        assert step.truncated_N.tolist() == (may_cut_N & (in_a_row_N == 3)).tolist()
        assert step.episodes.success_at_end_M.all()
        in_a_row_N[step.truncated_N] = 0
        cut += len(step.episodes)
        if other is not None:
            assert_same(step, other.step(action))
    return cut


def assert_continues(task: str, sim: dict[str, Any], num_envs: int = 4, **setup: Any) -> None:
    """From its state a pool goes on bit for bit: a fresh one, and the same one going back. setup: of the sampler."""
    plan = actions(list(range(num_envs)), 30, 4)
    env = pool(task, num_envs, 9, sim=sim, seed=3, **setup)
    for t in range(13):
        env.step(plan[:, t])
    state = {key: value.clone() for key, value in env.state_dict().items()}
    assert env.sampler is not None
    drawn, obs = env.sampler.state_dict(), env.observe()
    expected = [env.step(plan[:, t]) for t in range(13, 30)]
    other = pool(task, num_envs, 9, sim=sim, seed=99)
    other.step(plan[:, 0])
    for resumed in (other, env):
        sampler = make_sampler(resumed, 3, **setup)
        sampler.load_state_dict(drawn)
        resumed.load_state_dict(state, sampler)
        torch.testing.assert_close(resumed.observe(), obs, rtol=0, atol=0)
        for before, t in zip(expected, range(13, 30), strict=True):
            after = resumed.step(plan[:, t])
            assert_same(before, after)
            torch.testing.assert_close(before.episodes.return_M, after.episodes.return_M, rtol=0, atol=0)
            assert before.episodes.length_M.tolist() == after.episodes.length_M.tolist()
            assert before.episodes.plans.instruction_n.tolist() == after.episodes.plans.instruction_n.tolist()
