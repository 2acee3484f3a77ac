"""A ManiSkill environment: the request for it, and what it offers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, Box, CameraSpec, Term

INSTALL = "pip install -c constraints.txt -e '.[maniskill]'"
VULKAN = (
    "ManiSkill needs a Vulkan device even without rendering, and found none that works. As root, `bash "
    "envs/adapters/install_vulkan.sh` installs Mesa's software device on Debian and Ubuntu (Mesa 25 or newer)"
)
OUTCOMES = ("success", "fail")


@dataclass(frozen=True, slots=True)
class Request:
    """Which environment to build, with ManiSkill's own names of its options. None: the environment's default."""

    id: str
    robot_uids: str | None = None
    control_mode: str | None = None
    reward_mode: str | None = None
    obs_mode: str = "state_dict"
    sim_backend: str = "physx_cpu"
    cameras: tuple[CameraSpec, ...] = ()
    """Cameras that observations have."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a built environment says about itself."""

    terms: tuple[Term, ...]
    """Vectors of the state, in the order of the state; named by their paths."""
    privileged: tuple[Term, ...]
    """Those that observations with images do not have."""
    cameras: tuple[str, ...]
    action: Box
    """Actions, named by the control mode."""
    reward_modes: tuple[str, ...]
    """Reward modes that it can compute."""
    outcomes: tuple[str, ...]
    """Which of success and fail it evaluates."""
    robot: str
    control_dt_s: float
    max_episode_steps: int | None
    """Time limit with which ManiSkill registers it, control steps."""


def describe(env: Any, max_episode_steps: int | None) -> Description:
    """Describe an environment, and change its obs_mode. UserError for actions that are not bounded boxes."""
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    env.reset(seed=0)
    info, rewards = env.get_info(), _reward_modes(env)
    vectors = _flat(env._get_obs_state_dict(info))
    env._obs_mode, env.obs_mode_struct = "rgb", parse_obs_mode_to_struct("rgb")
    measured = _flat(env._get_obs_state_dict(info))
    terms = {path: Term(path, value.reshape(1, -1).shape[-1]) for path, value in vectors.items()}
    return Description(
        terms=tuple(terms.values()),
        privileged=tuple(term for path, term in terms.items() if path not in measured),
        cameras=tuple(env._sensors),
        action=_action(env),
        reward_modes=tuple(rewards),
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


def _action(env: Any) -> Box:
    """Return the actions; of several robots, the control mode is that of the first."""
    mode, space = str(agents(env)[0].control_mode), env.single_action_space
    boxes = dict(space.spaces) if hasattr(space, "spaces") else {"": space}
    limits = [np.stack([box.low, box.high], axis=-1) for box in boxes.values() if hasattr(box, "low")]
    if len(limits) < len(boxes) or not np.isfinite(np.concatenate(limits)).all():
        raise UserError(f"task.control_mode={mode}: its actions have no finite limits: {space}")
    names = [f"{robot}{'/' if robot else ''}{i}" for robot, box in boxes.items() for i in range(box.shape[0])]
    pairs = np.concatenate(limits).tolist()
    if any(pair != [-1.0, 1.0] for pair in pairs):
        mode += "_normalized"  # no data set that holds the limits' own units fits by accident
    scaled = [(name, (high - low) / 2, (high + low) / 2) for name, (low, high) in zip(names, pairs, strict=True)]
    return Box(tuple(ActionTerm(f"{mode}[{name}]", scale=scale, offset=offset) for name, scale, offset in scaled))


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


def _flat(node: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors [N] and [N, D] under a node by path, in the order of ``embodied.data.maniskill``."""
    if isinstance(node, Tensor):
        return {name: node} if node.ndim <= 2 else {}
    found: dict[str, Tensor] = {}
    for key in sorted(node):
        found |= _flat(node[key], f"{name}/{key}" if name else key)
    return found
