"""The family ``maniskill``: the environments of ManiSkill 3, ``task=maniskill/PickCube-v1``.

CPU   N envs in W child processes ──► each steps its share in turn; states and images come through sockets
GPU   N envs in one scene of this process ──► observations, rewards and outcomes stay on its device

Units, rewards and outcomes are ManiSkill's own. The state has the layout that ``embodied.convert`` gives ManiSkill's
trajectories, so that a policy can be trained on both.
"""

import functools
import itertools
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from embodied.core.device import available_cores
from embodied.core.episodes import EpisodePlans, Ints
from embodied.core.errors import UserError, unknown_name
from embodied.core.process.child import ChildDied, ChildObject
from embodied.core.spec import Box, CameraSpec, EnvSpec, Instruction, Term
from embodied.core.types import Obs
from embodied.envs.adapters.config import ManiSkillTaskConfig
from embodied.envs.adapters.gym.spaces import check_cameras
from embodied.envs.adapters.maniskill.sim import INSTALL, VULKAN, Description, Request, Simulation
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.episodes.seeding import EpisodeRng

SIMULATIONS = "embodied.envs.adapters.maniskill.sim:Simulations"
FLAT = "state"  # the one term of a state that ManiSkill itself flattens
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)  # ends of a process by a bad driver
TERMINATE_ON = {"none": (), "fail": ("fail",), "success": ("success",), "success_or_fail": ("success", "fail")}


def paths_of(spec: EnvSpec) -> tuple[str, ...]:
    """Return the paths of the vectors of state and privileged observation; none if ManiSkill flattens the state."""
    return tuple(term.name for term in (*spec.state, *spec.privileged) if term.name != FLAT)


