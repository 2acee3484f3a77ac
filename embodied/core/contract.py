"""Checks of the rules that the outputs of a VecEnv must keep. Every error names the rule that is broken."""

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.errors import UserError
from embodied.core.types import Obs, Timestep


def check_obs(env: VecEnv, obs: Obs, rows: int, what: str) -> None:
    """Raise UserError unless ``obs`` has ``rows`` observations that fit ``env.spec``. what: its origin, in words."""
    expected = env.spec.arrays
    if env.spec.cameras and env.spec.instructions:
        expected["instruction"] = (), "int64"
    for key, (shape, dtype) in expected.items():
        _require(env, key in obs, f"{what} lacks '{key}', which the spec describes; it has: {', '.join(obs)}")
        _check_tensor(env, f"{what}['{key}']", obs[key], (rows, *shape), getattr(torch, dtype))


def check_timestep(env: VecEnv, step: Timestep, num_actions: int, rows: Tensor | None = None) -> None:
    """Raise UserError unless ``step`` results from chunks of ``num_actions``. rows: its envs [n]; None: all."""
    check_types(env, step, num_actions, rows)
    check_ends(env, step, rows)
    check_executed(env, step, num_actions)
    check_outcomes(env, step)


def check_types(env: VecEnv, step: Timestep, num_actions: int, rows: Tensor | None = None) -> None:
    """Raise UserError unless all tensors of ``step`` have their shapes and types, and finite values."""
    num = env.num_envs if rows is None else len(rows)
    check_obs(env, step.obs, num, "step().obs")
    _check_tensor(env, "reward_NE", step.reward_NE, (num, num_actions), torch.float32)
    _check_tensor(env, "terminated_N", step.terminated_N, (num,), torch.bool)
    _check_tensor(env, "truncated_N", step.truncated_N, (num,), torch.bool)
    _check_tensor(env, "num_steps_N", step.num_steps_N, (num,), torch.int64)


def check_ends(env: VecEnv, step: Timestep, rows: Tensor | None = None) -> None:
    """Raise UserError unless the ends of episodes and the last observations of these belong together."""
    both_N = step.terminated_N & step.truncated_N
    _require(env, not both_N.any(), "an episode cannot be terminated and truncated at once")
    ended = (step.terminated_N | step.truncated_N).nonzero().squeeze(-1)
    matching = step.final_ids.tolist() == ended.tolist()
    _require(env, matching, "final_ids must be the rows that terminated or were truncated, in order")
    check_obs(env, step.final_obs, len(ended), "step().final_obs")
    complete = not len(ended) or set(step.final_obs) == set(step.obs)
    _require(env, complete, f"final_obs has {sorted(step.final_obs)}, must have the keys of obs")
    matching = step.episodes.env_id_M.tolist() == (ended if rows is None else rows[ended]).tolist()
    _require(env, matching, "episodes must have one row for each of final_ids")


def check_executed(env: VecEnv, step: Timestep, num_actions: int) -> None:
    """Raise UserError unless envs executed their chunks to the end, or to the end of their episode."""
    ended_N = step.terminated_N | step.truncated_N
    least_N = torch.where(step.truncated_N, 0, 1)  # 0: the simulation diverged
    possible_N = (step.num_steps_N >= least_N) & (step.num_steps_N <= num_actions)
    _require(env, possible_N.all(), f"num_steps_N must be 1 to {num_actions}, the actions of the chunk")
    whole = (step.num_steps_N[~ended_N] == num_actions).all()
    _require(env, whole, "an env whose episode has not ended must execute the whole chunk")
    late_NE = torch.arange(num_actions)[None] >= step.num_steps_N[:, None]
    _require(env, (step.reward_NE[late_NE] == 0).all(), "rewards after the end of an episode must be 0")


def check_outcomes(env: VecEnv, step: Timestep) -> None:
    """Raise UserError unless ``step`` reports the outcomes of the spec."""
    wanted = env.spec.outcomes
    _require(env, set(step.info) == set(wanted), f"info has {sorted(step.info)}, must have the outcomes {list(wanted)}")
    for outcomes in (step.episodes.once, step.episodes.at_end):
        exact = set(outcomes) == set(wanted)
        _require(env, exact, f"episodes must have exactly the outcomes of the spec, {list(wanted)}")


def check_state(state: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless ``state`` has every entry of an env's present state, in the same shape."""
    for key, needed in present.items():
        if key not in state or state[key].shape != needed.shape:
            got = f"shape {tuple(state[key].shape)}" if key in state else "nothing"
            raise ValueError(f"env state '{key}': got {got}, needed shape {tuple(needed.shape)}")


def _check_tensor(env: VecEnv, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    got, wanted = (tensor.dtype, list(tensor.shape)), (dtype, list(shape))
    _require(env, got == wanted, f"{name} is {got[0]} {got[1]}, must be {wanted[0]} {wanted[1]}".replace("torch.", ""))
    if dtype == torch.float32:
        _require(env, tensor.isfinite().all(), f"{name} has values that are not finite")


def _require(env: VecEnv, kept: bool | Tensor, rule: str) -> None:
    if not kept:
        raise UserError(f"environment '{env.spec.task}' breaks the contract of a VecEnv: {rule}")
