"""Our tasks on MuJoCo Warp (``sim=warp``), on a GPU or slowly on the CPU, with every tensor on one device.

    forward()   replay FIRST: positions, contacts, sensors, velocities
    step(n)     replay SECOND, FIRST n times: forces, constraints, integration, and the next state's first half
    advance     replay ACTUATE: controls of the actions; step(substeps); replay READ: rewards, ends, what broke

All of these are graphs of kernels that the first uses record. So all observed quantities are current after each step.
All envs are stepped together, including those that wait for their next episode, whose results are ignored. Warp and
torch use one stream, so neither waits for the other. Only this file uses mujoco_warp, and it imports it when a batch is
built.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.device import CPU, resolve_device
from embodied.core.episodes import EpisodePlans, EpisodeSampler, Ints
from embodied.core.errors import UserError, one_line
from embodied.core.graphs import RECORDING, Recorded
from embodied.core.spec import CameraSpec
from embodied.core.types import Obs
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import WarpConfig
from embodied.envs.mujoco.pool import MAX_SPEED, StateDumps, pack_terms, step_result
from embodied.envs.mujoco.randomization.non_model import NonModelRandomization, prepare
from embodied.envs.mujoco.randomization.randomizer import Fields, Randomizer
from embodied.envs.mujoco.randomization.terms import QUANTITIES
from embodied.envs.mujoco.view import View
from embodied.envs.mujoco.viewer import FRONT, Viewer
from embodied.envs.mujoco.warp.randomization import DeviceFields, DeviceRng
from embodied.envs.tasks.base import Task, task_spec

log = logging.getLogger(__name__)
INSTALL = "pip install -c constraints.txt -e '.[warp]'"
STATE = ("time", "qpos", "qvel", "act", "history", "plastic", "ctrl", "mocap_pos", "mocap_quat", "qacc_warmstart")
"""Fields from which a simulation continues; all others follow from them."""
OFF_AT_ZERO = ("geom_adhesion", "geom_surfacevel")
"""Fields that MuJoCo Warp ignores if they are 0 in the model that it gets."""


class WarpBatch:
    """Simulations of one model, float32 on ``device``; see ``base.Simulations``. The first use may compile: a minute.

    max_contacts: mean number per env. max_constraints: largest number of rows per env. UserError if MuJoCo Warp is not
    installed or cannot simulate the model.
    """

    def __init__(
        self, model: mujoco.MjModel, nsim: int, device: torch.device, max_contacts: int, max_constraints: int
    ) -> None:
        try:
            import warp

            warp.config.log_level = warp.LOG_ERROR  # it writes nothing to stdout
            warp.init()
            import mujoco_warp as engine
        except ModuleNotFoundError as error:
            raise UserError(f"sim=warp needs MuJoCo Warp, which is not installed: {INSTALL}") from error
        self._warp, self._engine = warp, engine
        self.model, self.nsim, self.device = model, nsim, device
        self._device = warp.device_from_torch(device)
        supported = copy.copy(model)
        supported.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)  # Warp refuses the flag
        with RECORDING, warp.ScopedDevice(self._device):
            try:
                self._model = engine.put_model(supported)
            except NotImplementedError as error:
                raise UserError(f"sim=warp cannot simulate this task: {one_line(error)}") from error
            self._model.opt.warn_overflow = 0  # it would print to stdout; ``WarpGuard`` reports it
            self._data = engine.make_data(model, nworld=nsim, nconmax=max_contacts, njmax=max_constraints)
        overflow = engine.OverflowType
        self.no_room = int(overflow.NEFC | overflow.NJMAX_NNZ | overflow.BROADPHASE | overflow.NARROWPHASE)
        self.overflow_N = self.bind("overflow")
        self._state = {name: self.bind(name) for name in STATE if getattr(self._data, name).size}
        self._mocaps = torch.from_numpy(model.body_mocapid >= 0).to(device)
        initial, self._varying = mujoco.MjData(model), dict[str, Tensor]()
        self._initial = {name: torch.tensor(getattr(initial, name), device=device).float() for name in self._state}
        self.reset(torch.arange(nsim, device=device))

    def bind(self, name: str) -> Tensor:
        """Return the live array of a field of ``MjData``, [N, ...], laid out as ``mujoco.batch.Batch`` does."""
        array: Tensor = self._warp.to_torch(getattr(self._data, name))
        return array.flatten(-2) if array.ndim == 4 else array  # rotation matrices by rows

    def can_vary(self, name: str) -> bool:
        """Return whether a field of the model can differ between simulations."""
        if name in OFF_AT_ZERO and not getattr(self.model, name).any():
            return False
        field = self._model.__dataclass_fields__.get(name)
        return field is not None and getattr(field.type, "shape", ())[:1] == ("*",)

    def expand(self, name: str) -> Tensor:
        """Return the live values of a field of the model, [N, ...], one for each simulation from now on.

        UserError if MuJoCo Warp has one value for all. Call it before the first step, which records addresses.
        """
        if name not in self._varying:
            if not self.can_vary(name):
                raise UserError(f"sim=warp: the task varies {name} between envs, which only sim=mujoco can simulate")
            assert "_halves" not in vars(self), f"{name} is expanded after the kernels were recorded"
            shared, to_torch = getattr(self._model, name), self._warp.to_torch
            array = self._warp.empty((self.nsim, *shared.shape[1:]), dtype=shared.dtype, device=self._device)
            to_torch(array).copy_(to_torch(shared))
            setattr(self._model, name, array)
            self._varying[name] = to_torch(array).view(self.nsim, *getattr(self.model, name).shape)
        return self._varying[name]

    def reset(self, rows: Tensor) -> None:
        """Put envs ``rows`` [n] into the model's initial state. ``forward`` must follow."""
        for name, values in self._state.items():
            values[rows] = self._initial[name]
        for part in ("pos", "quat"):
            if f"body_{part}" in self._varying and f"mocap_{part}" in self._state:
                self._state[f"mocap_{part}"][rows] = self._varying[f"body_{part}"][rows][:, self._mocaps]
        self.overflow_N[rows] = 0

    def forward(self) -> None:
        """Compute the derived quantities of all envs from their states."""
        self._replay(self._halves[:1])

    def step(self, nstep: int) -> None:
        """Make ``nstep`` steps of physics in all envs."""
        self._replay(self._halves[::-1] * nstep)

    @property
    def state(self) -> Tensor:
        """The fields ``STATE`` of every env in a row, a copy, [N, S]."""
        return torch.cat([values.reshape(self.nsim, -1) for values in self._state.values()], -1)

    def load_state(self, state: Tensor) -> None:
        """Continue from ``state``, [N, S] on any device. ``forward`` must follow."""
        sizes = [values[0].numel() for values in self._state.values()]
        for values, part in zip(self._state.values(), state.split(sizes, -1), strict=True):
            values.copy_(part.view_as(values))
        self.overflow_N.zero_()

    @cached_property
    def _halves(self) -> list[Any]:
        """Graphs of the kernels of the first and the second half of a step."""
        before, graphs = self.state, []
        with RECORDING, self._warp.ScopedDevice(self._device):
            # a stream that the default stream does not wait for: CUDA refuses all use of the default stream, by any
            # thread, while a stream that it waits for is recorded
            aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            stream = None if aside is None else self._warp.stream_from_torch(aside)
            self._warp.synchronize_device(self._device)
            for half in (self._engine.step1, self._engine.step2):
                with self._warp.ScopedStream(stream):
                    half(self._model, self._data)  # compiles the kernels
                    with self._warp.ScopedCapture(device=self._device) as capture:
                        half(self._model, self._data)
                graphs.append(capture.graph)
            self._warp.synchronize_device(self._device)
        self.load_state(before)
        return graphs

    def _replay(self, graphs: list[Any]) -> None:
        """Start graphs on torch's present stream: they run after and before what torch starts there."""
        with RECORDING:  # a graph that is started while another thread records crashes
            on_gpu = self.device.type == "cuda"
            stream = self._warp.stream_from_torch(torch.cuda.current_stream(self.device)) if on_gpu else None
            for graph in graphs:
                self._warp.capture_launch(graph, stream=stream)


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
        super().__init__(task_spec(task), num_envs, resolve_device(sim.device, "sim.device"))
        self.task, self.expert = task, task.expert
        terms = {name: term for name, term in sim.randomization.items() if term is not None}
        spec = task.scene()
        prepare(spec, terms)
        self.model = spec.compile()
        self.substeps = task.config.substeps(self.model.opt.timestep)
        self.batch = WarpBatch(self.model, num_envs, self.device, sim.max_contacts, sim.max_constraints)
        for name, term in terms.items():
            if term.field not in QUANTITIES and not self.batch.can_vary(term.field):
                only = f"{term.field} cannot differ between envs, allowed with sim=mujoco"
                raise UserError(f"sim.randomization.{name}: sim=warp: {only}")
        self.arm = task.robot.attach_tensors(self.batch)
        self.view = View(self.batch, self.arm)
        task.instruction_N = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        task.bind(self.view)
        self.guard = WarpGuard(self.batch, Path(sim.dump_dir))
        self.models = Batch(self.model, num_envs)  # its state is unused
        fields, self.noise = Fields(self.models), DeviceRng(self.steps_left_N)
        self.non_model = NonModelRandomization(self.arm, task, terms, fields, self.batch, self.noise.normal)
        self.randomizer = Randomizer(fields, terms, self.non_model.targets, task.config.control_dt_s)
        if self.non_model.sizes is not None:
            self.view.sizes = self.non_model.sizes.by_name
        self.fields = DeviceFields(self.models, self.batch, self.device)
        self._model_seed_N = np.full(num_envs, -1, dtype=np.int64)  # env seed that each model was randomised with
        self._made_N = np.zeros(num_envs, dtype=np.int64)  # control steps of the present episodes, without a wait
        fixed = not any(term.field in QUANTITIES for term in terms.values())  # delays and noise have state of their own
        device = self.device if fixed and vars(type(task)).get("recordable") else CPU
        self._actuate = Recorded(self._write_controls, device)
        self._read, self._observe = Recorded(self._read_result, device), Recorded(self._read_obs, device)

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        rng, held = EpisodeRng(plans.seed_n, plans.number_n), plans.stage_n == 1
        rows = self._on_device(ids)
        if self.randomizer.terms:
            self.randomizer.apply(ids, rng, first=plans.seed_n != self._model_seed_N[ids])
            self._model_seed_N[ids] = plans.seed_n
            self._begin(ids)
        self.batch.reset(rows)
        self.arm.reset(rows, self.view.tensor(self.task.robot.start_qpos(rng, held)))
        self.task.instruction_N[rows] = self._on_device(plans.instruction_n)
        self.task.reset(rows, rng)
        self.batch.forward()
        if held.any():
            self.task.put_in_hand(self._on_device(ids[held]))
            self.batch.forward()
        self.view.changed()
        self.non_model.start(ids)
        if self.model.nplastic:  # springs were relaxed: their forces belong to the first half
            self.batch.forward()

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        self._change(ids)
        self._actuate(action_NA)
        self.batch.step(self.substeps)
        reward_N, outcomes, failed_N, broken_N, any_broken = self._read()
        broken_n = None
        if bool(any_broken):
            self.guard.renew(broken_n := broken_N.nonzero().squeeze(-1))
            reward_N, outcomes, failed_N = self._read()[:3]
        self.view.changed()
        self.non_model.moved()
        return Advance(reward_N, outcomes, failed_N, broken_n)

    def _begin(self, ids: Ints) -> None:
        """Bring the present models and random numbers of envs ``ids`` to the device."""
        with self.non_model.resizing(ids):
            pass  # tasks that change shapes themselves are refused
        self.fields.send(ids)
        self._rng = EpisodeRng(self.plans.seed_n, self.plans.number_n)
        self._made_N[ids] = self.steps_made_N()[ids]
        self.noise.start(self._on_device(ids), self._rng.rows(ids), self.plans.time_limit_n[ids])

    def _change(self, ids: Ints | None) -> None:
        """Apply the terms of mode ``interval`` before a control step of envs ``ids`` (None: all)."""
        if self.randomizer.intervals:
            changed = self.randomizer.step(self._rng, self._made_N, ids)
            if len(changed):
                self.fields.send(changed)
                self.batch.forward()
            self._made_N[slice(None) if ids is None else ids] += 1

    def observe(self, ids: Ints | None = None) -> Obs:
        obs = self._observe()
        self.view.changed()  # what it has kept is of the recorded state
        return obs if ids is None else {key: value[self._on_device(ids)] for key, value in obs.items()}

    def _write_controls(self, action_NA: Tensor) -> None:
        self.guard.remember()
        self.arm.apply(action_NA, self.non_model.measured())

    def _read_result(self) -> tuple[Tensor, dict[str, Tensor], Tensor | None, Tensor, Tensor]:
        """Return reward, outcomes and failures of the present state, which envs are broken, and whether any is."""
        self.view.changed()
        result, broken_N = step_result(self.task, None), self.guard.broken_N()
        return result.reward_N, dict(result.outcomes), result.failed_N, broken_N, broken_N.any()

    def _read_obs(self) -> Obs:
        self.view.changed()
        true = {**self.task.privileged(), **self.task.observe()}
        state = pack_terms(self.spec.state, self.non_model.observe(None) or {**self.arm.observe(), **true})
        return {"state": state, "privileged": pack_terms(self.spec.privileged, true)}

    def state_dict(self) -> dict[str, Tensor]:
        state = {"physics": self.batch.state, **self.episode_state(), **self.task.state_dict()}
        if self.randomizer.terms:
            state |= {"model_seed": torch.from_numpy(self._model_seed_N.copy()), **self.non_model.state_dict()}
            state |= self.randomizer.fields.state_dict()
        return {key: value.cpu() for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        check_state(state, self.state_dict())
        self.load_episode_state(state, sampler)
        if self.randomizer.terms:
            self.randomizer.load_state_dict(state)
            self._model_seed_N[:] = state["model_seed"].numpy()
            self.non_model.load_state_dict(state)
            self._begin(np.arange(self.num_envs))
        self.task.instruction_N.copy_(torch.from_numpy(self.plans.instruction_n))
        self.batch.load_state(state["physics"])
        self.batch.forward()
        self.task.load_state_dict(state)
        self.view.changed()

    def film(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        """Return a function that renders every env from the front, uint8 [N, height, width, 3], on the CPU."""
        copies = self.models
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
        self.batch, self.qvel, self.before = batch, batch.bind("qvel"), batch.state

    def remember(self) -> None:
        """Copy the state that the next step starts from."""
        self.before.copy_(self.batch.state)

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
