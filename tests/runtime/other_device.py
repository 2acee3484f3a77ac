"""A device that is none: its tensors are on the CPU, but torch treats them as on an accelerator.

Every operation runs on the CPU tensor behind. One that mixes devices raises, as on a GPU, and every transfer is kept in
``TRANSFERS``. So what a GPU needs of the code can be tested without one: that tensors are where they must be. torch
allows one such device per process, and libraries may pick it, so tests start a process for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

from embodied.core.graphs import Recorded

NAME = "other"
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")  # for the device
INDEXING = ("aten::index", "aten::_index_put_impl_")  # as on a GPU, the second argument may be indices of the CPU
_behind: dict[int, Tensor] = {}  # by storage: autograd makes tensors that share it


class Transfer(NamedTuple):
    """Copy of a tensor between CPU and device."""

    shape: tuple[int, ...]
    to: str


TRANSFERS: list[Transfer] = []
_here = threading.local()  # ``recording``: whether this thread records


def behind(tensor: Tensor) -> Tensor:
    """Return the CPU tensor behind one of the device."""
    found = _behind[tensor.untyped_storage()._cdata]
    viewed = found.shape != tensor.shape and found.numel() == tensor.numel()  # by torch, which makes some views itself
    return found.view(tensor.shape) if viewed else found


@contextmanager
def recording() -> Iterator[None]:
    """Refuse what a CUDA graph cannot record: operations that wait for the device, and tensors from the CPU."""
    _here.recording = True
    try:
        yield
    finally:
        _here.recording = False


def _called(recorded: Recorded[Any, Any], *args: Any) -> Any:
    with recording():
        return recorded.function(*args)


def start() -> torch.device:
    """Make the device known to torch, and return it."""
    Recorded.__call__ = _called  # type: ignore[method-assign]
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    fallback.fallback(_run, dispatch_key="PrivateUse1")
    library.impl("convolution_overrideable", _convolve, dispatch_key="PrivateUse1")
    library.impl("convolution_backward_overrideable", _convolve_backward, dispatch_key="PrivateUse1")
    Tensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    torch.UntypedStorage.cpu = _to_cpu  # type: ignore[method-assign]
    torch.get_device_module(NAME).get_amp_supported_dtype = lambda: []  # checkpointing asks for it
    return torch.device(NAME, 0)


_deepcopy_of_torch, _to_cpu_of_torch = Tensor.__deepcopy__, torch.UntypedStorage.cpu


def _to_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copy a storage, as ``torch.save`` does."""
    here = storage.device.type != NAME
    return _to_cpu_of_torch(storage) if here else _behind[storage._cdata].contiguous().untyped_storage().clone()


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor without its storage, which is empty on the device."""
    if tensor.device.type != NAME:
        return _deepcopy_of_torch(tensor, memo)
    return memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))


library = torch.library.Library("aten", "IMPL")
fallback = torch.library.Library("_", "IMPL")


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the tensors behind; one that works in place returns its own argument."""
    if getattr(_here, "recording", False):
        masks = (
            [i for i in args[1] if i is not None and i.dtype == torch.bool]
            if operation._schema.name in INDEXING
            else []
        )
        if operation._schema.name in WAITING or masks:
            raise RuntimeError(f"{operation} waits for the device while it records")
    if operation._schema.name == "aten::_copy_from":
        return _copy(*args)
    if operation._schema.name == "aten::view":  # torch takes every tensor of the device for contiguous
        return _wrapped(behind(args[0]).reshape(args[1]))
    if operation._schema.name == "aten::as_strided":
        return _as_strided(*args)
    indices = [id(index) for index in args[1]] if operation._schema.name in INDEXING else []
    given: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the tensor behind: this, and that of the device

    def inner(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == NAME:
            tensor = behind(value)
            if operation._schema.name == "aten::_fused_adam_":
                tensor = tensor.contiguous()  # it trusts the strides that autograd sees
            given[id(tensor)] = tensor, value
            return tensor
        if isinstance(value, Tensor) and value.dim() and id(value) not in indices:
            raise RuntimeError(f"{operation} got tensors of two devices")
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    def outer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)][1] if id(value) in given else _wrapped(value)

    moved = tree_map(inner, (args, kwargs))
    kinds = [str(argument.type) for argument in operation._schema.arguments]
    numbers = [kind == "Tensor" and isinstance(value, int) for kind, value in zip(kinds, moved[0], strict=False)]
    moved_args = [torch.tensor(x) if number else x for x, number in zip(moved[0], numbers, strict=True)]
    result = operation(*moved_args, **moved[1])
    for tensor, outside in given.values():
        if tensor.shape != outside.shape:  # an output that was resized
            outside.data = _wrapped(tensor)
    return tree_map(outer, result)


def _copy(source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
    inner = [behind(tensor) if tensor.device.type == NAME else tensor for tensor in (source, destination)]
    inner[1].copy_(inner[0])
    if source.device != destination.device:
        if getattr(_here, "recording", False):
            raise RuntimeError("a transfer between CPU and device while it records")
        TRANSFERS.append(Transfer(tuple(source.shape), destination.device.type))
    return destination


def _convolve(source: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return _wrapped(torch.convolution(behind(source), behind(weight), None if bias is None else behind(bias), *options))


def _convolve_backward(gradient: Tensor, source: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    *options, mask = options
    inner = (behind(tensor) for tensor in (gradient, source, weight))
    backward = torch.ops.aten.convolution_backward(*inner, [len(weight)], *options, mask)
    return tuple(None if part is None else _wrapped(part) for part in backward)


def _as_strided(tensor: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    """Torch takes every tensor of the device for contiguous, with a storage of its own."""
    inner = behind(tensor).contiguous()
    return _wrapped(inner.as_strided(size, stride, inner.storage_offset() + (offset or 0)))


def _wrapped(tensor: Tensor) -> Tensor:
    outer: Tensor = torch._C._acc.create_empty_tensor(tensor.shape, tensor.dtype)  # type: ignore[attr-defined]
    _behind[outer.untyped_storage()._cdata] = tensor
    return outer
