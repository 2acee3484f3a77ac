"""ManiSkill itself: what is asked of it, what it offers, its simulations, and the part that runs in child processes.

Only this file imports mani_skill, and only when something is built: its renderer needs a Vulkan device and can crash a
process whose driver is too old. So ``Simulations`` lives in a child (see ``embodied.core.process.child``).
"""

import contextlib
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.errors import UserError, one_line, unknown_name
from embodied.core.spec import ActionTerm, Box, CameraSpec, Term

INSTALL = "pip install -c constraints.txt -e '.[maniskill]'"
VULKAN = (
    "ManiSkill needs a Vulkan device even without rendering, and found none that works. As root, `bash "
    "envs/adapters/install_vulkan.sh` installs Mesa's software device on Debian and Ubuntu (Mesa 25 or newer)"
)
OUTCOMES = ("success", "fail")
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


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
    outcomes: tuple[str, ...]
    """Which of success and fail it evaluates."""
    robot: str
    control_dt_s: float
    max_episode_steps: int | None


def registered() -> dict[str, Any]:
    """Return ManiSkill's registry of environments."""
    import mani_skill.envs  # noqa: F401 (fills the registry)
    from mani_skill.utils.registration import REGISTERED_ENVS

    return dict(REGISTERED_ENVS)


class Simulation:
    """n copies of one environment in one ManiSkill scene: n = 1 on the CPU, any number on a GPU."""

    def __init__(self, request: Request, num_envs: int = 1, paths: Sequence[str] = ()) -> None:
        """Build it. UserError for an unknown name, assets that are missing and no Vulkan device.

        paths: of the vectors that ``state`` returns, for obs_mode state_dict.
        """
        self.num_envs, self.obs_mode = num_envs, request.obs_mode
        self.render_mode = f"{request.obs_mode}+rgb"
        self.env = _make(request, num_envs, self.render_mode if request.cameras else request.obs_mode)
        self.env._obs_mode = self.obs_mode  # ``step`` renders nothing; ``images`` does
        self.seeds_N = np.zeros(num_envs, dtype=np.int64)
        self.cameras = tuple(camera.name for camera in request.cameras)
        self._keys = [path.split("/") for path in paths]
        self._state: Any = None

    def start(self, seeds: Sequence[int], rows: Tensor | None = None) -> None:
        """Start an episode in envs ``rows`` [m] (None: all) from their m seeds, on a GPU from all together."""
        index = np.arange(self.num_envs) if rows is None else rows.cpu().numpy()
        self.seeds_N[index] = seeds
        given = self.seeds_N.copy()
        given[0] = seeds[0]
        options = {} if rows is None else {"env_idx": rows}
        self._state, _ = self.env.reset(seed=given.tolist(), options=options)

    def step(self, action_NA: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Make one control step of all envs; return rewards [N] and outcomes, bool [N]."""
        action: Any = action_NA
        if hasattr(space := self.env.single_action_space, "spaces"):  # of several robots, by name
            sizes = [part.shape[0] for part in space.spaces.values()]
            action = dict(zip(space.spaces, action_NA.split(sizes, dim=-1), strict=True))
        self._state, reward_N, _, _, info = self.env.step(action)
        return reward_N.float(), {name: info[name].bool() for name in OUTCOMES if name in info}

    def state(self) -> Tensor:
        """Return the present state, float32 [N, S]: as ManiSkill flattens it, or the vectors chosen."""
        if isinstance(self._state, Tensor):
            return self._state.float()
        vectors = [functools.reduce(getitem, keys, self._state) for keys in self._keys]
        return torch.cat([v if v.ndim == 2 else v.unsqueeze(-1) for v in vectors], dim=-1).float()

    def images(self) -> dict[str, Tensor]:
        """Return the cameras' images of the present state, uint8 [N, h, w, 3]."""
        self.env._obs_mode = self.render_mode
        data = self.env._get_obs_sensor_data()
        self.env._obs_mode = self.obs_mode
        return {name: data[name]["rgb"] for name in self.cameras}


class Simulations:
    """Simulations of one environment each on the CPU: what a child process holds.

    Inference mode saves the bookkeeping of autograd in ManiSkill's many small operations, 12% of a step of PickCube.
    """

    def ids(self) -> list[str]:
        return list(registered())

    def describe(self, request: Request) -> Description:
        """Build an environment and describe it. UserError for a robot or a control mode that it cannot use."""
        entry = _entry(request.id)
        try:
            if request.control_mode is not None:
                allowed = agents(Simulation(replace(request, control_mode=None)).env)[0].supported_control_modes
                if request.control_mode not in allowed:
                    raise unknown_name("task.control_mode", request.control_mode, allowed)
            return describe(Simulation(request).env, entry.max_episode_steps)
        except UserError:
            raise
        except Exception as error:  # of the task's own code, which relies on its robots
            made_for = entry.cls.SUPPORTED_ROBOTS
            if request.robot_uids is None or not made_for or request.robot_uids in made_for:
                raise
            failed = f"{request.id} does not work with '{request.robot_uids}' ({type(error).__name__})"
            made = ", ".join(map(str, made_for))
            raise UserError(f"task.robot_uids: {failed}; it is made for {made}") from error

    @torch.inference_mode()
    def build(self, request: Request, num_envs: int, paths: tuple[str, ...]) -> None:
        """Build ``num_envs`` environments. paths: of the vectors of the state."""
        torch.set_num_threads(1)
        self.simulations = [Simulation(request, paths=paths) for _ in range(num_envs)]

    @torch.inference_mode()
    def start(self, rows: list[int], seeds: list[int]) -> Floats:
        """Start episodes in envs ``rows`` [m]; return their states [m, S + P]."""
        for row, seed in zip(rows, seeds, strict=True):
            self.simulations[row].start([seed])
        return np.concatenate([self.simulations[row].state().numpy() for row in rows])

    @torch.inference_mode()
    def step(self, rows: list[int], action_mA: Floats) -> tuple[Floats, Floats, dict[str, NDArray[np.bool_]]]:
        """Make one control step of envs ``rows`` [m]; return states [m, S + P], rewards [m] and outcomes [m]."""
        results = [
            (self.simulations[row].step(action_1A), self.simulations[row].state())
            for row, action_1A in zip(rows, torch.from_numpy(action_mA).split(1), strict=True)
        ]
        outcomes = {name: torch.cat([found[name] for (_, found), _ in results]).numpy() for name in results[0][0][1]}
        rewards = torch.cat([reward_1 for (reward_1, _), _ in results]).numpy()
        return torch.cat([state for _, state in results]).numpy(), rewards, outcomes

    @torch.inference_mode()
    def images(self, rows: list[int]) -> dict[str, Pixels]:
        """Return the images of envs ``rows`` [m] by camera, uint8 [m, h, w, 3]."""
        images = [self.simulations[row].images() for row in rows]
        return {name: torch.cat([image[name] for image in images]).numpy() for name in images[0]}

    @torch.inference_mode()
    def frames(self, rows: list[int]) -> Pixels:
        """Return an image of envs ``rows`` [m] for people, uint8 [m, H, W, 3]."""
        return torch.cat([self.simulations[row].env.render_rgb_array() for row in rows]).numpy()


def _entry(id: str) -> Any:
    """Return ManiSkill's entry of an environment. UserError with the nearest name if there is none."""
    known = registered()
    if id not in known:
        raise unknown_name("task of the family maniskill", id, known)
    return known[id]


def _make(request: Request, num_envs: int, obs_mode: str) -> Any:
    entry = _entry(request.id)
    import sapien
    from mani_skill.agents.registration import REGISTERED_AGENTS

    render = "cpu" if request.sim_backend == "physx_cpu" and not torch.cuda.is_available() else "gpu"
    try:
        sapien.render.RenderSystem(sapien.Device("cpu" if render == "cpu" else "cuda"))
    except RuntimeError as error:
        raise UserError(f"{VULKAN} ({one_line(error)})") from error
    given = {name: getattr(request, name) for name in ("robot_uids", "control_mode", "reward_mode")}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"obs_mode": obs_mode, "sim_backend": request.sim_backend, "render_backend": render}
    options["sensor_configs"] = {c.name: {"width": c.width, "height": c.height} for c in request.cameras}
    if request.robot_uids not in (None, *REGISTERED_AGENTS):
        raise unknown_name("task.robot_uids", str(request.robot_uids), REGISTERED_AGENTS)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return entry.make(num_envs=num_envs, **options)
    except EOFError as error:  # it asked whether to download assets, and a child process has no input
        robot = re.search(r"Robot (\S+) has assets", printed.getvalue())
        download = f"python -m mani_skill.utils.download_asset {robot[1] if robot else request.id}"
        needs = f"task=maniskill/{request.id} needs assets that are not part of mani_skill"
        raise UserError(f"{needs}: {download}") from error


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
