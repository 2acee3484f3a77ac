"""Execute a policy's chunks in an environment: the same limits and devices in training, evaluation and videos."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from embodied.core.protocols import VecEnv
from embodied.core.spec import Box
from embodied.core.types import Obs, Timestep


def execute(env: VecEnv, chunk_NHA: Tensor, num_actions: int) -> tuple[Tensor, Timestep]:
    """Execute the first ``num_actions`` actions of a chunk [N, H, A]; return them as executed, and the result.

    Actions of a ``Box`` are clipped to [-1, 1]. What is returned is on the CPU, whatever the devices of policy and env.
    """
    action_NEA = chunk_NHA[:, :num_actions]
    if isinstance(env.spec.action, Box):
        action_NEA = action_NEA.clamp(-1, 1)
    step = env.step(action_NEA.to(env.device))
    return action_NEA.cpu(), on_cpu(step)


def on_cpu(step: Timestep) -> Timestep:
    """Return a result with the tensors of every row on the CPU. ``episodes`` are there already."""
    if step.reward_NE.device.type == "cpu":
        return step
    return replace(
        step,
        obs=obs_on_cpu(step.obs),
        final_obs=obs_on_cpu(step.final_obs),
        info=obs_on_cpu(step.info),
        **{name: getattr(step, name).cpu() for name in ROWS},
    )


def obs_on_cpu(obs: Obs) -> Obs:
    """Return observations on the CPU."""
    return {key: value.cpu() for key, value in obs.items()}


ROWS = ("reward_NE", "terminated_N", "truncated_N", "num_steps_N", "final_ids")
"""Fields of a ``Timestep`` with a row for each env."""
