"""Simulations of one model on MuJoCo Warp. Only this file uses mujoco_warp, and it imports it when a batch is built.

    forward()   replay FIRST: positions, contacts, sensors, velocities
    step(n)     replay SECOND, FIRST n times: forces, constraints, integration, and the next state's first half

The halves of a step are graphs of kernels that the first use records. So all observed quantities are current after each
step. They run on torch's stream, so neither library waits for the other.
"""

import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import mujoco
import torch
from torch import Tensor

from embodied.core.device import available_cores
from embodied.core.errors import UserError, one_line
from embodied.core.graphs import RECORDING

log = logging.getLogger(__name__)
INSTALL = "pip install -c constraints.txt -e '.[warp]'"
STATE = ("time", "qpos", "qvel", "act", "history", "plastic", "ctrl", "mocap_pos", "mocap_quat", "qacc_warmstart")
"""Fields from which a simulation continues; all others follow from them."""
OFF_AT_ZERO = ("geom_adhesion", "geom_surfacevel")
"""Fields that MuJoCo Warp ignores if they are 0 in the model that it gets."""
SILENT_S = 3.0  # between two lines on the progress of compiling


def num_bytes(data: Any) -> int:
    """Return the memory of the arrays of MuJoCo Warp's ``Data``."""
    parts = vars(data).values()
    return sum(
        part.capacity if hasattr(part, "capacity") else num_bytes(part) for part in parts if hasattr(part, "__dict__")
    )


def check_memory(num_envs: int, env_bytes: int, free_bytes: int) -> None:
    """Raise UserError if the data of so many envs do not fit."""
    if num_envs * env_bytes > free_bytes:
        needed, free, most = num_envs * env_bytes / 1e9, free_bytes / 1e9, free_bytes // env_bytes
        why = f"{num_envs:,} envs of sim=warp need {needed:.1f} GB of the GPU, {free:.1f} GB are free"
        raise UserError(f"num_envs: {why}; allowed: at most {most:,} in a group")


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
            make_data = partial(engine.make_data, model, nconmax=max_contacts, njmax=max_constraints)
            if device.type == "cuda":
                with warp.ScopedDevice("cpu"):
                    one, two = (num_bytes(make_data(nworld=num)) for num in (1, 2))
                check_memory(nsim, two - one, torch.cuda.mem_get_info(device)[0])
            self._data = make_data(nworld=nsim)
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
            halves = (self._engine.step1, self._engine.step2)
            compile_kernels(
                self._warp,
                lambda: [half(self._model, self._data) for half in halves],
                self._device,
                available_cores(),
            )
            for half in halves:
                with self._warp.ScopedStream(stream):
                    half(self._model, self._data)  # compiles what is left
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


def compile_kernels(warp: Any, run: Callable[[], object], device: Any, cores: int) -> None:
    """Compile what ``run`` launches on the device of Warp, on all cores; Warp compiles one after the other.

    ``run`` is called with launches that are noted instead of made, so it must not depend on what its kernels compute.
    Then the noted modules are built side by side, and kept by Warp for the next run.
    """
    with noting(warp, device) as noted:
        run()
    told_s = time.monotonic()
    with ThreadPoolExecutor(cores) as executor:
        building = [executor.submit(module.load, device, block_dim) for module, block_dim in noted]
        for done, built in enumerate(as_completed(building), 1):
            built.result()
            if time.monotonic() > told_s + SILENT_S:
                print(f"compiling the kernels of sim=warp: {done} of {len(noted)}", file=sys.stderr, flush=True)
                told_s = time.monotonic()


@contextmanager
def noting(warp: Any, device: Any) -> Iterator[dict[tuple[Any, int], None]]:
    """Note the modules of this thread's launches, with the threads of a block, instead of making them."""
    noted: dict[tuple[Any, int], None] = {}
    normal = 1 if device.is_cpu else 256  # of a launch that does not say

    def note(kernel: Any, *args: Any, block_dim: int = 0, **kwargs: Any) -> None:
        if not kernel.is_generic:  # its types follow from the arguments
            noted[kernel.module, block_dim if block_dim and not device.is_cpu else normal] = None

    def once(condition: Any, while_body: Callable[..., None], **kwargs: Any) -> None:
        while_body(**kwargs)

    thread = threading.get_ident()
    kept = {name: getattr(warp, name) for name in ("launch", "launch_tiled", "capture_while")}

    def here(name: str, function: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if threading.get_ident() == thread else kept[name])(*args, **kwargs)

        return call

    try:
        for name in kept:
            setattr(warp, name, here(name, once if name == "capture_while" else note))
        yield noted
    finally:
        for name, function in kept.items():
            setattr(warp, name, function)
