"""What a ManiSkill environment offers: vectors of the state, limits of actions, modes, cameras, outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.adapters.maniskill.request import OUTCOMES


@dataclass(frozen=True, slots=True)
class Description:
    """What a built environment says about itself."""

    terms: tuple[tuple[str, int], ...]
    """Path and size of every vector of the state, in the order of the state."""
    privileged: tuple[str, ...]
    """Paths of those that observations with images do not have."""
    cameras: tuple[str, ...]
    """Names of the cameras."""
    control_mode: str
    """Control mode that acts."""
    reward_modes: tuple[str, ...]
    """Reward modes that it can compute."""
    action_names: tuple[str, ...]
    """Names of the A entries of an action, without the control mode."""
    low: tuple[float, ...]
    """Lower limit of each entry of an action."""
    high: tuple[float, ...]
    """Upper limit of each entry of an action."""
    outcomes: tuple[str, ...]
    """Which of success and fail it evaluates."""
    robot: str
    """Name of the robot."""
    control_dt_s: float
    """Duration of a control step, s."""
    max_episode_steps: int | None
    """Time limit with which ManiSkill registers it, control steps."""


def describe(env: Any, max_episode_steps: int | None) -> Description:
    """Describe an environment, and change its obs_mode.

    UserError for an action space that is not made of bounded boxes.
    """
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    env.reset(seed=0)
    info, rewards = env.get_info(), _reward_modes(env)
    vectors = _flat(env._get_obs_state_dict(info))
    env._obs_mode, env.obs_mode_struct = "rgb", parse_obs_mode_to_struct("rgb")
    measured = _flat(env._get_obs_state_dict(info))
    space = env.single_action_space
    boxes = dict(space.spaces) if hasattr(space, "spaces") else {"": space}
    limits = [np.stack([box.low, box.high]) for box in boxes.values() if hasattr(box, "low")]
    if len(limits) < len(boxes) or not np.isfinite(np.concatenate(limits, axis=-1)).all():
        raise UserError(f"task.control_mode={control_mode(env)}: its actions have no finite limits: {space}")
    low, high = np.concatenate(limits, axis=-1).tolist()
    names = [f"{robot}{'/' if robot else ''}{i}" for robot, box in boxes.items() for i in range(box.shape[0])]
    return Description(
        terms=tuple((path, value.reshape(1, -1).shape[-1]) for path, value in vectors.items()),
        privileged=tuple(path for path in vectors if path not in measured),
        cameras=tuple(env._sensors),
        control_mode=control_mode(env),
        reward_modes=tuple(rewards),
        action_names=tuple(names),
        low=tuple(low),
        high=tuple(high),
        outcomes=tuple(name for name in OUTCOMES if name in info),
        robot="+".join(agent.uid for agent in agents(env)),
        control_dt_s=1.0 / env.control_freq,
        max_episode_steps=max_episode_steps,
    )


def agents(env: Any) -> list[Any]:
    """Return the robots of an environment. UserError if it has none."""
    if env.agent is None:
        raise UserError(f"{type(env).__name__} of ManiSkill has no robot, so no actions")
    return list(getattr(env.agent, "agents", [env.agent]))


def _reward_modes(env: Any) -> list[str]:
    """Return the reward modes that the environment can compute; for some of those that it lists it raises."""
    from mani_skill.utils import common

    found, present = [], env._reward_mode
    action, info = common.batch(common.to_tensor(env.single_action_space.sample())), env.get_info()
    obs = env.get_obs(info, unflattened=True)
    for mode in env.SUPPORTED_REWARD_MODES:
        env._reward_mode = mode
        try:
            env.get_reward(obs=obs, action=action, info=info)
        except (NotImplementedError, RuntimeError):
            continue
        found.append(mode)
    env._reward_mode = present
    return found


def control_mode(env: Any) -> str:
    """Return the control mode; of several robots, that of the first."""
    return str(agents(env)[0].control_mode)


def _flat(node: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors [N] and [N, D] under a node by path, in the order of ``embodied.data.maniskill``."""
    if isinstance(node, Tensor):
        return {name: node} if node.ndim <= 2 else {}
    found: dict[str, Tensor] = {}
    for key in sorted(node):
        found |= _flat(node[key], f"{name}/{key}" if name else key)
    return found
