"""Our tasks on MuJoCo Warp (``sim=warp``): as in ``MujocoPool``, with every tensor on one device.

All envs are stepped together, including those that wait for their next episode, whose results are ignored.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from mujoco.batch import Batch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.device import resolve_device
from embodied.core.episodes import EpisodePlans, EpisodeSampler, Ints
from embodied.core.errors import UserError
from embodied.core.options import DeviceName, PositiveInt, config_dataclass
from embodied.core.spec import CameraSpec
from embodied.core.types import Obs
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.pool import MAX_SPEED, StateDumps, pack_terms, spec_of, step_result
from embodied.envs.mujoco.view import View
from embodied.envs.mujoco.viewer import FRONT, Viewer
from embodied.envs.mujoco.warp.batch import WarpBatch
from embodied.envs.tasks.base import Task

log = logging.getLogger(__name__)


@config_dataclass
class WarpConfig:
    """Options of the simulator MuJoCo Warp."""

    name: Literal["warp"] = "warp"
    """Simulator."""
    device: DeviceName = "auto"
    """Device of the simulation; auto is that of the learner, ``device=``."""
    max_contacts: PositiveInt = 64
    """Contacts per env, on average over all envs, for which there is memory."""
    max_constraints: PositiveInt = 192
    """Rows of constraints per env for which there is memory; a contact has 3 to 6, a joint at its limit 1."""
    randomization: dict[str, Any] = field(default_factory=dict)
    """Must be empty: domain randomisation needs sim=mujoco."""
    camera_randomization: dict[str, Any] = field(default_factory=dict)
    """Must be empty: cameras need sim=mujoco."""
    dump_dir: str = "nan_dumps"
    """Directory where the NaN guard writes the states of diverged envs; relative to the run directory."""

    def __post_init__(self) -> None:
        for key in ("randomization", "camera_randomization"):
            if getattr(self, key):
                raise UserError(f"sim.{key}: sim=warp has no domain randomisation, allowed: none, or sim=mujoco")


class WarpPool(EpisodicEnv):
    """VecEnv of one task on MuJoCo Warp that can be resumed exactly where its kernels repeat exactly: on the CPU.

    UserError for tasks and options that it cannot simulate, and for device=cuda without a CUDA device.
    """

    resumes_exactly = True
    expert: Callable[[], Tensor]

    def __init__(
        self, task: Task, *, num_envs: int, sim: WarpConfig | None = None, cameras: Sequence[CameraSpec] = ()
    ) -> None:
        sim = sim or WarpConfig()
        if cameras:
            raise UserError("sim=warp renders no images for policies: use sim=mujoco, or a policy without cameras")
        if not hasattr(task.robot, "attach_tensors"):
            raise UserError(f"sim=warp cannot simulate the robot {task.robot.name}: it has no attach_tensors")
        super().__init__(spec_of(task), num_envs, resolve_device(sim.device, "sim.device"))
        self.task, self.expert = task, task.expert
        self.model = task.scene().compile()
        self.substeps = task.config.substeps(self.model.opt.timestep)
        self.batch = WarpBatch(self.model, num_envs, self.device, sim.max_contacts, sim.max_constraints)
        self.arm = task.robot.attach_tensors(self.batch)
        self.view = View(self.batch, self.arm)
        task.instruction_N = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        task.bind(self.view)
        self.guard = WarpGuard(self.batch, Path(sim.dump_dir))

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        rng, held = EpisodeRng(plans.seed_n, plans.number_n), plans.stage_n == 1
        rows = self._on_device(ids)
        self.batch.reset(rows)
        self.arm.reset(rows, self.view.tensor(self.task.robot.start_qpos(rng, held)))
        self.task.instruction_N[rows] = self._on_device(plans.instruction_n)
        self.task.reset(rows, rng)
        self.batch.forward()
        if held.any():
            self.task.put_in_hand(self._on_device(ids[held]))
            self.batch.forward()
        self.view.changed()

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        self.guard.remember()
        self.arm.apply(action_NA)
        self.batch.step(self.substeps)
        broken_n = self.guard.check()
        self.view.changed()
        return step_result(self.task, broken_n)

    def observe(self, ids: Ints | None = None) -> Obs:
        true = {**self.task.privileged(), **self.task.observe()}
        state = pack_terms(self.spec.state, {**self.arm.observe(), **true})
        obs = {"state": state, "privileged": pack_terms(self.spec.privileged, true)}
        return obs if ids is None else {key: value[self._on_device(ids)] for key, value in obs.items()}

    def state_dict(self) -> dict[str, Tensor]:
        state = {"physics": self.batch.state, **self.episode_state(), **self.task.state_dict()}
        return {key: value.cpu() for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        check_state(state, self.state_dict())
        self.load_episode_state(state, sampler)
        self.task.instruction_N.copy_(torch.from_numpy(self.plans.instruction_n))
        self.batch.load_state(state["physics"])
        self.batch.forward()
        self.task.load_state_dict(state)
        self.view.changed()

    def film(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        """Return a function that renders every env from the front, uint8 [N, height, width, 3], on the CPU."""
        copies = Batch(self.model, self.num_envs)
        viewer = Viewer(self.task, copies, replace(FRONT, width=width, height=height))

        def render() -> NDArray[np.uint8]:
            for name in ("qpos", "mocap_pos", "mocap_quat"):
                copies.bind(name)[:] = self.batch.bind(name).cpu().numpy()
            return viewer.render()

        return render

    def _on_device(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)


class WarpGuard(StateDumps):
    """``NanGuard`` of a ``WarpBatch``: it also finds envs whose contacts were dropped for lack of memory."""

    def __init__(self, batch: WarpBatch, dump_dir: Path) -> None:
        super().__init__(dump_dir)
        self.batch, self.before = batch, batch.state
        self.qvel = batch.bind("qvel")

    def remember(self) -> None:
        self.before = self.batch.state

    def check(self) -> Tensor | None:
        full_N = self.batch.without_room()
        broken_N = full_N | ~(self.qvel.abs() <= MAX_SPEED).all(-1)  # a comparison with NaN is false
        if not bool(broken_N.any()):
            return None
        if bool(full_N.any()):
            log.warning("no memory for all contacts: raise sim.max_contacts or sim.max_constraints")
        rows = broken_N.nonzero().squeeze(-1)
        self.dump(*(x.cpu().numpy() for x in (rows, self.before[rows], self.batch.state[rows])))
        self.batch.reset(rows)
        self.batch.forward()
        return rows
