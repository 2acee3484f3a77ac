"""ManiSkill itself: one simulation of n environments, its description, and the part that runs in child processes.

Only this file imports mani_skill, and only when something is built: its renderer needs a Vulkan device and can crash a
process whose driver is too old. So ``Simulations`` lives in a child (see ``envs.adapters.child``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.errors import UserError, one_line, unknown_name
from embodied.core.spec import CameraSpec

INSTALL = "pip install -c constraints.txt -e '.[maniskill]'"
VULKAN = (
    "ManiSkill needs a Vulkan device even without rendering, and found none that works. As root, `bash "
    "envs/adapters/install_vulkan.sh` installs Mesa's software device on Debian and Ubuntu (Mesa 25 or newer)"
)
OUTCOMES = ("success", "fail")
STATE_MODE = "state_dict"
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Request:
    """Which environment to build, with ManiSkill's own names of its options. None: the environment's default."""

    id: str
    """Name of the environment, such as PickCube-v1."""
    robot_uids: str | None = None
    control_mode: str | None = None
    reward_mode: str | None = None
    obs_mode: str = STATE_MODE
    sim_backend: str = "physx_cpu"
    cameras: tuple[CameraSpec, ...] = ()
    """Cameras that observations have."""


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


def is_installed() -> bool:
    """Return whether ManiSkill is installed, without importing it."""
    return find_spec("mani_skill") is not None


def registered() -> Mapping[str, Any]:
    """Return ManiSkill's registry of environments."""
    import mani_skill.envs  # noqa: F401 (fills the registry)
    from mani_skill.utils.registration import REGISTERED_ENVS

    found: Mapping[str, Any] = REGISTERED_ENVS
    return found


