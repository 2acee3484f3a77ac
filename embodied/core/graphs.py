"""CUDA graphs: the kernels of a function, recorded once and then started together.

Python needs about 10 µs to start a kernel, and most kernels of a small network take less. A graph starts all at once.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")
RECORDING = threading.Lock()
"""Held while a graph is recorded. CUDA then refuses to wait for the whole device and to draw random numbers on it, and
Warp to start a graph."""
MAX_GRAPHS = 4  # of one function: each keeps its memory


class Recorded(Generic[P, R]):
    """A function that is recorded at the second call with arguments of the same shapes, and replayed from then on.

    Arguments and result are tensors, or nested dicts, tuples and lists of them; other arguments must be hashable. The
    function must not wait for the device: no ``item``, no ``nonzero``, no tensor from the CPU. State that it reads or
    writes must be in tensors that keep their addresses. The result is a copy. Not for several threads at once.

    On a CPU the function is called as it is, and so it is on a GPU with ``MAX_GRAPHS`` other shapes before.

    owners: objects whose methods the function calls. It is recorded only if the class of each says so by ``recordable =
    True``, which classes do not inherit: what a subclass adds need not keep to the above.
    """

    def __init__(self, function: Callable[P, R], device: torch.device, *owners: object) -> None:
        self.function, self.device = function, device
        self._graphs: dict[Hashable, _Graph | None] = {}  # by shapes; None after the first call
        records = device.type == "cuda" and all(vars(type(owner)).get("recordable") for owner in owners)
        self._stream = torch.cuda.Stream(device) if records else None
        self._pool = torch.cuda.graph_pool_handle() if records else None  # one after the other: they share memory

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._stream is None:
            return self.function(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        grad = torch.is_grad_enabled()
        key = grad, str(structure), *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs:
            graph = self._graphs[key] = self._recorded(structure, leaves)
        if graph is not None:
            return cast(R, graph.replay(leaves))
        if len(self._graphs) < MAX_GRAPHS:
            self._graphs[key] = None
        here = torch.cuda.current_stream(self.device)  # recording wants what it uses to be of the same stream
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = self.function(*args, **kwargs)
        here.wait_stream(self._stream)
        return cast(R, tree_map_only(Tensor, torch.clone, result))

    def _recorded(self, structure: TreeSpec, leaves: list[Any]) -> "_Graph":
        def call(given: list[Any]) -> R:
            args, kwargs = tree_unflatten(given, structure)
            return self.function(*args, **kwargs)

        assert self._stream is not None
        return _Graph(call, leaves, self._stream, self._pool)


class _Graph:
    """Recorded kernels with the tensors that they read and write."""

    def __init__(
        self, function: Callable[[list[Any]], Any], leaves: list[Any], stream: torch.cuda.Stream, pool: Any
    ) -> None:
        self._inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        self._graph = torch.cuda.CUDAGraph()
        recorder = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with RECORDING, recorder:
            self._result = function(self._inputs)

    def replay(self, leaves: list[Any]) -> Any:
        for own, given in zip(self._inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given, non_blocking=True)
        self._graph.replay()
        return tree_map_only(Tensor, torch.clone, self._result)