class ManiSkillEnv(EpisodicEnv):
    """What both kinds have in common: scaled actions, ends of episodes, observations from the latest states.

    terminate_on: outcomes that end an episode as a termination.
    """

    def __init__(
        self, spec: EnvSpec, num_envs: int, terminate_on: Iterable[str], device: torch.device | None = None
    ) -> None:
        super().__init__(spec, num_envs, device)
        assert isinstance(spec.action, Box)
        self.terminate_on = [name for name in terminate_on if name in spec.outcomes]
        self._scale_A = torch.tensor([term.scale for term in spec.action.terms], device=device)
        self._offset_A = torch.tensor([term.offset for term in spec.action.terms], device=device)
        self._state_NS = torch.zeros(num_envs, spec.state_dim + spec.privileged_dim, device=device)  # and privileged

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        seed_n = (EpisodeRng(plans.seed_n, plans.number_n).uniform("maniskill", 0.0, 1.0) * 2**31).astype(np.int64)
        self._state_NS[torch.from_numpy(ids).to(self.device)] = self._start(ids, seed_n.tolist())

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        """Make one control step. An env whose state or reward is not finite counts as broken."""
        reward_N, outcomes = self._step(self._offset_A + self._scale_A * action_NA, ids)
        ends = [outcomes[name] for name in self.terminate_on]
        failed_N = torch.stack(ends).any(0) if ends else None
        finite_N = torch.isfinite(self._state_NS).all(-1) & torch.isfinite(reward_N)
        return Advance(reward_N, outcomes, failed_N, ~finite_N)

    def observe(self, ids: Ints | None = None) -> Obs:
        """Return the present observation of envs ``ids`` (sorted and unique; None: all); images are rendered now."""
        rows = np.arange(self.num_envs) if ids is None else ids
        state = self._state_NS[torch.from_numpy(rows).to(self.device)]
        obs = {"state": state[:, : self.spec.state_dim]}
        if self.spec.privileged:
            obs["privileged"] = state[:, self.spec.state_dim :]
        if self.spec.cameras:
            obs |= {f"images.{name}": image for name, image in self._images(rows).items()}
            obs["instruction"] = torch.from_numpy(self.plans.instruction_n[rows]).to(self.device)
        return obs

    def film(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        """Return a function that films every env, as large as fits, with black borders: uint8 [N, height, width, 3]."""

        def fitted(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
            return np.asarray(ImageOps.pad(Image.fromarray(frame), (width, height), Image.Resampling.BILINEAR))

        return lambda: np.stack([fitted(frame) for frame in self._frames().cpu().numpy()])

    @abstractmethod
    def _start(self, ids: Ints, seeds: list[int]) -> Tensor:
        """Reset envs ``ids`` [n] and return their states [n, S + P]."""

    @abstractmethod
    def _step(self, action_NA: Tensor, ids: Ints | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Step envs ``ids`` (None: all) and put their states into ``_state_NS``; return rewards and outcomes."""

    @abstractmethod
    def _images(self, ids: Ints) -> Mapping[str, Tensor]:
        """Return the images of envs ``ids`` [n] by camera, uint8 [n, h, w, 3]."""

    @abstractmethod
    def _frames(self) -> Tensor:
        """Return an image of every env for people, uint8 [N, H, W, 3]."""


class ManiSkillProcesses(ManiSkillEnv):
    """On the CPU. num_processes: child processes, each with its share of the envs."""

    def __init__(
        self, spec: EnvSpec, request: Request, num_envs: int, terminate_on: Iterable[str], num_processes: int
    ) -> None:
        super().__init__(spec, num_envs, terminate_on)
        self._bounds = np.linspace(0, num_envs, min(num_processes, num_envs) + 1).astype(np.int64)
        self._children: list[ChildObject] = []
        with ExitStack() as failing:
            failing.callback(self.close)
            for _ in self._bounds[1:]:
                self._children.append(ChildObject(SIMULATIONS))
            self._call("build", [(request, size, paths_of(spec)) for size in np.diff(self._bounds).tolist()])
            failing.pop_all()

    def close(self) -> None:
        with ExitStack() as closing:
            for child in self._children:
                closing.callback(child.close)

    def _start(self, ids: Ints, seeds: list[int]) -> Tensor:
        arguments = [(numbers, seeds[at]) for numbers, at in self._shares(ids)]
        return torch.from_numpy(np.concatenate(self._call("start", arguments)))

    def _step(self, action_NA: Tensor, ids: Ints | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        rows = np.arange(self.num_envs) if ids is None else ids
        action_nA = action_NA.numpy()[rows]
        parts = self._call("step", [(numbers, action_nA[at]) for numbers, at in self._shares(rows)])
        states, rewards, outcomes = zip(*parts, strict=True)
        index = torch.from_numpy(rows)
        self._state_NS[index] = torch.from_numpy(np.concatenate(states))
        reward_N = torch.zeros(self.num_envs)
        reward_N[index] = torch.from_numpy(np.concatenate(rewards))
        spread = {name: torch.zeros(self.num_envs, dtype=torch.bool) for name in self.spec.outcomes}
        for name, outcome_N in spread.items():
            outcome_N[index] = torch.from_numpy(np.concatenate([part[name] for part in outcomes]))
        return reward_N, spread

    def _images(self, ids: Ints) -> Mapping[str, Tensor]:
        parts = self._call("images", [(numbers,) for numbers, _ in self._shares(ids)])
        if not parts:
            return {c.name: torch.zeros(0, c.height, c.width, 3, dtype=torch.uint8) for c in self.spec.cameras}
        return {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}

    def _frames(self) -> Tensor:
        shares = self._shares(np.arange(self.num_envs))
        return torch.from_numpy(np.concatenate(self._call("frames", [(numbers,) for numbers, _ in shares])))

    def _shares(self, ids: Ints) -> list[tuple[list[int], slice]]:
        """Return for each child which of envs ``ids`` (sorted) it has: their numbers in it, and their places in ids."""
        ends = np.searchsorted(ids, self._bounds).tolist()
        places = [slice(low, high) for low, high in itertools.pairwise(ends)]
        return [((ids[at] - first).tolist(), at) for at, first in zip(places, self._bounds, strict=False)]

    def _call(self, method: str, arguments: list[Any]) -> list[Any]:
        """Call a method in all children at once, except those with no envs to call it for; return the results."""
        asked = [(child, given) for child, given in zip(self._children, arguments, strict=True) if given[0] != []]
        for child, given in asked:
            child.send(method, *given)
        return [child.receive() for child, _ in asked]


class ManiSkillScene(ManiSkillEnv):
    """On a GPU: all envs in one scene, which is stepped as a whole."""

    def __init__(self, spec: EnvSpec, request: Request, num_envs: int, terminate_on: Iterable[str]) -> None:
        self._simulation = Simulation(request, num_envs, paths_of(spec))
        super().__init__(spec, num_envs, terminate_on, self._simulation.env.device)

    def close(self) -> None:
        self._simulation.env.close()

    def _start(self, ids: Ints, seeds: list[int]) -> Tensor:
        rows = torch.from_numpy(ids).to(self.device)
        self._simulation.start(seeds, None if len(ids) == self.num_envs else rows)
        return self._simulation.state()[rows]

    def _step(self, action_NA: Tensor, ids: Ints | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        reward_N, outcomes = self._simulation.step(action_NA)
        self._state_NS = self._simulation.state().clone()
        return reward_N, outcomes

    def _images(self, ids: Ints) -> Mapping[str, Tensor]:
        return {name: image[torch.from_numpy(ids).to(self.device)] for name, image in self._simulation.images().items()}

    def _frames(self) -> Tensor:
        frames: Tensor = self._simulation.env.render_rgb_array()
        return frames


class ManiSkill:
    """See ``registry.Family``. A child process describes an environment, some seconds for the first time."""

    few_copies = True

    def ids(self) -> Sequence[str]:
        return _ids()

    def task_config(self, id: str) -> type[Any]:
        return ManiSkillTaskConfig

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        if cameras and task.obs_mode != "state_dict":
            why = "it holds all object poses; use state_dict"
            raise UserError(f"task.obs_mode=state is only for policies without cameras: {why}")
        found = _describe(Request(id, task.robot_uids, task.control_mode))
        if task.reward_mode not in (None, *found.reward_modes):
            raise unknown_name(f"task.reward_mode of {id}", task.reward_mode, found.reward_modes)
        check_cameras(f"maniskill/{id}", cameras, found.cameras, [], found.action)
        limit = task.max_episode_steps or found.max_episode_steps
        if limit is None:
            raise UserError(f"task.max_episode_steps: {id} has no time limit of its own, so it needs one")
        hidden = found.privileged if cameras else ()
        state = tuple(term for term in found.terms if term not in hidden)
        if task.obs_mode == FLAT:
            state = (Term(FLAT, sum(term.size for term in found.terms)),)
        return EnvSpec(
            task=f"maniskill/{id}",
            state=state,
            action=found.action,
            control_dt_s=found.control_dt_s,
            max_episode_steps=limit,
            privileged=hidden,
            cameras=tuple(cameras),
            instructions=(Instruction(task.instruction or id, goal=id),),
            outcomes=found.outcomes,
            robot=found.robot,
        )

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> ManiSkillEnv:
        if sim.sim_backend == "physx_cuda" and not torch.cuda.is_available():
            raise UserError("sim.sim_backend=physx_cuda needs a CUDA GPU, and torch finds none; use physx_cpu")
        spec, terminate_on = self.spec(id, task, cameras), TERMINATE_ON[task.terminate_on]
        modes = (task.robot_uids, task.control_mode, task.reward_mode, task.obs_mode)
        request = Request(id, *modes, sim.sim_backend, tuple(cameras))
        if sim.sim_backend == "physx_cuda":
            return ManiSkillScene(spec, request, num_envs, terminate_on)
        return ManiSkillProcesses(spec, request, num_envs, terminate_on, num_threads or available_cores())


@functools.cache
def _ids() -> tuple[str, ...]:
    """Return the names of all environments; none if ManiSkill is not installed."""
    return () if find_spec("mani_skill") is None else tuple(_ask("ids"))


@functools.cache
def _describe(request: Request) -> Description:
    """Describe an environment. UserError if ManiSkill is not installed, finds no Vulkan device, or lacks a name."""
    if find_spec("mani_skill") is None:
        raise UserError(f"the family maniskill needs ManiSkill, which is not installed: {INSTALL}")
    description: Description = _ask("describe", request)
    return description


def _ask(method: str, *arguments: Any) -> Any:
    """Call a method of ``Simulations`` in a child process of its own. UserError if ManiSkill cannot run there."""
    with closing(ChildObject(SIMULATIONS)) as child:
        try:
            return child.call(method, *arguments)
        except ChildDied as death:
            if -death.returncode in CRASHES:
                raise UserError(f"{VULKAN} ({death})") from death
            if not death.last_line.startswith(("ImportError:", "ModuleNotFoundError:", "OSError:")):
                raise
            install = "; on Debian and Ubuntu: apt-get install libgl1" if "libGL.so" in death.last_line else ""
            raise UserError(f"ManiSkill cannot be imported: {death.last_line}{install}") from death
