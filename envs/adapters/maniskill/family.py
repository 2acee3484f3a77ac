"""The family ``maniskill``: the environments of ManiSkill 3, ``task=maniskill/PickCube-v1``.

Units, rewards and outcomes are ManiSkill's own. The state has the layout that ``embodied.convert`` gives ManiSkill's
trajectories, so that a policy can be trained on both.
"""

import functools
import os
import signal
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import torch

from embodied.core.errors import UserError, unknown_name
from embodied.core.process.child import ChildDied, ChildObject
from embodied.core.spec import CameraSpec, EnvSpec, Instruction, Term
from embodied.envs.adapters.config import ManiSkillConfig, ManiSkillTaskConfig
from embodied.envs.adapters.gym.spaces import check_cameras
from embodied.envs.adapters.maniskill.pool import FLAT, SIMULATIONS, ManiSkillEnv, ManiSkillProcesses, ManiSkillScene
from embodied.envs.adapters.maniskill.sim import INSTALL, VULKAN, Description, Request

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)  # ends of a process by a bad driver
TERMINATE_ON = {"none": (), "fail": ("fail",), "success": ("success",), "success_or_fail": ("success", "fail")}


class ManiSkill:
    """See ``registry.Family``. A child process describes an environment, some seconds for the first time."""

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
        sim = sim or ManiSkillConfig()
        if sim.sim_backend == "physx_cuda" and not torch.cuda.is_available():
            raise UserError("sim.sim_backend=physx_cuda needs a CUDA GPU, and torch finds none; use physx_cpu")
        spec, terminate_on = self.spec(id, task, cameras), TERMINATE_ON[task.terminate_on]
        modes = (task.robot_uids, task.control_mode, task.reward_mode, task.obs_mode)
        request = Request(id, *modes, sim.sim_backend, tuple(cameras))
        if sim.sim_backend == "physx_cuda":
            return ManiSkillScene(spec, request, num_envs, terminate_on)
        return ManiSkillProcesses(spec, request, num_envs, terminate_on, num_threads or len(os.sched_getaffinity(0)))


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