class Simulation:
    """n copies of one environment in one ManiSkill scene: n = 1 on the CPU, any number on a GPU."""

    def __init__(self, request: Request, num_envs: int = 1) -> None:
        """Build it. UserError for an unknown name, assets that are missing and no Vulkan device."""
        self.num_envs, self.obs_mode = num_envs, request.obs_mode
        self.render_mode = f"{request.obs_mode}+rgb"
        self.env = _make(request, num_envs, self.render_mode if request.cameras else request.obs_mode)
        self.env._obs_mode = self.obs_mode  # ``step`` renders nothing; ``images`` does
        self.seeds_N = np.zeros(num_envs, dtype=np.int64)
        self.cameras = tuple(camera.name for camera in request.cameras)
        self.paths: tuple[str, ...] = ()
        self._state: Any = None

    def start(self, seeds: Sequence[int], rows: Tensor | None = None) -> None:
        """Start an episode in envs ``rows`` [m] (None: all) from their m seeds.

        With one env an episode is a function of its seed. ManiSkill draws the episodes that start together on a GPU
        from the first one's seed, so there an episode is a function of all their seeds.
        """
        index = np.arange(self.num_envs) if rows is None else rows.cpu().numpy()
        self.seeds_N[index] = seeds
        given = self.seeds_N.copy()
        given[0] = seeds[0]
        options = {} if rows is None else {"env_idx": rows}
        self._state, _ = self.env.reset(seed=given.tolist(), options=options)

    def step(self, action_NA: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Make one control step of all envs; return rewards [N] and outcomes, bool [N]."""
        self._state, reward_N, _, _, info = self.env.step(self._action(action_NA))
        return reward_N.float(), {name: info[name].bool() for name in OUTCOMES if name in info}

    def state(self) -> Tensor:
        """Return the present state, float32 [N, S]: as ManiSkill flattens it, or the vectors of ``paths``."""
        if isinstance(self._state, Tensor):
            return self._state.float()
        vectors = _flat(self._state)
        return torch.cat([vectors[path].reshape(self.num_envs, -1).float() for path in self.paths], dim=-1)

    def images(self) -> dict[str, Tensor]:
        """Return the cameras' images of the present state, uint8 [N, h, w, 3]."""
        self.env._obs_mode = self.render_mode
        data = self.env._get_obs_sensor_data()
        self.env._obs_mode = self.obs_mode
        return {name: data[name]["rgb"] for name in self.cameras}

    def frame(self) -> Tensor:
        """Return an image of the present state for people, uint8 [N, H, W, 3]."""
        image: Tensor = self.env.render_rgb_array()
        return image

    def _action(self, action_NA: Tensor) -> Any:
        """Return the action as the env takes it: of several robots, by name."""
        space = self.env.single_action_space
        if not hasattr(space, "spaces"):
            return action_NA
        sizes = [part.shape[0] for part in space.spaces.values()]
        return dict(zip(space.spaces, action_NA.split(sizes, dim=-1), strict=True))

    def describe(self, max_episode_steps: int | None) -> Description:
        """Return the description. UserError for an action space that is not made of bounded boxes."""
        from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

        env = self.env
        self.start([0])
        info = env.get_info()
        vectors = _flat(env._get_obs_state_dict(info))
        env._obs_mode, env.obs_mode_struct = "rgb", parse_obs_mode_to_struct("rgb")
        measured = _flat(env._get_obs_state_dict(info))
        space = env.single_action_space
        boxes = dict(space.spaces) if hasattr(space, "spaces") else {"": space}
        limits = [np.stack([box.low, box.high]) for box in boxes.values() if hasattr(box, "low")]
        if len(limits) < len(boxes) or not np.isfinite(np.concatenate(limits, axis=-1)).all():
            raise UserError(f"task.control_mode={_control_mode(env)}: its actions have no finite limits: {space}")
        low, high = np.concatenate(limits, axis=-1).tolist()
        names = [f"{robot}{'/' if robot else ''}{i}" for robot, box in boxes.items() for i in range(box.shape[0])]
        robot = env.robot_uids if isinstance(env.robot_uids, str) else "+".join(map(str, env.robot_uids))
        return Description(
            terms=tuple((path, value.reshape(1, -1).shape[-1]) for path, value in vectors.items()),
            privileged=tuple(path for path in vectors if path not in measured),
            cameras=tuple(env._sensors),
            control_mode=_control_mode(env),
            action_names=tuple(names),
            low=tuple(low),
            high=tuple(high),
            outcomes=tuple(name for name in OUTCOMES if name in info),
            robot=robot,
            control_dt_s=1.0 / env.control_freq,
            max_episode_steps=max_episode_steps,
        )


class Simulations:
    """Simulations of one environment each on the CPU: what a child process holds."""

    def ids(self) -> list[str]:
        """Return the names of all environments."""
        return list(registered())

    def describe(self, request: Request) -> Description:
        """Build an environment and describe it. UserError for an option that it does not have."""
        limit = _entry(request.id).max_episode_steps
        plain = Simulation(Request(request.id, request.robot_uids, sim_backend="physx_cpu"))
        _check_options(plain.env, request)
        if request.control_mode in (None, _control_mode(plain.env)):
            return plain.describe(limit)
        return Simulation(Request(request.id, request.robot_uids, request.control_mode)).describe(limit)

    def build(self, request: Request, num_envs: int, state: tuple[str, ...], privileged: tuple[str, ...]) -> None:
        """Build ``num_envs`` environments. state, privileged: paths of the vectors of either observation."""
        torch.set_num_threads(1)
        self.simulations = [Simulation(request) for _ in range(num_envs)]
        for simulation in self.simulations:
            simulation.paths = (*state, *privileged)

    def start(self, rows: list[int], seeds: list[int]) -> Floats:
        """Start episodes in envs ``rows`` [m]; return their states [m, S + P]."""
        for row, seed in zip(rows, seeds, strict=True):
            self.simulations[row].start([seed])
        return np.concatenate([self.simulations[row].state().numpy() for row in rows])

    def step(self, rows: list[int], action_mA: Floats) -> tuple[Floats, Floats, dict[str, NDArray[np.bool_]]]:
        """Make one control step of envs ``rows`` [m]; return states [m, S + P], rewards [m] and outcomes [m]."""
        results = [
            (self.simulations[row].step(action_1A), self.simulations[row].state())
            for row, action_1A in zip(rows, torch.from_numpy(action_mA).split(1), strict=True)
        ]
        outcomes = {name: torch.cat([found[name] for (_, found), _ in results]).numpy() for name in results[0][0][1]}
        rewards = torch.cat([reward_1 for (reward_1, _), _ in results]).numpy()
        return torch.cat([state for _, state in results]).numpy(), rewards, outcomes

    def images(self, rows: list[int]) -> dict[str, Pixels]:
        """Return the images of envs ``rows`` [m] by camera, uint8 [m, h, w, 3]."""
        images = [self.simulations[row].images() for row in rows]
        return {name: torch.cat([image[name] for image in images]).numpy() for name in images[0]}

    def frames(self) -> Pixels:
        """Return an image of every env for people, uint8 [N, H, W, 3]."""
        return torch.cat([simulation.frame() for simulation in self.simulations]).numpy()


def _entry(id: str) -> Any:
    """Return ManiSkill's entry of an environment. UserError with the nearest name if there is none."""
    known = registered()
    if id not in known:
        raise unknown_name("task of the family maniskill", id, known)
    return known[id]


def _make(request: Request, num_envs: int, obs_mode: str) -> Any:
    """Build a ManiSkill environment. UserError as in ``Simulation``."""
    entry = _entry(request.id)
    import sapien

    render = "cpu" if request.sim_backend == "physx_cpu" and not torch.cuda.is_available() else "gpu"
    try:
        sapien.render.RenderSystem(sapien.Device("cpu" if render == "cpu" else "cuda"))
    except RuntimeError as error:
        raise UserError(f"{VULKAN} ({one_line(error)})") from error
    options: dict[str, Any] = {
        "obs_mode": obs_mode,
        "sim_backend": request.sim_backend,
        "render_backend": render,
        "sensor_configs": {c.name: {"width": c.width, "height": c.height} for c in request.cameras},
    }
    for name in ("robot_uids", "control_mode", "reward_mode"):
        if getattr(request, name) is not None:
            options[name] = getattr(request, name)
    if request.robot_uids is not None:
        _check_robot(request.robot_uids, entry)
    try:
        return entry.make(num_envs=num_envs, **options)
    except EOFError as error:  # it asked whether to download assets
        raise UserError(
            f"task=maniskill/{request.id} needs assets that are not part of mani_skill: python -m "
            f"mani_skill.utils.download_asset {request.id if entry.asset_download_ids else request.robot_uids}"
        ) from error


def _check_robot(robot: str, entry: Any) -> None:
    """Raise UserError unless the robot exists and the environment supports it."""
    from mani_skill.agents.registration import REGISTERED_AGENTS

    allowed = [name for name in entry.cls.SUPPORTED_ROBOTS or REGISTERED_AGENTS if isinstance(name, str)]
    if robot not in allowed:
        raise unknown_name("task.robot_uids", robot, allowed)


def _check_options(env: Any, request: Request) -> None:
    """Raise UserError for a control mode, a reward mode or a camera that the environment does not have."""
    agent = env.agent.agents[0] if hasattr(env.agent, "agents") else env.agent
    if request.control_mode not in (None, *agent.supported_control_modes):
        raise unknown_name("task.control_mode", str(request.control_mode), agent.supported_control_modes)
    rewards = _reward_modes(env)
    if request.reward_mode not in (None, *rewards):
        raise unknown_name(f"task.reward_mode of {request.id}", str(request.reward_mode), rewards)
    for camera in request.cameras:
        if camera.name not in env._sensors:
            raise unknown_name(f"camera of maniskill/{request.id}", camera.name, env._sensors)


def _reward_modes(env: Any) -> list[str]:
    """Return the reward modes that the environment can compute."""
    action = {name: space.sample() for name, space in getattr(env.action_space, "spaces", {}).items()}
    found, present = [], env._reward_mode
    info = env.get_info()
    obs = env.get_obs(info, unflattened=True)
    for mode in env.SUPPORTED_REWARD_MODES:
        env._reward_mode = mode
        try:
            env.get_reward(obs=obs, action=action or torch.from_numpy(np.atleast_2d(env.action_space.sample())), info=info)
        except NotImplementedError:
            continue
        found.append(mode)
    env._reward_mode = present
    return found


def _control_mode(env: Any) -> str:
    """Return the control mode; of several robots, that of the first."""
    mode = env.agent.control_mode
    return str(next(iter(mode.values())) if isinstance(mode, dict) else mode)


def _flat(node: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors [N] and [N, D] under a node by path, in the order of ``embodied.data.maniskill``."""
    if isinstance(node, Tensor):
        return {name: node} if node.ndim <= 2 else {}
    found: dict[str, Tensor] = {}
    for key in sorted(node):
        found |= _flat(node[key], f"{name}/{key}" if name else key)
    return found
