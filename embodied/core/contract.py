"""Checks of the rules that the outputs of a VecEnv must keep. Every error names the rule that is broken."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.errors import UserError
from embodied.core.spec import Box
from embodied.core.types import Obs, Timestep


def check_obs(env: VecEnv, obs: Obs, rows: int, what: str) -> None:
    """Raise UserError unless ``obs`` holds ``rows`` observations that fit ``env.spec``.

    what: origin of ``obs`` for the message, such as ``step().obs``.
    """
    spec = env.spec
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"state": ((spec.state_dim,), torch.float32)}
    if spec.privileged:
        expected["privileged"] = (spec.privileged_dim,), torch.float32
    for camera in spec.cameras:
        expected[f"images.{camera.name}"] = (camera.height, camera.width, 3), torch.uint8
    if spec.cameras and spec.instructions:
        expected["instruction"] = (), torch.int64
    if spec.action_mask:
        assert not isinstance(spec.action, Box)
        expected["action_mask"] = (sum(spec.action.counts),), torch.bool
    for key, (shape, dtype) in expected.items():
        if key not in obs:
            raise _contract_error(env, f"{what} lacks '{key}', which the spec describes; it has: {', '.join(obs)}")
        _check_tensor(env, f"{what}['{key}']", obs[key], (rows, *shape), dtype)
        if dtype == torch.float32 and not bool(torch.isfinite(obs[key]).all()):
            raise _contract_error(env, f"{what}['{key}'] has values that are not finite")


def check_timestep(env: VecEnv, step: Timestep, num_actions: int, rows: Tensor | None = None) -> None:
    """Raise UserError unless ``step`` is a result of executing chunks of ``num_actions`` actions.

    rows: envs [n] of ``step``, in order (``VecEnv.receive``); None: all.
    """
    check_types(env, step, num_actions, rows)
    check_ends(env, step, rows)
    check_executed(env, step, num_actions)
    check_outcomes(env, step)


def check_types(env: VecEnv, step: Timestep, num_actions: int, rows: Tensor | None = None) -> None:
    """Raise UserError unless all tensors of ``step`` have their shapes and types, and finite values."""
    num = env.num_envs if rows is None else len(rows)
    check_obs(env, step.obs, num, "step().obs")
    _check_tensor(env, "reward_NE", step.reward_NE, (num, num_actions), torch.float32)
    for name in ("terminated_N", "truncated_N"):
        _check_tensor(env, name, getattr(step, name), (num,), torch.bool)
    _check_tensor(env, "num_steps_N", step.num_steps_N, (num,), torch.int64)
    if not bool(torch.isfinite(step.reward_NE).all()):
        raise _contract_error(env, "reward_NE has values that are not finite")


def check_ends(env: VecEnv, step: Timestep, rows: Tensor | None = None) -> None:
    """Raise UserError unless the ends of episodes and the last observations of these belong together."""
    if bool((step.terminated_N & step.truncated_N).any()):
        raise _contract_error(env, "an episode cannot be terminated and truncated at once")
    ended_N = step.terminated_N | step.truncated_N
    if step.final_ids.tolist() != ended_N.nonzero().squeeze(-1).tolist():
        raise _contract_error(env, "final_ids must be the rows that terminated or were truncated, in order")
    check_obs(env, step.final_obs, len(step.final_ids), "step().final_obs")
    if len(step.final_ids) and set(step.final_obs) != set(step.obs):
        raise _contract_error(env, f"final_obs has {sorted(step.final_obs)}, must have the keys of obs")
    ended = step.final_ids if rows is None else rows[step.final_ids]
    if step.episodes.env_id_M.tolist() != ended.tolist():
        raise _contract_error(env, "episodes must have one row for each of final_ids")


def check_executed(env: VecEnv, step: Timestep, num_actions: int) -> None:
    """Raise UserError unless envs executed their chunks to the end, or to the end of their episode."""
    ended_N = step.terminated_N | step.truncated_N
    least_N = torch.where(step.truncated_N, 0, 1)  # 0: the simulation diverged
    if bool((step.num_steps_N < least_N).any()) or int(step.num_steps_N.max()) > num_actions:
        raise _contract_error(env, f"num_steps_N must be 1 to {num_actions}, the actions of the chunk")
    if bool((step.num_steps_N[~ended_N] != num_actions).any()):
        raise _contract_error(env, "an env whose episode has not ended must execute the whole chunk")
    late_NE = torch.arange(num_actions)[None] >= step.num_steps_N[:, None]
    if bool((step.reward_NE[late_NE] != 0).any()):
        raise _contract_error(env, "rewards after the end of an episode must be 0")


def check_outcomes(env: VecEnv, step: Timestep) -> None:
    """Raise UserError unless ``step`` reports the outcomes of the spec."""
    if set(step.info) != set(env.spec.outcomes):
        raise _contract_error(env, f"info has {sorted(step.info)}, must have the outcomes {list(env.spec.outcomes)}")
    for outcomes in (step.episodes.once, step.episodes.at_end):
        if set(outcomes) != set(env.spec.outcomes):
            raise _contract_error(
                env, f"episodes must have exactly the outcomes of the spec, {list(env.spec.outcomes)}"
            )


def check_state(state: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless ``state`` has every entry of an env's present state, in the same shape."""
    for key, needed in present.items():
        if key not in state or state[key].shape != needed.shape:
            got = f"shape {tuple(state[key].shape)}" if key in state else "nothing"
            raise ValueError(f"env state '{key}': got {got}, needed shape {tuple(needed.shape)}")


def _check_tensor(env: VecEnv, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise UserError unless a tensor has the shape and the type that it must have."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise _contract_error(env, f"{name} is {got}, must be {str(dtype).removeprefix('torch.')} {list(shape)}")


def _contract_error(env: VecEnv, rule: str) -> UserError:
    """Return the error for a broken rule."""
    return UserError(f"environment '{env.spec.task}' breaks the contract of a VecEnv: {rule}")
