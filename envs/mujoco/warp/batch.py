"""N simulations by MuJoCo Warp: on a GPU, or slowly on the CPU with the same code.

    construction   model and data onto the device
    first use      record two graphs of kernels: FIRST and SECOND half of a step
    forward()      replay FIRST: positions, contacts, sensors, velocities
    step(n)        replay SECOND, FIRST n times: forces, constraints, integration, and the next state's first half

So all observed quantities are current after each step, as with the persistent batch of ``MujocoPool``. Warp's recorder
belongs to the process: a replay while another thread records crashes. So batches of several threads take turns. Only
this file uses mujoco_warp, and it imports it when a batch is built.
"""

import copy
import threading
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import mujoco
import torch
from torch import Tensor

from embodied.core.errors import UserError, one_line

INSTALL = "pip install -c constraints.txt -e '.[warp]'"
STATE = ("time", "qpos", "qvel", "act", "ctrl", "mocap_pos", "mocap_quat", "qacc_warmstart")
"""Fields from which a simulation continues; all others follow from them."""
_TURN = threading.Lock()  # held by the thread that uses Warp


class WarpBatch:
    """Simulations of one model, float32 on ``device``; see ``base.Simulations``. The first use may compile: a minute.

    max_contacts: mean number per env. max_constraints: largest number of rows per env. UserError if MuJoCo Warp is not
    installed or cannot simulate the model.
    """

    def __init__(
        self, model: mujoco.MjModel, nsim: int, device: torch.device, max_contacts: int, max_constraints: int
    ) -> None:
        self._warp, self._engine = _modules()
        self.model, self.nsim, self.device = model, nsim, device
        self._device = self._warp.device_from_torch(device)
        with _TURN, self._warp.ScopedDevice(self._device):
            self._model = _put(self._engine, model)
            self._data = self._engine.make_data(model, nworld=nsim, nconmax=max_contacts, njmax=max_constraints)
        overflow = self._engine.OverflowType
        self._no_room = int(overflow.NEFC | overflow.NJMAX_NNZ | overflow.BROADPHASE | overflow.NARROWPHASE)
        self.overflow_N = self.bind("overflow")
        self._state = {name: self.bind(name) for name in STATE if getattr(self._data, name).size}
        mocaps = model.body_mocapid >= 0
        initial = {"qpos": model.qpos0, "mocap_pos": model.body_pos[mocaps], "mocap_quat": model.body_quat[mocaps]}
        self._initial = {name: torch.tensor(value, device=device).float() for name, value in initial.items()}
        self.reset(torch.arange(nsim, device=device))

    def bind(self, name: str) -> Tensor:
        """Return the live array of a field of ``MjData``, [N, ...], laid out as ``mujoco.batch.Batch`` does."""
        array: Tensor = self._warp.to_torch(getattr(self._data, name))
        return array.flatten(-2) if array.ndim == 4 else array  # rotation matrices by rows

    def expand(self, name: str) -> Any:
        """Refuse fields of the model that differ between simulations, with a UserError."""
        raise UserError(f"sim=warp: the task varies {name} between envs, which only sim=mujoco can simulate")

    def reset(self, rows: Tensor) -> None:
        """Put envs ``rows`` [n] into the model's initial state. ``forward`` must follow."""
        for name, values in self._state.items():
            values[rows] = self._initial.get(name, 0.0)
        self.overflow_N[rows] = 0

    def forward(self) -> None:
        """Compute the derived quantities of all envs from their states."""
        first, _ = self._halves
        self._replay((first,))

    def step(self, nstep: int) -> None:
        """Make ``nstep`` steps of physics in all envs."""
        first, second = self._halves
        self._replay((second, first) * nstep)

    def without_room(self) -> Tensor:
        """Return whether contacts or constraints of an env were dropped since its reset, bool [N]."""
        return (self.overflow_N & self._no_room) != 0

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
    def _halves(self) -> tuple[Any, Any]:
        """Graphs of the kernels of the first and the second half of a step."""
        before, graphs = self.state, []
        with _TURN, self._warp.ScopedDevice(self._device):
            for half in (self._engine.step1, self._engine.step2):
                half(self._model, self._data)  # compiles the kernels
                # a stream that the default stream does not wait for: CUDA refuses all use of the default stream, by any
                # thread, while a stream that it waits for is captured
                aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
                stream = None if aside is None else self._warp.stream_from_torch(aside)
                with self._warp.ScopedStream(stream), self._warp.ScopedCapture(device=self._device) as capture:
                    half(self._model, self._data)
                graphs.append(capture.graph)
            self._warp.synchronize_device(self._device)
        self.load_state(before)
        first, second = graphs
        return first, second

    def _replay(self, graphs: tuple[Any, ...]) -> None:
        with _TURN:
            self._warp.synchronize_device(self._device)  # Warp and torch have streams of their own on a GPU
            for graph in graphs:
                self._warp.capture_launch(graph)
            self._warp.synchronize_device(self._device)


def _modules() -> tuple[Any, Any]:
    """Import Warp and MuJoCo Warp, which then write nothing to stdout. UserError if they are not installed."""
    if find_spec("mujoco_warp") is None or find_spec("warp") is None:
        raise UserError(f"sim=warp needs MuJoCo Warp, which is not installed: {INSTALL}")
    import warp

    warp.config.log_level = warp.LOG_ERROR
    warp.init()
    import mujoco_warp

    return warp, mujoco_warp


def _put(engine: Any, model: mujoco.MjModel) -> Any:
    """Return the model on the present device. UserError if MuJoCo Warp cannot simulate it."""
    supported = copy.copy(model)
    supported.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)  # Warp knows none, and refuses the flag
    try:
        put = engine.put_model(supported)
    except NotImplementedError as error:
        raise UserError(f"sim=warp cannot simulate this task: {one_line(error)}") from error
    put.opt.warn_overflow = 0  # it would print to stdout; ``without_room`` reports it
    return put
