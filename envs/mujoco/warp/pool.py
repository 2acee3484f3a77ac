"""Our tasks on MuJoCo Warp (``sim=warp``), on a GPU or slowly on the CPU, with every tensor on one device.

    chunk of actions ─► each control step: ACTUATE (controls of the action) ─► WarpBatch.step ─► COUNT (rewards, ends)

On a GPU both are recorded kernels, and the host waits once per chunk. All envs are stepped together, including those
that wait for their next episode, whose results are ignored.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from mujoco.batch import MODEL_FIELDS, Batch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.device import CPU, resolve_device
from embodied.core.episodes import EpisodePlans, EpisodeSampler, Ints
from embodied.core.errors import UserError
from embodied.core.graphs import Recorded
from embodied.core.spec import CameraSpec
from embodied.core.types import Obs
from embodied.envs.base.episodic import Advance, Chunks, EpisodicEnv
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import WarpConfig
from embodied.envs.mujoco.pool import MAX_SPEED, StateDumps, pack_terms, step_result
from embodied.envs.mujoco.randomization.non_model import NonModelRandomization, prepare
from embodied.envs.mujoco.randomization.randomizer import Fields, Randomizer
from embodied.envs.mujoco.randomization.terms import QUANTITIES
from embodied.envs.mujoco.scene import with_all_kinds
from embodied.envs.mujoco.view import View
from embodied.envs.mujoco.viewer import Viewer, front
from embodied.envs.mujoco.warp.batch import WarpBatch
from embodied.envs.mujoco.warp.cameras import DeviceRig
from embodied.envs.mujoco.warp.randomization import DeviceFields, DeviceRng
from embodied.envs.rendering.vision import find_cameras
from embodied.envs.tasks.base import Task, task_spec
from embodied.envs.tasks.shapes import check_shapes

log = logging.getLogger(__name__)


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
        placed = find_cameras(cameras, task.scale.reach)
        if not hasattr(task.robot, "attach_tensors"):
            raise UserError(f"sim=warp cannot simulate the robot {task.robot.name}: it has no attach_tensors")
        super().__init__(task_spec(task, placed), num_envs, resolve_device(sim.device, "sim.device"))
        self.task, self.expert = task, task.expert
        terms = {name: term for name, term in sim.randomization.items() if term is not None}
        spec = task.scene()
        prepare(spec, terms)
        self.model = task.compiled(spec)
        self.substeps = task.config.substeps(self.model.opt.timestep)
        simulated = with_all_kinds(spec, task.shapes()).compile()
        self.batch = WarpBatch(simulated, num_envs, self.device, sim.max_contacts, sim.max_constraints)
        self.models = Batch(self.model, num_envs)  # its state is unused
        for name, term in terms.items():
            if term.field not in QUANTITIES and not self.batch.can_vary(term.field):
                only = f"{term.field} cannot differ between envs, allowed with sim=mujoco"
                raise UserError(f"sim.randomization.{name}: sim=warp: {only}")
        self.arm = task.robot.attach_tensors(self.batch)
        self.view = View(self.batch, self.arm, self.models)
        task.instruction_N = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        task.attach(self.view)
        self._reshapes = any(self.models.expanded(name) is not None for name in MODEL_FIELDS)  # ``task.reset`` does
        self.guard = WarpGuard(self.batch, Path(sim.dump_dir))
        fields, self.noise = Fields(self.models), DeviceRng(self.steps_left_N)
        self.non_model = NonModelRandomization(self.arm, task, terms, fields, self.batch, self.noise.normal)
        self.randomizer = Randomizer(fields, terms, self.non_model.targets, task.config.control_dt_s)
        if self.non_model.sizes is not None:
            self.view.sizes = self.non_model.sizes.by_name
        self.fields = DeviceFields(self.models, self.batch, self.device)
        self.rig = None
        if placed:
            self.rig = DeviceRig(self.batch, self.models, spec, task.robot.coarse, placed, sim.camera_randomization)
            self._final |= self.rig.empty()
        self._made_N = np.zeros(num_envs, dtype=np.int64)  # control steps of the present episodes, without a wait
        fixed = not any(term.field in QUANTITIES for term in terms.values())  # delays and noise have state of their own
        device = self.device if fixed else CPU
        self._open = Recorded(self._open_chunks, device, task)
        self._actuate = Recorded(self._write_controls, device, task)
        self._count_step = Recorded(self._count_alive, device, task)
        self._observe = Recorded(self._read_obs, device, task)
        self._so_far = Chunks(torch.zeros(num_envs, 1, 1, device=self.device), self._once)  # what they have counted
        self._alive_N = torch.zeros_like(self.waiting_N)

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        rng, held = EpisodeRng(plans.seed_n, plans.number_n), plans.stage_n == 1
        rows = self._on_device(ids)
        if self.randomizer.terms:
            self.randomizer.apply(ids, rng)
            self._begin(ids)
        self.batch.reset(rows)
        self.arm.reset(rows, self.view.tensor(self.task.robot.start_qpos(rng, held)))
        self.task.instruction_N[rows] = self._on_device(plans.instruction_n)
        with self._reshaping(ids):
            self.task.reset(rows, rng)
        self.batch.forward()
        if held.any():
            self.task.put_in_hand(self._on_device(ids[held]))
            self.batch.forward()
        check_shapes(self.task, self.num_envs)
        self.view.changed()
        self.non_model.start(ids)
        if self.model.nplastic:  # springs were relaxed: their forces belong to the first half
            self.batch.forward()
        if self.rig is not None:
            self.rig.start(ids, rng)

    def run_chunks(self, chunks: Chunks) -> None:
        """Execute chunks; wait for the device once, at their end."""
        self._open()
        for e in range(chunks.action_NEA.shape[1]):
            if self.randomizer.intervals:
                self._change(self._alive_N.nonzero().squeeze(-1).cpu().numpy())
            self._actuate(chunks.action_NEA.select(1, e))
            self.batch.step(self.substeps)
            chunks.reward_NE[:, e] = self._count_step()
            if self.on_control_step is not None:
                self.view.changed()
                self.on_control_step(self)
        so_far = self._so_far
        chunks.broken_N = so_far.broken_N.clone()
        if bool(chunks.broken_N.any()):
            rows = chunks.broken_N.nonzero().squeeze(-1)
            self.guard.renew(rows)
            for key, value in self.observe().items():
                self._final[key][rows] = value[rows]
        self.view.changed()
        chunks.num_steps_N = so_far.num_steps_N.clone()
        chunks.ended_N, chunks.terminated_N = so_far.ended_N.clone(), so_far.terminated_N.clone()
        chunks.info = {name: outcome_N.clone() for name, outcome_N in so_far.info.items()}

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        raise NotImplementedError("run_chunks makes all control steps of a chunk")

    def _open_chunks(self) -> None:
        so_far = self._so_far
        so_far.num_steps_N.zero_()
        for flag_N in (so_far.ended_N, so_far.terminated_N, so_far.broken_N, *so_far.info.values()):
            flag_N.zero_()
        self._alive_N.copy_(~self.waiting_N)

    def _count_alive(self) -> Tensor:
        """Count a control step of the envs whose episodes go on; return their rewards, [N]."""
        self.view.changed()
        self.non_model.moved()
        result = step_result(self.task, self.guard.broken_N())
        reward_N, ended_N = self._count(self._so_far, result, self._alive_N)
        for key, value in self._packed_obs().items():
            if key not in self._final:
                self._final[key] = torch.zeros_like(value)
            ended = ended_N.view(-1, *[1] * (value.ndim - 1))
            self._final[key].copy_(torch.where(ended, value, self._final[key]))
        if self.rig is not None:
            self.rig.paint(self._final, ended_N)
        self._alive_N &= ~ended_N
        return reward_N

    def _begin(self, ids: Ints) -> None:
        """Bring the present models and random numbers of envs ``ids`` to the device."""
        with self.non_model.resizing(ids):
            pass  # scales what has the model's own shape
        self.fields.send(ids)
        self._rng = EpisodeRng(self.plans.seed_n, self.plans.number_n)
        self._made_N[ids] = self.steps_made_N()[ids]
        self.noise.start(self._on_device(ids), self._rng.rows(ids), self.plans.time_limit_n[ids])

    @contextmanager
    def _reshaping(self, ids: Ints) -> Iterator[None]:
        """Bring to the device what the task changes of the models of envs ``ids`` inside the block."""
        if not self._reshapes:
            yield
            return
        with self.non_model.resizing(ids):
            yield
        self.fields.send(ids)

    def _change(self, ids: Ints) -> None:
        """Apply the terms of mode ``interval`` before a control step of envs ``ids``."""
        changed = self.randomizer.step(self._rng, self._made_N, ids)
        if len(changed):
            self.fields.send(changed)
            self.batch.forward()
        self._made_N[ids] += 1

    def observe(self, ids: Ints | None = None) -> Obs:
        obs = self._observe()
        self.view.changed()  # what it has kept is of the recorded state
        return obs if ids is None else {key: value[self._on_device(ids)] for key, value in obs.items()}

    def _write_controls(self, action_NA: Tensor) -> None:
        self.guard.remember(self._so_far.broken_N)
        self.arm.apply(action_NA, measured=self.non_model.measured())

    def _read_obs(self) -> Obs:
        self.view.changed()
        obs = self._packed_obs()
        if self.rig is not None:
            obs |= self.rig.empty()
            self.rig.paint(obs, torch.ones_like(self.waiting_N))
        return obs

    def _packed_obs(self) -> Obs:
        true = {**self.task.privileged(), **self.task.observe()}
        state = pack_terms(self.spec.state, self.non_model.observe(None) or {**self.arm.observe(), **true})
        obs = {"state": state, "privileged": pack_terms(self.spec.privileged, true)}
        return obs if self.rig is None else obs | {"instruction": self.task.instruction_N.clone()}

    def state_dict(self) -> dict[str, Tensor]:
        state = {"physics": self.batch.state, **self.episode_state(), **self.task.state_dict()}
        if self.randomizer.terms:
            state |= {**self.non_model.state_dict(), **self.randomizer.fields.state_dict()}
        return {key: value.cpu() for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        check_state(state, self.state_dict())
        self.load_episode_state(state, sampler)
        if self.randomizer.terms:
            self.non_model.load_state_dict(state)
            self._begin(np.arange(self.num_envs))
        self.task.instruction_N.copy_(torch.from_numpy(self.plans.instruction_n))
        self.batch.load_state(state["physics"])
        with self._reshaping(np.arange(self.num_envs)):
            self.task.load_state_dict(state)
        if self.randomizer.terms:
            self.randomizer.load_state_dict(state)  # after sizes and shapes, which set inertia too
            self.fields.send(np.arange(self.num_envs))
        self.batch.forward()
        self.view.changed()
        if self.rig is not None:
            self.rig.start(np.arange(self.num_envs), EpisodeRng(self.plans.seed_n, self.plans.number_n))

    def film(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        """Return a function that renders every env from the front, uint8 [N, height, width, 3], on the CPU."""
        copies = self.models
        viewer = Viewer(self.task, copies, front(self.task, width, height))

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
        self.batch, self.qvel, self.before = batch, batch.bind("qvel"), batch.state

    def remember(self, broken_N: Tensor) -> None:
        """Copy the states that the next step starts from, but for envs that are broken already."""
        self.before.copy_(torch.where(broken_N.unsqueeze(-1), self.before, self.batch.state))

    def full_N(self) -> Tensor:
        """Return which envs had no memory for all contacts since their reset, bool [N]."""
        return (self.batch.overflow_N & self.batch.no_room) != 0

    def broken_N(self) -> Tensor:
        """Return which envs broke in the last step, bool [N]."""
        return self.full_N() | ~(self.qvel.abs() <= MAX_SPEED).all(-1)  # a comparison with NaN is false

    def renew(self, rows: Tensor) -> None:
        """Write and reset the broken envs ``rows`` [n]."""
        if bool(self.full_N().any()):
            log.warning("no memory for all contacts: raise sim.max_contacts or sim.max_constraints")
        self.dump(*(x.cpu().numpy() for x in (rows, self.before[rows], self.batch.state[rows])))
        self.batch.reset(rows)
        self.batch.forward()
